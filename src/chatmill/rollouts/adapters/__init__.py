"""Adapters: renderers in the classes and functions that other packages take."""
