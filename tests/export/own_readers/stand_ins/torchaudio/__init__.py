"""Stands for torchaudio, which LLaMA-Factory imports for sounds, and which has no build for every torch."""
