"""The engine without a server: workloads, measurements and reports of `python -m jaxspec.bench`."""
