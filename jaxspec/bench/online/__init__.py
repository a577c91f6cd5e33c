"""A load on a running server: `python -m jaxspec.bench serve`."""
