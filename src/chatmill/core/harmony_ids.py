"""The ids of o200k Harmony that the distillation dataset speaks of."""

from __future__ import annotations

BOS = 199998
EOD = 199999
"""`<|endoftext|>`: once after every conversation, not trained."""
RETURN, CHANNEL, START, END, CALL = 200002, 200005, 200006, 200007, 200012
CHANNEL_NAMES = {1: 35644, 2: 17196}
"""The token behind `<|channel|>` in each span: `analysis` in 1, `final` in 2."""
VOCAB_SIZE = 201088
"""Ids of o200k Harmony, padded."""
UNUSED = 201087
"""The last reserved id: no text and no message becomes it."""
