"""Checkpoints in and out: Hugging Face directories (safetensors) and draft heads."""
