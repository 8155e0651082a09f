"""Files on disk, to the byte: episodes, shards, manifests, Megatron and distillation sets, checked when opened."""
