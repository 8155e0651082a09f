"""Fixtures that several tests share (real tokenizers, loaded once per process, real conversations), and settings.

No test may depend on how fast the machine is, nor on how the suite was started.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests share the cores: threads that wait for each other only cost time
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")  # else torch leaves a file in /tmp for each process, on some machines

from chatmill import errors
from chatmill.core.conversation import Conversation
from chatmill.read.conversations import ConversationFile
from tests.data.tokenizer_files import loaded
from tests.engines_once import share_engines
from tests.forked import share_forks, work_here
from tests.ray_cluster import ray_address

__all__ = ["ray_address"]

errors.are_faults_raised = True  # else a fault of Chatmill is one refused record among others, and tests may not see it
EXAMPLES = "CHATMILL_TEST_EXAMPLES"
"""Set to `all`, as in `make test-slow`, property tests run all their examples, new ones each time; else a sixth."""
settings.register_profile(
    "any_machine",
    deadline=None,
    derandomize=os.environ.get(EXAMPLES) != "all",
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any_machine")
FEW = 12


def pytest_configure(config: pytest.Config) -> None:
    """Tests of the CPU are those of the CPU on a machine with GPUs, too; processes of one run share what is costly."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        share_forks()
    if "not gpu" in (config.option.markexpr or ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # No test of the CPU compiles a model, but importing megatron-core would load torch's compiler, for seconds.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(EXAMPLES) == "all":
        return
    tests = {getattr(item.obj, "__func__", item.obj) for item in items if isinstance(item, pytest.Function)}
    for test in tests:
        asked = getattr(test, "_hypothesis_internal_use_settings", None)
        if isinstance(asked, settings) and asked.max_examples > FEW:
            fewer = max(asked.max_examples // 6, FEW)
            test._hypothesis_internal_use_settings = settings(asked, max_examples=fewer)  # type: ignore[union-attr]


def pytest_collectstart() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """What is there now stays: the garbage collector need not look through modules and thousands of tests each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with Ctrl-C ignored, and their children inherit that; the processes that tests
    # interrupt would run on. A handler is not inherited, so they begin with the default.
    signal.signal(signal.SIGINT, signal.default_int_handler)

DATA = Path(__file__).parent / "data"
CONVERSATION_FILES = sorted((DATA / "conversations").glob("*.jsonl.gz"))


@pytest.fixture(scope="session", autouse=True)
def _what_costs_time_and_is_not_tested() -> Iterator[None]:
    """No test pulls the plug, and a killed process loses nothing that it wrote. Processes that tests start do sync."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: os.fstat(file if isinstance(file, int) else file.fileno()))
        share_engines(patch.setattr)
        work_here(patch.setattr)
        yield


@pytest.fixture(scope="module", autouse=True)
def _what_stays_is_looked_through_once() -> Iterator[None]:
    """Garbage of a module goes at its end; libraries and tokenizers that it has loaded stay, as above."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def qwen3() -> Any:
    return loaded("qwen3")


@pytest.fixture(scope="session")
def gpt2() -> Any:
    return loaded("gpt2")


@pytest.fixture(scope="session")
def o200k() -> Any:
    return loaded("o200k")


@pytest.fixture(scope="session")
def real_conversations() -> Callable[[int], list[Conversation]]:
    """The first `n` conversations of every bundled source."""

    assert len(CONVERSATION_FILES) >= 15
    return lambda n: [one for path in CONVERSATION_FILES for one in islice(ConversationFile(path), n)]
