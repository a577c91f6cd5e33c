"""The programs of this library's operations: each one's cases, as its kernels are launched on the target.

Owns the limits: what a kernel may take for intermediate values, from its arguments alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.aot.programs import Program, lowering
from pallas_kernels.aot.targets import Target
from pallas_kernels.rejection_sampling import cases as sampling_cases
from pallas_kernels.rejection_sampling import gpu as sampling_gpu
from pallas_kernels.rejection_sampling import tpu as sampling_tpu
from pallas_kernels.tree_attention import cases as attention_cases
from pallas_kernels.tree_attention import gpu as attention_gpu
from pallas_kernels.tree_attention import tpu as attention_tpu

#: Bytes of the page pools: as large as a whole model's, whose layers lie in one array. A copy of one stands out (a TPU
#: hides a small one in its VMEM), and GPU kernels address it with 64 bits.
POOL_BYTES = 6 << 30
#: Partial sums of a prefix that is split so as to fill the device: 2 programs for each of 148 multiprocessors,
#: 64 rows of 128 float32 channels, and a margin.
PARTIAL_BYTES = 16 << 20


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def placed(tree: Any, mesh: Mesh) -> Any:
    """Shapes that lie whole on every device of a mesh."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)


_LANES = 128

_QUICK_ATTENTION = {"verify8-b8-8k", "d256", "window", "prior-levels"}


def tree_attention(target: Target) -> Iterator[Program]:
    """Every case but the interpreters' small ones, over a large pool in the layout that the target's kernel asks for.

    On a TPU that means whole tiles of lanes: where 2C is no multiple of 128, XLA copies a narrower pool for the kernel.
    """
    mesh = target.mesh()
    device = mesh.devices.flat[0]
    for plain in (*attention_cases.SERVING, *attention_cases.COVERAGE):
        itemsize = jnp.dtype(plain.dtype).itemsize
        page_bytes = plain.kv_heads * plain.page * 2 * plain.head_dim * itemsize
        case = dataclasses.replace(plain, pool=max(plain.num_pages, POOL_BYTES // page_bytes))
        shapes: dict[str, Any] = {**case.shapes()}
        if target.kind == "gpu":
            rows = case.nodes * case.heads // case.kv_heads
            blocks = attention_gpu.blocks_for(case.head_dim, jnp.dtype(case.dtype), rows, device.device_kind)
            kernel = functools.partial(attention_gpu.tree_attention, blocks=blocks, **case.options)
            refusal = attention_gpu.refusal(*shapes.values())
        else:
            *pool, width = shapes["pages"].shape
            shapes["pages"] = jax.ShapeDtypeStruct((*pool, _up(width, _LANES)), shapes["pages"].dtype)
            cores = min(device.num_cores, case.kv_heads)
            kernel = functools.partial(attention_tpu.tree_attention, cores=cores, **case.options)
            refusal = attention_tpu.refusal(*shapes.values(), window=case.window, cores=cores)
        rows = case.batch * _up(case.nodes, 8) * case.heads
        entries = case.batch * _up(case.prior + case.nodes, _LANES) * case.kv_heads
        yield Program(
            op="tree_attention",
            name=case.name,
            lower=lowering(kernel, placed(list(shapes.values()), mesh), target, mesh),
            max_temp_bytes=2 * itemsize * _up(case.head_dim, _LANES) * (rows + entries) + PARTIAL_BYTES,
            limit="queries, results and the tree in the kernel's layout, and partial sums",
            kernels=("tree_attention",),
            refusal=refusal,
            quick=case.name in _QUICK_ATTENTION,
        )


_QUICK_SAMPLING = {"coupled-b16-n16", "chain3-b1-greedy", "chain4-b16-rejection"}


def rejection_sampling(target: Target) -> Iterator[Program]:
    """Every case but the interpreters' small ones.

    Logits are results of products, and XLA lays those out on a TPU as their reader wants them; so here.
    """
    mesh = target.mesh()
    device = mesh.devices.flat[0]
    whole = NamedSharding(mesh, PartitionSpec())
    chosen = Format(Layout.AUTO, whole) if target.kind == "tpu" else whole
    for case in (*sampling_cases.SERVING, *sampling_cases.COVERAGE):
        shapes, options = case.shapes(), case.options
        formats = tuple(chosen if name in ("logits", "draft_probs") else whole for name in shapes)
        static = {"depth": options["depth"], "greedy": options["greedy"]}
        if target.kind == "gpu":
            launch = sampling_gpu.launch_for(device.device_kind, case.options["greedy"])
            kernel = functools.partial(sampling_gpu.rejection_sampling, launch=launch, **options)
            refusal = sampling_gpu.refusal(shapes["logits"], shapes.get("draft_probs"), **static)
        else:
            kernel = functools.partial(sampling_tpu.rejection_sampling, **options)
            refusal = sampling_tpu.refusal(shapes["logits"], shapes.get("draft_probs"), **static)
        yield Program(
            op="rejection_sampling",
            name=case.name,
            lower=lowering(kernel, shapes.values(), target, mesh, in_shardings=formats),
            max_temp_bytes=1 << 20,
            limit="nothing of the vocabulary's size",
            kernels=("rejection_sampling",),
            refusal=refusal,
            quick=case.name in _QUICK_SAMPLING,
        )
