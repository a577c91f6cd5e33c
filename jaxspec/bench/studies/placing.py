"""python -m jaxspec.bench.studies.placing: what a draft takes where devices share a head, and where each has it whole.

Random weights in the shapes of a head for a real model: an EAGLE-3 head of one layer, a DFlash head of five. For each
placement and number of rows: microseconds a draft, of many that follow one another in one executable, as engines
measure it at their start (runtime.placing), and the bytes of the head that a device reads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxspec.bench.studies import report
from jaxspec.bench.studies.rounds import SHAPES
from jaxspec.bench.studies.weights import random_weights
from jaxspec.models.base import ModelConfig
from jaxspec.models.layers import Linear, Shared
from jaxspec.models.layouts import tensor_parallel
from jaxspec.runtime import summing
from jaxspec.runtime.placing import seconds
from jaxspec.runtime.sharding import parameter_shardings, tensor_mesh
from jaxspec.speculation.drafter import Drafter
from jaxspec.speculation.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.speculation.drafters.cores import HeadCore
from jaxspec.speculation.drafters.dflash import BlockDrafter
from jaxspec.speculation.drafters.dflash_head import DflashConfig, DflashHead
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.state import Geometry
from jaxspec.tier import Tier


def _eagle3(cfg: ModelConfig, drafted: int, dtype: jnp.dtype) -> Eagle3Head:
    config = Eagle3Config(
        cfg.hidden_size, cfg.hidden_size, cfg.intermediate_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim,
        cfg.vocab_size, drafted, cfg.aux_layers, rope_theta=cfg.rope_theta,
    )  # fmt: skip
    return Eagle3Head(config, dtype=dtype)


def _dflash(cfg: ModelConfig, drafted: int, dtype: jnp.dtype) -> DflashHead:
    """With its target's tables."""
    layer = dataclasses.replace(cfg, family="qwen3", num_layers=5, qk_norm=True)
    output = Linear(1, 1, dtype=dtype, rngs=None)
    output.kernel = Shared(jnp.zeros((cfg.hidden_size, cfg.vocab_size), dtype))  # pyright: ignore
    table = Shared(jnp.zeros((cfg.vocab_size, cfg.hidden_size), dtype))
    return DflashHead(DflashConfig(layer, cfg.aux_layers, 8, 0, cfg.vocab_size), table, output, dtype=dtype)


HEADS: dict[str, Callable[..., Any]] = {"eagle3": _eagle3, "dflash": _dflash}


def bound(name: str, shape: str, dtype: jnp.dtype, mesh: Mesh, sums: str, geo: Geometry) -> tuple[Drafter, Any]:
    """(drafter, its parameters) of random weights, placed as `geo` says."""
    build = functools.partial(HEADS[name], *SHAPES[shape], dtype)
    lay_out = lambda: tensor_parallel(build(), mesh.size, sums, lent=geo.whole_drafter)
    head = random_weights(nnx.eval_shape(lay_out), 1, mesh)
    if isinstance(head, DflashHead):
        drafter = BlockDrafter(head, geo)
        return drafter, drafter.take_params()
    core = HeadCore(head)
    return AutoregressiveDrafter(core, geo), core.take_params()


def device_bytes(mesh: Mesh, params: Any) -> int:
    """Of parameters on one device."""
    sizes = jax.tree.map(
        lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, params, parameter_shardings(mesh, params)
    )
    return sum(jax.tree.leaves(sizes))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("placing", __doc__)
    add = parser.add_argument
    add("--tensor-parallel", type=int, default=2, metavar="N", help="devices")
    add("--shape", choices=sorted(SHAPES), default="8b", help="of the target")
    add("--head", nargs="+", choices=sorted(HEADS), default=list(HEADS), help="which, in this order")
    add("--rows", type=int, nargs="+", default=[1, 8, 32], help="texts that are drafted for")
    add("--depth", type=int, default=3, help="of a chain")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and cache")
    add("--sums", choices=sorted(summing.WAYS), default="nccl", help="how the devices add up")
    args = report.parse(parser, argv)
    mesh, way = tensor_mesh(args.tensor_parallel), summing.WAYS[args.sums]
    print(f"{mesh.size} x {jax.devices()[0].device_kind}, {args.shape} {args.dtype}, chain {args.depth}, sums by "
          f"{args.sums}, jax {jax.__version__}")  # fmt: skip
    print("head      rows  us whole  us shared  shared/whole  MB whole  MB shared", flush=True)
    found = []
    for name in args.head:
        bind = functools.partial(bound, name, args.shape, jnp.dtype(args.dtype), mesh, way.by)
        for rows in args.rows:
            took, held = {}, {}
            for whole in (True, False):
                geo = Geometry(rows, rows * 8, 64, 8, args.depth, whole_drafter=whole)
                took[whole] = 1e6 * seconds(bind, geo, mesh, Tier(args.depth), rows, way.options)
                held[whole] = device_bytes(mesh, jax.eval_shape(lambda geo=geo, bind=bind: bind(geo)[1])) / 1e6
            print(f"{name:8s} {rows:5d}  {took[True]:8.1f}  {took[False]:9.1f}  {took[False] / took[True]:12.2f}  "
                  f"{held[True]:8.1f}  {held[False]:9.1f}", flush=True)  # fmt: skip
            found.append({"head": name, "rows": rows, "us_whole": took[True], "us_shared": took[False]})
    report.write(args, "placing", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
