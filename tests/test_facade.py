"""The package's face: every public name is importable, and importing is free."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import chatmill
from chatmill._facade import PUBLIC

HEAVY = ("torch", "transformers", "megatron", "ray", "datasets", "numpy", "gigatoken", "pyarrow", "pydantic")


def test_public_names_are_listed() -> None:
    """That each can be imported, and is what its page says, is shown by test_api_page.py."""
    assert dir(chatmill) == sorted(chatmill.__all__)
    assert {"__version__", *PUBLIC} == set(chatmill.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        chatmill.no_such_name  # noqa: B018


def test_no_public_name_is_a_room_of_the_house() -> None:
    """`chatmill.render` is a package: a function of that name would be hidden by importing it."""
    rooms = {path.name.removesuffix(".py") for path in Path(chatmill.__file__).parent.iterdir()}
    assert not rooms & set(PUBLIC)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert run_python(f"import chatmill, sys; print([m for m in {HEAVY!r} if m in sys.modules])") == "[]"


def test_the_whole_face_without_torch_works() -> None:
    """What needs no tensors is importable where torch is not installed."""
    names = sorted(name for name, module in PUBLIC.items() if not module.startswith(("load.", "train.", "megatron")))
    code = f"""
import sys
sys.modules["torch"] = None
import chatmill
for name in {names!r}:
    getattr(chatmill, name)
print("ok")
"""
    assert run_python(code) == "ok"


def test_version_is_the_one_of_the_project() -> None:
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    assert f'version = "{chatmill.__version__}"' in pyproject.read_text()


PARAMETERS = {
    "post_training_loss_mask": "ids, *, system_id, user_id, assistant_id, end_id, eos_id",
    "pack_post_training_stream": (
        "records, *, block_size, system_id, user_id, assistant_id, end_id, eos_id, drop_last=False"
    ),
    "post_training_targets": "input_ids, loss_mask, ignore_index=-100",
    "conversation_to_transcript": "conversation, *, tokenizer, context_length",
    "block_tokenize_fn": (
        "features, tokenizer, feature, max_length=512, overflow=True, packed=False, packing_strategy='greedy', "
        "shuffle_output=False, seed=42, stride=0, min_len=1, max_len=None, add_bos=True, add_eos=True, truncate_at=None"
    ),
    "DataCollatorForCausalLM": (
        "tokenizer, truncation=False, ignore_index=-100, input_name='input_ids', labels_name='labels', "
        "packed_sequences=None, mask_document_starts=True, return_flattened=False, return_cu_seqlens=False, "
        "cu_seqlens_size=None, return_seq_idx=False, return_document_mask=False, **pad_kwargs"
    ),
    "get_pos_ids_for_packed_sequence": "x, token_id=None, document_starts=None, eos=True",
    "load_training_config": "path",
    "make_loader": "config, dataset_dir, tokenizer=None",
    "GPTDataLoader": "config, tokenizer=None, dataset_dir=None, use_loss_mask=False, *, rank=None, world_size=None",
    "GPTEpisodeDataLoader": (
        "config, tokenizer=None, dataset_dir=None, *, use_loss_mask=None, batch_sampling_mode=None, "
        "epoch_shuffle=None, epoch_drop_last=None, epoch_seed=None, pad_token_id=None, episode_min_tokens=None, "
        "device=None, pack=False, rank=None, world_size=None"
    ),
    "EpisodeWriter": "dir, split, shard_tokens=None",
}
"""Parameters of the functions and classes that the specifications fix; further optional ones may be there."""


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameters_are_those_of_the_specification(name: str) -> None:
    fixed: dict[str, object] = {}
    exec(f"def written({PARAMETERS[name]}): ...", fixed)
    wanted = inspect.signature(fixed["written"]).parameters  # type: ignore[arg-type]
    given = inspect.signature(getattr(chatmill, name)).parameters
    in_order = [p for p in given.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    for place, parameter in enumerate(wanted.values()):
        own = given[parameter.name]
        assert own.kind is parameter.kind
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert in_order[place].name == parameter.name
        assert own.default == parameter.default or parameter.default is parameter.empty
    assert all(given[n].default is not inspect.Parameter.empty for n in given.keys() - wanted.keys() if n != "options")


def test_the_other_names_of_the_specifications_are_public() -> None:
    others = {
        *("IGNORE_INDEX", "DEFAULT_SYSTEM_TEXT", "ChatMsg", "ChatExample", "serialize_chat_to_ids", "PackedStream"),
        *("sft_loss_mask_for_ids", "pack_sft_ids_and_mask", "collate_sft_batch", "EpisodeDataset", "check_isolation"),
    }
    assert others | set(PARAMETERS) <= set(PUBLIC)
    assert chatmill.IGNORE_INDEX == -100
