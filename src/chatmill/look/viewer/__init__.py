"""The web viewer: a small local server over datasets that are only mapped, and plain pages in the browser."""
