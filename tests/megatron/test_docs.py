"""The code of docs/megatron.md is that of the examples."""

from __future__ import annotations

import re
import textwrap

from chatmill.systems.synth_kd import KDSplit, synth_kd_split
from tests.distill.inputs import real_rows
from tests.pages import DOCS, python_blocks

EXAMPLES = DOCS.parent / "examples" / "megatron"


def test_the_snippets_of_the_megatron_page_are_those_of_the_examples() -> None:
    """Their functions are run by test_training.py, on ranks and in one process, and by test_sidecars.py."""
    blocks = python_blocks("megatron.md")
    assert len(blocks) >= 7
    sources = [path.read_text() for path in sorted(EXAMPLES.glob("*.py"))]
    for block in blocks:
        indented = [textwrap.indent(block, " " * width) for width in (0, 4)]
        assert any(text in source for text in indented for source in sources), block


def test_the_share_of_the_page_gives_both_splits() -> None:
    """Of the bundled rows, which is what a reader tries first; the default gives no `valid` there, as the page says."""
    ids = [row["synth_id"] for row in real_rows()]
    assert {synth_kd_split(one) for one in ids} == {KDSplit.TRAIN}
    for text in ((DOCS / "megatron.md").read_text(), (EXAMPLES / "pretrain_synth_kd.py").read_text()):
        shares = re.findall(r"synth-kd .*--valid-fraction ([\d.]+)", text)
        assert shares
        assert all({synth_kd_split(one, float(share)) for one in ids} == set(KDSplit) for share in shares)
