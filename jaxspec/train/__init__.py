"""Training of targets and drafters (optax, orbax); never imports the engine or its runtime."""
