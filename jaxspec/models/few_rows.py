"""Decoder layers for few rows by the small-batch kernels: six launches a layer instead of some seventeen on a GPU, ten
instead of twenty-four where it has a mixture of experts.

Devices that share the weights run the same kernels on their own columns and inputs; what each has of the two sums of a
layer is added up between them.

Owns the order of the launches, and how weights are laid out for them; `few_rows_fit` says for which models. Must not
know what a kernel does inside. Rounding differs from the layers' own (a norm divides after the product), and is the
same for every number of rows that the kernels serve: what a row becomes does not depend on how many are verified beside
it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxspec.models import few_rows_fit
from jaxspec.models.base import Attend, answered, report_experts
from jaxspec.models.experts import MixtureOfExperts
from jaxspec.models.layers import MLP, Attention, Linear, RMSNorm, Shared, Transformer
from jaxspec.models.quantised import Quantised
from jaxspec.models.rope import Tables, apply_rope
from jaxspec.models.sharded import BY_XLA, SPLIT, SUMS, TENSOR_AXIS, laid_anew, parts_of, share_bytes, summed
from jaxspec.models.sharded import shards as devices
from pallas_kernels.sizes import round_up
from pallas_kernels.small_batch import (
    experts,
    gpu,
    gpu_experts,
    gpu_norms,
    gpu_packed_experts,
    gpu_router,
    packed,
    packed_experts,
    reference,
)
from pallas_kernels.small_batch.packed import Packed
from pallas_kernels.small_batch.reference import Stream


@dataclasses.dataclass(frozen=True)
class FewRows:
    """What a prepared model runs its layers by.

    Attributes:
      implementation: "gpu" or "reference".
      most: rows up to which it does; see `few_rows_fit.most_rows`.
      output: whether the output layer runs so too; one of few bits always does.
    """

    implementation: str = "gpu"
    most: int = few_rows_fit.FEW_ROWS
    output: bool = False

    def layers(
        self, model: Transformer, x_BNE: jax.Array, ropes: Sequence[Tables | None], attend: Attend
    ) -> list[jax.Array]:
        """See layers.LayerRunner."""
        return self.blocks(model.layers, model.norm, x_BNE, ropes, attend)

    def blocks(
        self, blocks: Sequence[Any], norm: RMSNorm, x_BNE: jax.Array, ropes: Sequence[Tables | None], attend: Attend,
        first_BNK: jax.Array | None = None,
    ) -> list[jax.Array]:  # fmt: skip
        """See layers.LayerRunner."""
        rope = ropes[0]  # of every layer, in models that are served
        assert rope is not None
        first = blocks[0].attn
        ways = _Ways(self.implementation == "gpu", first.shards, first.out.kernel.get_metadata(SUMS, BY_XLA))
        b, n, e = x_BNE.shape
        m, eps = b * n, norm.eps
        # [2, C/2, rows], a column for each token, and as many as the kernels pad to: one array, written by one kernel.
        tables_2Cm = jnp.stack([t.reshape(m, -1).T for t in rope])
        tables_2CR = jnp.pad(tables_2Cm, ((0, 0), (0, 0), (0, reference.padded(m) - m)))
        gains = [*(_gain(block.attn_norm) for block in blocks[1:]), _gain(norm)]
        h_ME, streams = _padded(x_BNE.reshape(m, e)), [x_BNE]
        if first_BNK is None:
            stream = reference.begin(h_ME, _gain(blocks[0].attn_norm), in_order=True)
        else:
            stream = _padded(first_BNK.reshape(m, -1))
        for i, layer in enumerate(blocks):
            attn, mlp, gain = layer.attn, layer.mlp, _gain(layer.mlp_norm)
            q, k, v = self._heads(ways, attn, stream, rope, tables_2CR, (b, n), eps)
            out_BNHC = attend(i, q, k, v, attn.options)
            if (h_BNE := answered(attend, i, streams[-1])) is not streams[-1]:
                if not h_BNE.size:
                    return [*streams, h_BNE, h_BNE]
                b, n, _ = h_BNE.shape
                m, h_ME = b * n, _padded(h_BNE.reshape(b * n, e))
            stream = ways.add(_padded(out_BNHC.reshape(m, -1)), attn.out.kernel[...], h_ME, gain)
            if isinstance(mlp, MLP):
                hidden = ways.swiglu(stream, mlp.gate_up.kernel[...], eps)
                stream = ways.add(hidden, mlp.down.kernel[...], stream.h_ME, gains[i])
            elif few_rows_fit.whole_mixture_refusal(mlp) is None:
                stream = ways.mixed(mlp, stream, m, gains[i], eps)
            elif mlp.packed and devices() == 1 and few_rows_fit.picks_refusal(mlp) is None:
                stream = ways.mixed_packed(mlp, stream, m, gains[i], eps)
            else:
                mixed = mlp(reference.normed(stream, gain, eps)[:m].reshape(b, n, e)).reshape(m, e)
                stream = reference.begin(stream.h_ME + _padded(mixed), gains[i])
            h_ME = stream.h_ME
            streams.append(h_ME[:m].reshape(b, n, e))
        assert isinstance(stream, Stream)
        return [*streams, ways.normed(stream, gains[-1], eps)[:m].reshape(b, n, e)]

    def _heads(
        self, ways: _Ways, attn: Attention, stream: Stream | jax.Array, rope: Tables, tables_2CR: jax.Array,
        shape: tuple[int, int], eps: float,
    ) -> Sequence[jax.Array]:  # fmt: skip
        """Queries, keys and values [B, N, heads, C]."""
        (b, n), c, t = shape, attn.head_dim, attn.shards
        counts, kernel = (attn.num_heads, attn.num_kv_heads, attn.num_kv_heads), attn.qkv.kernel[...]
        bias = None if attn.qkv.bias is None else attn.qkv.bias[...]
        norms = None if attn.q_norm is None or attn.k_norm is None else (attn.q_norm, attn.k_norm)
        if c == few_rows_fit.ROTATED and not (norms is not None and few_rows_fit.too_wide(attn)):
            gains = None if norms is None else (_gain(norms[0]), _gain(norms[1]))
            parts = ways.heads(stream, kernel, tables_2CR, counts, eps, bias, gains)
            return [p[: b * n].reshape(b, n, h, c) for p, h in zip(parts, counts, strict=True)]
        qkv = ways.project(stream, kernel, eps)[: b * n]
        qkv = qkv if bias is None else qkv + bias[None]
        parts = jnp.split(qkv.reshape(b, n, t, -1, c), [counts[0] // t, (counts[0] + counts[1]) // t], axis=3)
        q, k, v = (part.reshape(b, n, -1, c) for part in parts)
        q, k = (q, k) if norms is None else (norms[0](q), norms[1](k))
        return apply_rope(q, rope), apply_rope(k, rope), v

    def norms(
        self, norms: Sequence[RMSNorm], rows: Sequence[jax.Array], tokens_BN: jax.Array | None = None
    ) -> jax.Array:  # fmt: skip
        """See layers.LayerRunner."""
        (eps,) = {norm.eps for norm in norms}
        shape = rows[0].shape[:-1] if tokens_BN is None else tokens_BN.shape
        ids = [None if tokens_BN is None else tokens_BN.reshape(-1), *[None] * len(rows[1:])]
        parts = [
            reference.NormedPart(x.reshape(-1, x.shape[-1]), _gain(norm), own)
            for norm, x, own in zip(norms, rows, ids, strict=True)
        ]
        return _Ways(self.implementation == "gpu", 1, BY_XLA).norms(parts, eps).reshape(*shape, -1)

    def logits(self, model: Transformer, hidden_BNE: jax.Array) -> jax.Array | None:
        """See layers.LayerRunner."""
        kernel_EV, flip = few_rows_fit.output_weights(model)
        few, rows = isinstance(kernel_EV, Packed), math.prod(hidden_BNE.shape[:-1])
        if kernel_EV is None or not (few or self.output) or rows > (few_rows_fit.FEW_ROWS if few else self.most):
            return None
        alike = _Ways(self.implementation == "gpu", 1, BY_XLA)  # split output layers are XLA's
        run = alike.each(lambda x, w: alike.own.logits(x, w, flip=flip), None, None, None)
        logits = run(_padded(hidden_BNE.reshape(rows, -1)), kernel_EV)
        return logits[:rows].reshape(*hidden_BNE.shape[:-1], -1)


def _padded(x_ME: jax.Array) -> jax.Array:
    """The kernels' copies want whole groups of 8 rows, or less than one."""
    m = x_ME.shape[0]
    return jnp.pad(x_ME, ((0, (m if m <= 8 else round_up(m, 8)) - m), (0, 0)))


