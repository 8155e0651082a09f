"""Training, which needs torch: a missing one is reported here, for every module of this package."""

from chatmill.errors import need

need("torch", "running a model")
