"""python -m jaxspec.bench serve: load for a running server, and what its clients saw."""
