"""Whole formats under the names of their specifications, each put together from the other packages.

Token-native SFT, the post-training stream, document boundaries and Harmony distillation.
"""
