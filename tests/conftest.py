"""Strict JAX on the CPU for every test: no implicit promotion, exact float32 products, several devices."""

from __future__ import annotations

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_num_cpu_devices", 4)
