"""The compiled part: one small C library, loaded by ctypes, and the Python that calls it.

Every function is compared in the tests with a slow twin in Python (`tests/oracles.py`).
"""
