"""Training, which needs torch: a missing one is said here, for every module of this room."""

from chatmill.errors import need

need("torch", "training and sampling")
