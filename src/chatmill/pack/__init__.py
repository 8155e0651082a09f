"""Rows of a fixed size: plans from lengths to bins, and what happens to conversations that are too long."""
