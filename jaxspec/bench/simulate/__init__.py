"""python -m jaxspec.bench simulate and report: policies and scheduler on a clock of their own, without a device."""
