"""Chat templates in Jinja: run on strings that remember their origin, so that every character's part is known."""
