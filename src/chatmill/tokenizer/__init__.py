"""Text to ids: every vocabulary is a `Tokenizer`, with a fast engine that is checked against a reference."""
