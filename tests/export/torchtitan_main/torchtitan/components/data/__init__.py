"""Datasets, packing, collators and loaders; the module `torchtitan.components.dataloader` of 0.3.0 is gone."""
