"""The training config: XML, YAML and keyword arguments, and every mistake in them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chatmill.core.special_ids import special_id
from chatmill.errors import ConfigError, TokenizerError
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.load.config import TrainingConfig, as_training_config, load_training_config

VALUES = {
    "batch_size": 8,
    "block_size": 1024,
    "dataset_mode": "sft_episode",
    "batch_sampling_mode": "random",
    "epoch_shuffle": False,
    "epoch_drop_last": False,
    "epoch_seed": 7,
    "use_loss_mask": True,
    "pad_token_id": 50256,
    "episode_min_tokens": 4,
}
NEEDED = "<batch_size>2</batch_size><block_size>4</block_size>"


def xml(tmp_path: Path, inner: str) -> Path:
    path = tmp_path / "config.xml"
    path.write_text(f"<config>\n<training>\n{inner}\n</training>\n</config>\n")
    return path


def test_xml_yaml_and_keywords_give_the_same_config(tmp_path: Path) -> None:
    texts = {name: str(value).lower() for name, value in VALUES.items()} | {"epoch_drop_last": "False"}
    elements = "\n".join(f"<{name}> {text}</{name}>" for name, text in texts.items())
    path = xml(tmp_path, elements)
    path.write_text(path.read_text().replace("<config>", "<config><model><batch_siz>no option</batch_siz></model>"))
    config = load_training_config(path)
    assert {name: getattr(config, name) for name in VALUES} == VALUES
    lines = [f"  {name}: {text}" for name, text in texts.items()]
    for name, text in (
        ("nested.yaml", "\n".join(["config:", " training:", *lines])),
        ("section.yml", "\n".join(["model: {x: 1}", "training:", *lines])),
        ("flat.yaml", "\n".join(line.strip() for line in lines)),
    ):
        (tmp_path / name).write_text(text)
        assert load_training_config(tmp_path / name) == config
    assert load_training_config(**VALUES) == config
    assert TrainingConfig(**VALUES) == config
    assert as_training_config(VALUES) == config
    assert as_training_config(SimpleNamespace(**VALUES, unrelated=1)) == config


def test_training_may_be_the_root_and_defaults_are_those_of_the_page(tmp_path: Path) -> None:
    path = tmp_path / "c.xml"
    path.write_text(f"<training>{NEEDED}</training>")
    config = load_training_config(path)
    assert (config.dataset_mode, config.batch_sampling_mode) == ("token_stream", "random")
    assert (config.epoch_shuffle, config.epoch_drop_last, config.use_loss_mask) == (True, True, False)
    assert (config.epoch_seed, config.episode_min_tokens, config.pad_token_id) == (1337, 2, None)
    episodes = load_training_config(path, dataset_mode="sft_episode")
    assert episodes.batch_sampling_mode == "epoch"
    assert config.replace(dataset_mode="sft_episode").batch_sampling_mode == "epoch"
    assert episodes.replace(batch_sampling_mode="random").batch_sampling_mode == "random"


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        ("<batch_size>2</batch_size>", [":2:", "<block_size>", "required"]),
        ("<batch_size>2</batch_size>\n<block_size>x</block_size>", [":4:", "<block_size>", "'x'", "whole number"]),
        ("<batch_size>2.5</batch_size><block_size>4</block_size>", [":3:", "<batch_size>", "whole number"]),
        ("<batch_size>0</batch_size><block_size>4</block_size>", ["<batch_size>", "0", "at least 1"]),
        (NEEDED + "\n<dataset_mode>sft</dataset_mode>", [":4:", "<dataset_mode>", "'token_stream' or 'sft_episode'"]),
        (NEEDED + "\n<batch_sampling_mode>all</batch_sampling_mode>", [":4:", "'random' or 'epoch'"]),
        (NEEDED + "\n\n<epoch_shuffle>yes please</epoch_shuffle>", [":5:", "<epoch_shuffle>", "true or false"]),
        (NEEDED + "<epoch_seed>-1</epoch_seed>", ["<epoch_seed>", "-1", "at least 0"]),
        (NEEDED + "<pad_token_id></pad_token_id>", ["<pad_token_id>", "whole number"]),
        (NEEDED + "<pad_token_id><x>1</x></pad_token_id>", ["<pad_token_id>"]),
        (NEEDED + "<episode_min_tokens>0</episode_min_tokens>", ["<episode_min_tokens>", "at least 1"]),
        (NEEDED + "\n<batch_size>3</batch_size>", [":4:", "<batch_size>", "a second", ":3)"]),
        (NEEDED + "\n<bach_size>3</bach_size>", [":4:", "<bach_size>", "did you mean <batch_size>"]),
        (NEEDED + "\n<Epoch-Seed>3</Epoch-Seed>", [":4:", "did you mean <epoch_seed>"]),
        (NEEDED + "<use_lossmask>true</use_lossmask>", ["did you mean <use_loss_mask>"]),
        (NEEDED + "<pad_tokenid>8</pad_tokenid>", ["did you mean <pad_token_id>"]),
        (NEEDED + "<epochseed>8</epochseed>", ["did you mean <epoch_seed>"]),
    ],
)
def test_mistakes_name_line_element_and_what_is_allowed(tmp_path: Path, inner: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_training_config(xml(tmp_path, inner))
    for part in ["config.xml", *says]:
        assert part in str(caught.value)


def test_other_unknown_elements_are_kept_and_named_in_one_warning(tmp_path: Path) -> None:
    path = xml(tmp_path, NEEDED + "<learning_rate>1e-4</learning_rate><vocab_size>99</vocab_size><o><p>1</p></o>")
    with pytest.warns(UserWarning, match="not options of the loaders") as caught:
        config = load_training_config(path)
    assert len(caught) == 1
    assert "learning_rate, vocab_size, o" in str(caught[0].message)
    assert config.extra == {"learning_rate": "1e-4", "vocab_size": "99", "o": {"p": "1"}}
    assert config.learning_rate == "1e-4"
    with pytest.raises(AttributeError, match="no_such"):
        _ = config.no_such
    # What training sections really hold is no misspelling.
    names = ["devices", "pad_token", "patch_size", "eval", "epoch", "dataset_model_name", "eos_token_id"]
    with pytest.warns(UserWarning, match=f"kept as they are: {', '.join(names)}"):
        load_training_config(xml(tmp_path, NEEDED + "".join(f"<{name}>8</{name}>" for name in names)))


BOMB = """<!DOCTYPE bomb [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">
<!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;"><!ENTITY d "&c;&c;&c;&c;&c;&c;&c;&c;">]>
<training><batch_size>&d;</batch_size><block_size>4</block_size></training>"""
EXTERNAL = '<!DOCTYPE t [<!ENTITY x SYSTEM "file:///etc/hostname">]><training><batch_size>&x;</batch_size></training>'


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("c.xml", BOMB, "entity"),
        ("c.xml", EXTERNAL, "entity"),
        ("c.xml", '<!DOCTYPE t [<!ENTITY % x SYSTEM "http://localhost/x.dtd"> %x;]><training/>', "entity"),
        ("c.xml", "<training><batch_size>1</training>", "not well-formed"),
        ("c.xml", "<config><other/></config>", "<training>"),
        ("c.xml", f"<config><training>{NEEDED}</training>\n<training/></config>", "a second <training>"),
        ("c.yaml", "batch_size: '2'\nblock_size: 4\n", "<batch_size>: should be a whole number (found '2')"),
        ("c.yaml", "training: [1, 2]\n", "mapping"),
        ("c.yaml", "a: [1\n", "not YAML"),
        ("c.yaml", "training:\n  batch_size: 2\n  blok_size: 4\n", "did you mean <block_size>"),
        ("c.yaml", "", "mapping"),
        ("c.xml", None, "c.xml"),
    ],
)
def test_unsafe_or_broken_files_are_one_clear_error(tmp_path: Path, name: str, text: str | None, says: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_training_config(path)
    assert says in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("value", [float("inf"), 1.5, True, "x"])
def test_what_is_no_whole_number_is_one_clear_error(value: object) -> None:
    with pytest.raises(ConfigError, match=r"<batch_size>: should be a whole number"):
        load_training_config(batch_size=value, block_size=8)


def test_special_ids_are_numbers_or_methods_and_minus_one_is_none() -> None:
    def sentencepiece(eos: int) -> Any:
        return SimpleNamespace(eos_id=lambda: eos, pad_id=lambda: -1)

    for tokenizer, eos in (
        (sentencepiece(2), 2),
        (sentencepiece(-1), None),
        (SimpleNamespace(eos_id=-1), None),
        (SimpleNamespace(eos_token_id=np.int64(7)), 7),
    ):
        assert special_id(tokenizer, "eos") == eos
    assert special_id(sentencepiece(2), "pad") is None
    with pytest.raises(TokenizerError, match=r"gives \[1, 2\] as eos_token_id"):
        special_id(SimpleNamespace(eos_token_id=[1, 2]), "eos")
    assert DataCollatorForCausalLM(sentencepiece(5)).pad_id == 5
