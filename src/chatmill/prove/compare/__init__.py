"""Comparing two builds: which record is which, and what changed in it."""
