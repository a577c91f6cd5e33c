"""Programs of a cluster that store into each other's shared memory, by single instructions: Pallas has none for it.

A member makes a barrier that counts bytes (`make`, `expect`), and all warpgroups of all members say that they have
begun (`arrive`). Whoever has waited for that (`wait`) may `store` to the others, and a member has all that it was sent
when `receive` returns. Who sends may end before it has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

#: Threads of a warpgroup.
LANES = 128
SCALAR = plgpu.Layout.WG_SPLAT(())


def barrier() -> Any:
    """A barrier's place in shared memory: one of its own, for others must know where it is."""
    return plgpu.SMEM((2,), jnp.uint32)


def make(met: Any) -> None:
    """A barrier that waits for one `expect`, and for its bytes; by one warpgroup, before it arrives."""

    def run(_: Any, met: Any) -> None:
        with utils.when(_first()):
            ptx("mbarrier.init.shared::cta.b64 [$0], $1;", place(met), constant(1))
            ptx("fence.mbarrier_init.release.cluster;")

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(run)(met)


def expect(met: Any, size: Any) -> None:
    """Says how many bytes a member is sent; by one warpgroup."""

    def run(_: Any, met: Any, size: Any) -> None:
        with utils.when(_first()):
            ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", place(met), size.registers.item())

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))(run)(met, size)


def arrive() -> None:
    """A warpgroup has begun, and what it made can be seen. Every one of all members arrives once."""

    def run(_: Any) -> None:
        ptx("bar.warp.sync -1;")  # "aligned": all threads of a warp at once
        ptx("barrier.cluster.arrive.relaxed.aligned;")

    plgpu.inline_mgpu()(run)()


def wait() -> None:
    """Until all members' warpgroups have begun. Each of them waits once."""

    def run(_: Any) -> None:
        ptx("bar.warp.sync -1;")
        ptx("barrier.cluster.wait.acquire.aligned;")

    plgpu.inline_mgpu()(run)()


def receive(met: Any) -> None:
    """Until a member has been sent all that it expects; of what others wrote, a wait must name their scope."""

    def run(_: Any, met: Any) -> None:
        again = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], 0;"
        ptx(f"{{ .reg .pred done; again: {again} @!done bra again; }}", place(met))

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(run)(met)


# Within `inline_mgpu`.


def store(ref: Any, at: Any, met: Any, whose: Any, two: Sequence[Any]) -> None:
    """Two floats of a thread, from value `at` on of a member's array of shared memory; its barrier counts them."""
    to = utils.getelementptr(utils.memref_ptr(ref), [at], ir.F32Type.get())
    theirs = (utils.get_cluster_ptr(x, whose, generic=False) for x in (to, utils.memref_ptr(met)))
    i32 = ir.IntegerType.get_signless(32)
    code = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [$0], {$2, $3}, [$1];"
    ptx(code, *(llvm.ptrtoint(i32, x) for x in theirs), *two)


def constant(value: int) -> Any:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def ptx(code: str, *operands: Any) -> None:
    """An instruction of integers and floats."""
    kinds = ["f" if isinstance(x.type, ir.F32Type) else "r" for x in operands]
    constraints = ",".join([*kinds, "~{memory}"])
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [*operands], code, constraints, has_side_effects=True)


def place(ref: Any) -> Any:
    """Where it is in shared memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def _first() -> Any:
    """Whether a thread is its warpgroup's first."""
    return arith.cmpi(arith.CmpIPredicate.eq, arith.remui(utils.thread_idx(), constant(LANES)), constant(0))
