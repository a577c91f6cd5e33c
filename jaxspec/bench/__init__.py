"""Benchmarks of the engine against its own plain decoding. `python -m jaxspec.bench --help`."""
