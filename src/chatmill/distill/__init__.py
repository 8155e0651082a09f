"""Distillation: Harmony conversations made from chats, and the token data that a student model learns from."""
