"""Types that all packages share: conversations and tokens as columns, kinds, shifts and special ids.

NumPy and the standard library alone; it imports no other package of Chatmill but the errors.
"""
