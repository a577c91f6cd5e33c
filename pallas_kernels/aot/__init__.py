"""Proof by the real TPU and GPU compilers, on machines without the hardware.

`targets` describes absent devices, `programs` what there is to compile, `operations` this
library's part of it, `worker` compiles for one target and judges, `ptx` asks ptxas for
registers and spills, `table` prints. The command is `python -m pallas_kernels.aot`.
"""
