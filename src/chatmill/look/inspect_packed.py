"""One packed block of Arrow or Parquet files, ready to be shown."""

from __future__ import annotations

from chatmill.look.decoder import Decoder
from chatmill.look.item_view import ItemView, view_item
from chatmill.look.packed_rows import PackedRow
from chatmill.look.packed_split import item_of_row
from chatmill.tokenizer.protocol import Tokenizer


def view_block(row: PackedRow, tokenizer: Tokenizer | None = None) -> ItemView:
    """Cut a stored block into its documents and decode them."""
    return view_item(item_of_row(row), Decoder(tokenizer) if tokenizer else None)
