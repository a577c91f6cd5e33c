"""python -m jaxspec.bench report: a run or a simulation as one page that needs nothing else."""
