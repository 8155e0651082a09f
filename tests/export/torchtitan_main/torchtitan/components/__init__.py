"""Parts of a trainer."""
