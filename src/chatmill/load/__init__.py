"""Batches from datasets on disk: order, packing, position and resuming; torch is imported by `collate` alone.

store --> rows (which episodes, in which order) --> loader --> batches
"""
