"""Builds: recipes, chunks, workers, and the finished dataset with its manifest."""
