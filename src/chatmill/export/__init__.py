"""Exports of a built dataset to other layouts."""