@dataclasses.dataclass(frozen=True)
class _Ways:
    """The products of a layer by kernels or plain XLA, on one device or by each of several on its own part.

    Attributes:
      kernels: which of both.
      sums: see `sharded.summed`.
    """

    kernels: bool
    shards: int
    sums: str

    @property
    def own(self) -> Any:
        return gpu if self.kernels else reference

    @property
    def router(self) -> Any:
        return gpu_router if self.kernels else experts

    def each(self, fn: Callable[..., Any], *split: int | None) -> Callable[..., Any]:
        """`fn` by every device: `split` has the axis of each argument, and last of the results, None where whole."""
        if devices() == 1:
            return fn
        # XLA cannot split a kernel: what devices do not share, each does alike.
        *of, found = split if self.shards > 1 else (None,) * len(split)
        whole = PartitionSpec()

        def run(*args: Any) -> Any:
            count = devices()
            ins = tuple(whole if axis is None else parts_of(axis, x, count) for axis, x in zip(of, args, strict=True))
            out = whole if found is None else PartitionSpec(*[None] * found, TENSOR_AXIS)
            return jax.shard_map(fn, in_specs=ins, out_specs=out, check_vma=False)(*args)

        return run

    def project(self, stream: Stream | jax.Array, kernel: Any, eps: float) -> jax.Array:
        run = lambda s, w: self.own.project(s, w, eps) if isinstance(s, Stream) else self.own.multiply(s, w)
        return self.each(run, None, 1, 1)(stream, kernel)

    def heads(
        self, stream: Stream | jax.Array, kernel: Any, rope_2CR: jax.Array, counts: Sequence[int], eps: float,
        bias: jax.Array | None, gains: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, ...]:  # fmt: skip
        mine = tuple(count // self.shards for count in counts)
        run = lambda s, w, t, b, g: self.own.heads(s, w, t, mine, eps, bias=b, gains=g)
        return self.each(run, None, 1, None, 0, None, 1)(stream, kernel, rope_2CR, bias, gains)

    def swiglu(self, stream: Stream, kernel: Any, eps: float) -> jax.Array:
        run = lambda s, w: self.own.swiglu(s, w, eps)
        return self.each(run, None, 1, 1)(stream, kernel)

    def add(self, x_MK: jax.Array, kernel: Any, h_ME: jax.Array, gain_E: jax.Array) -> Stream:
        if self.shards == 1:
            return self.each(self.own.add, None, None, None, None, None)(x_MK, kernel, h_ME, gain_E)

        def parts(x_MK: jax.Array, kernel: Any, h_ME: jax.Array, gain_E: jax.Array) -> Stream:
            y = summed(self.own.multiply(x_MK, kernel), self.sums)
            return reference.begin((h_ME.astype(jnp.float32) + y.astype(jnp.float32)).astype(h_ME.dtype), gain_E)

        return self.each(parts, 1, 0, None, None, None)(x_MK, kernel, h_ME, gain_E)

    def norms(self, parts: Sequence[reference.NormedPart], eps: float) -> jax.Array:
        kernels = self.kernels and gpu_norms.refusal(parts[0].rows.shape[-1]) is None
        return self.each(lambda parts: (gpu_norms if kernels else reference).norms(parts, eps), None, None)(parts)

    def normed(self, stream: Stream, gain_E: jax.Array, eps: float) -> jax.Array:
        if self.kernels and gpu_norms.refusal(stream.h_ME.shape[1]) is None:
            return self.norms([reference.NormedPart(stream.h_ME, gain_E)], eps)
        return reference.normed(stream, gain_E, eps)  # in one order, whatever the number of rows

    def mixed(self, mlp: MixtureOfExperts, stream: Stream, rows: int, gain_E: jax.Array, eps: float) -> Stream:
        """The stream after a mixture of experts, for its first rows."""
        own, has = gpu_experts if self.kernels else experts, mlp.experts
        choice = self.routed(self.router.choose, mlp, stream, rows, eps)
        report_experts(choice.order_X[None], has.count)
        mix = lambda s, c, up, down, gain: own.mix(s, c, up, down, gain, eps, has.per_token)
        return self.each(mix, *[None] * 6)(stream, choice, mlp.gate_up[...], mlp.down[...], gain_E)

    def routed(
        self, choose: Callable[..., Any], mlp: MixtureOfExperts, stream: Stream, rows: int, eps: float
    ) -> Any:  # fmt: skip
        """The experts of the stream's first rows."""
        has = mlp.experts
        normalised = has.normalised or has.scores == "top_k"
        run = lambda s, w: choose(s, w, eps, has.per_token, rows, normalised=normalised)
        return self.each(run, None, None, None)(stream, mlp.router.kernel[...])

    def mixed_packed(self, mlp: MixtureOfExperts, stream: Stream, rows: int, gain_E: jax.Array, eps: float) -> Stream:
        """The stream after a mixture of packed experts, for its first rows."""
        own = gpu_packed_experts if self.kernels else packed_experts
        picks, has = self.routed(self.router.pick, mlp, stream, rows, eps), mlp.experts
        report_experts(picks.experts_GP, has.count)
        return own.mix_picked(stream, picks, has.per_token, mlp.gate_up[...], mlp.down[...], gain_E, eps)


def _gain(norm: Any) -> jax.Array:
    return norm.weight[...]


def prepare(model: Any, implementation: str = "gpu", *, output: bool = False, invariant: bool = False) -> Any:
    """A copy of a model or draft head that runs few rows by these kernels, or itself where they do not serve it.

    Quantised kernels are laid out anew in the model itself, one after the other, so that no two layouts of all of them
    take memory at once.

    Args:
      implementation: "gpu", or "reference" for the same order of operations in plain XLA.
      output: whether the output layer runs so too; one of few bits does if the kernels serve it.
      invariant: whether up to 32 rows by weights of few bits shall have the bits that one has (Packed.invariant).
    """
    if few_rows_fit.refusal(model) is not None:
        return model
    for block in few_rows_fit.blocks(model):
        if isinstance(block.mlp, MLP):
            _give_in_order(block.mlp)
    if few_rows_fit.is_head(model):  # whose other maps are no layers', and multiplied by the kernel for many rows
        copy = pack_maps(model)
    else:
        for _, linear in few_rows_fit.maps(model):
            if isinstance(linear.kernel[...], Quantised):
                linear.kernel.set_value(laid_anew(linear.kernel, _packed, invariant))
        graph, state = nnx.split(model)
        copy = nnx.merge(graph, state)
        if few_rows_fit.output_of_few_bits(copy):  # a variable of its own: draft heads share the model's, as stored
            copy.lm_head.kernel = nnx.Param(laid_anew(copy.lm_head.kernel, _packed, invariant))
    copy.few_rows = FewRows(implementation, few_rows_fit.most_rows(copy), output)
    return copy


def _give_in_order(mlp: MLP) -> None:
    """Has gate and up give features in the order in which down reads them, so that nothing gathers these."""
    gate_up, down = mlp.gate_up.kernel[...], mlp.down.kernel[...]
    if isinstance(gate_up, Quantised) and isinstance(down, Quantised) and down.order is not None:
        mlp.gate_up.kernel.set_value(_halves_in_order(gate_up, down.order))
        mlp.down.kernel.set_value(dataclasses.replace(down, order=None))


@jax.jit
def _halves_in_order(gate_up: Quantised, order: jax.Array) -> Quantised:
    both = jnp.concatenate([order, order + len(order)])

    def change(x: jax.Array) -> jax.Array:
        whole = x.astype(jnp.int8) if x.dtype == jnp.int4 else x  # gathered as whole bytes
        return jnp.take(whole, both, axis=-1, mode="clip").astype(x.dtype)

    return gate_up.along_outputs(change)


def pack_maps(module: Any, shards: int = 1) -> Any:
    """Lays quantised maps out anew in a module whose layers these kernels do not run, if it computes in bfloat16.

    Products by them, of any number of rows, are the kernel's for many rows then. Several devices have this for what
    they split between them, layers' maps that is: XLA cannot split a kernel, nor knows how little of an expanded weight
    fits.

    Args:
      shards: devices that share the module.

    Returns:
      A copy: its output layer is a variable of its own, as draft heads read the module's as it was stored. Other maps
      change in the module itself, one after the other, so that no two layouts of all of them take memory at once.
    """
    graph, state = nnx.split(module)
    copy = nnx.merge(graph, state)
    for linear in list(_other_maps(copy, shards)):
        made = laid_anew(linear.kernel, _packed)
        if linear is getattr(copy, "lm_head", None):
            linear.kernel = nnx.Param(made)
        else:
            linear.kernel.set_value(made)
    return copy


def _other_maps(module: Any, shards: int) -> Iterator[Linear]:
    """The maps that `pack_maps` is for."""
    maps = [node for _, node in nnx.iter_graph(module) if isinstance(node, Linear)]
    table = getattr(module, "embedding", None)
    biases = (linear.bias for linear in maps if linear.bias is not None)  # Medusa's heads have no table
    if (read := next(biases, None) if table is None else table) is None or read.dtype != jnp.bfloat16:
        return
    for linear in maps:
        if not isinstance(linear.kernel[...], Quantised) or isinstance(linear.kernel, Shared):
            continue
        whole = linear.kernel.get_metadata(SPLIT, None) is None or linear is getattr(module, "lm_head", None)
        if few_rows_fit.unserved(linear, shards) is None and not (shards > 1 and whole):
            yield linear


def _packed(few: Quantised, invariant: bool = False) -> Packed:
    return dataclasses.replace(packed.pack(few.values, few.scale, few.zero, few.order), invariant=invariant)


def added_bytes(model: Any, shards: int = 1) -> int:
    """Bytes of a device's memory that `prepare` or `pack_maps` takes besides the model's: no less while others hold it.

    Scales of layers' weights become float32, and an output layer of few bits lies there twice.

    Args:
      model: laid out for `shards` devices, if there are several.
    """
    if unsupported() is not None:
        return 0
    size = lambda linear, few: share_bytes(linear.kernel.get_metadata(SPLIT, None), few, shards)
    if few_rows_fit.refusal(model, shards) is None and not few_rows_fit.is_head(model):
        maps = [linear for _, linear in few_rows_fit.maps(model)]
        last = model.lm_head if few_rows_fit.output_of_few_bits(model) else None
    else:
        maps = list(_other_maps(model, shards))
        last = next((linear for linear in maps if linear is getattr(model, "lm_head", None)), None)
    layers = [
        (linear, few) for linear in maps if linear is not last and isinstance(few := linear.kernel[...], Quantised)
    ]
    made = lambda few: jax.eval_shape(_packed, few)
    output = 0 if last is None else size(last, made(last.kernel[...]))
    return sum(size(linear, made(few)) - size(linear, few) for linear, few in layers) + output


def unsupported() -> str | None:
    """Why this device or JAX has no such kernels, or None."""
    return gpu.supported()


__all__ = ["FewRows", "added_bytes", "pack_maps", "prepare", "unsupported"]
