"""python -m jaxspec.bench adaptive: every policy on the real engine, under loads and texts that change."""
