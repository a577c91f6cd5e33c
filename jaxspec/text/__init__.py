"""Text at the engine's edge: tokenizer, chat template, incremental detokenization (no JAX)."""
