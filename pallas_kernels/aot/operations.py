"""The programs of this library's operations: each one's cases, as its kernel is launched on the target.

What a case is compiled with, and what it may take, is the case's own (`registry.Case.proof`).
An operation without a kernel for the target is compiled as its reference.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import registry
from pallas_kernels.aot.programs import Program, lowering
from pallas_kernels.aot.targets import Target


def programs(name: str, target: Target) -> Iterator[Program]:
    """Every case of an operation that the target's kernel serves, but the interpreters' small ones."""
    suite, mesh = registry.suite(name), target.mesh()
    ways = suite.operation.implementations
    implementation = ways.get(target.kind, ways["reference"])
    whole = NamedSharding(mesh, PartitionSpec())
    free = Format(Layout.AUTO, whole) if target.kind == "tpu" else whole
    for case in (*suite.serving, *suite.coverage):
        if target.kind not in case.kinds:
            continue
        proof = case.proof(target.kind, mesh.devices.flat[0])
        place = lambda path, _, fields=proof.free: free if path[0].name in fields else whole
        yield Program(
            op=name,
            name=case.name,
            lower=lowering(
                functools.partial(implementation.run, **proof.options), (proof.args,), target, mesh,
                in_shardings=(jax.tree_util.tree_map_with_path(place, proof.args),),
            ),
            max_temp_bytes=proof.max_temp_bytes,
            limit=proof.limit,
            kernels=(name,) if target.kind in ways else (),
            refusal=implementation.refusal(proof.args),
            quick=case.quick,
        )  # fmt: skip
