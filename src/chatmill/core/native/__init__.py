"""The compiled part: one small C library, loaded by ctypes, and the Python that calls it.

Every function has a slow twin in Python, which is used if there is no library.
"""
