"""Stands for torchtitan's main branch of August 2026, which is on no index: the protocol of its data loaders alone.

Written from its source (commit b5bcd76c6); nothing of it has been run here.
"""
