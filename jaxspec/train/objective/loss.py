"""What draft heads and draft models are trained towards.

Functions of logits and of hidden states; must not know optimisers, data or attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.base import TargetModel
from jaxspec.train.data.batch import ahead

LOSSES = ("soft", "kl", "ce")
#: Elements of the target's logits that are held at once: 256 MiB of float32.
LOGITS = 2**26


def soft_cross_entropy(logits_BNV: jax.Array, target_probs_BNV: jax.Array) -> jax.Array:
    """-sum(target_probs * log softmax(logits)), nats a position, [B, N]. target_probs sum to one."""
    normaliser_BN = jax.nn.logsumexp(logits_BNV, axis=-1)
    return normaliser_BN - jnp.sum(target_probs_BNV.astype(logits_BNV.dtype) * logits_BNV, axis=-1)


def first_choice(logits_BNV: jax.Array, block: int = 64) -> jax.Array:
    """The argmax over the last axis, int32.

    In two stages where `block` divides the vocabulary: XLA's CPU backend does not vectorise an argmax, but does a max.
    """
    vocab_size = logits_BNV.shape[-1]
    if vocab_size % block:
        return jnp.argmax(logits_BNV, axis=-1).astype(jnp.int32)
    blocks = logits_BNV.reshape(*logits_BNV.shape[:-1], vocab_size // block, block)
    index = jnp.argmax(blocks.max(axis=-1), axis=-1)[..., None]
    best = jnp.take_along_axis(blocks, index[..., None], axis=-2)[..., 0, :]
    return (index[..., 0] * block + jnp.argmax(best, axis=-1)).astype(jnp.int32)


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of the values where mask is true; 0 where it never is."""
    weight = mask.astype(values.dtype)
    return jnp.sum(values * weight) / jnp.maximum(jnp.sum(weight), 1)


def smooth_l1(predicted: jax.Array, wanted: jax.Array) -> jax.Array:
    """Huber's loss with threshold 1, averaged over the last axis, float32."""
    error = jnp.abs(predicted.astype(jnp.float32) - wanted.astype(jnp.float32))
    return jnp.mean(jnp.where(error < 1.0, 0.5 * error * error, error - 0.5), axis=-1)


def mean_weights(mask_BT: jax.Array, share: float = 1.0) -> jax.Array:
    """Float32 weights whose sum over the mask is `share` (0 where the mask is empty)."""
    mask_BT = mask_BT.astype(jnp.float32)
    return mask_BT * (share / jnp.maximum(jnp.sum(mask_BT), 1.0))


def draft_loss(
    head: Any,
    target: TargetModel,
    hidden: Sequence[jax.Array],
    target_hidden_BTE: jax.Array,
    weights: Sequence[jax.Array],
    *,
    kind: str = "soft",
    offsets: Sequence[int] | None = None,
    limit: int = LOGITS,
) -> tuple[jax.Array, jax.Array]:
    """The weighted loss of a head's drafts against the target's distributions, and whether they are its choices.

    Draft i at position n is compared with the target's distribution after token n + 1 + i, restricted to the draft
    vocabulary and renormalised. Positions where the target's most probable token cannot be drafted weigh nothing.

    The logits of neither live as a whole: positions go in parts, the target's output layer runs once for all drafts of
    a part, and a part's gradients are taken while its logits are there (so nothing is computed again backwards).

    Args:
      head: offers logits(hidden) [B, N, Vd] and config; `target_ids` where the draft vocabulary is smaller.
      hidden: [B, T, E] of each draft i, as `ttt.unroll` gives them.
      weights: float32 [B, T] of each draft that has a part in the loss; drafts after those are only compared.
      offsets: what `i` is for each of `hidden`, ascending; by default 0, 1, 2, ..
      kind: "soft" (cross entropy to the target's probabilities), "kl" (less their entropy) or "ce" (cross entropy to
        the target's most probable token).
      limit: elements of the target's logits held at once.

    Returns:
      (loss in nats, float32 scalar; matches bool [B, T, D], False where the position's text ends before).
    """
    if kind not in LOSSES:
        raise ValueError(f"loss must be one of {LOSSES}, got {kind!r}")
    batch, length = target_hidden_BTE.shape[:2]
    offsets = range(len(hidden)) if offsets is None else offsets
    parts = -(-length // min(length, max(1, limit // (batch * target.config.vocab_size))))
    size = -(-length // parts)
    pad = lambda x_BT, more=0: jnp.pad(x_BT, [(0, 0), (0, parts * size - length + more)] + [(0, 0)] * (x_BT.ndim - 2))
    logits, parameters = _output_layer(head, hidden[0][:, :size])
    full = head.config.draft_vocab_size == target.config.vocab_size
    compared = _Comparison(
        target, kind, logits, None if full else head.target_ids[...], pad(ahead(target_hidden_BTE, 1), offsets[-1]),
        jnp.stack([pad(w) for w in weights]), tuple(offsets), size,
    )  # fmt: skip

    loss, same_SBT = compared.loss(parameters, jnp.stack([pad(h) for h in hidden]))
    return loss, jnp.moveaxis(same_SBT[:, :, :length], 0, 2)


@dataclasses.dataclass(frozen=True)
class _Side:
    """The target's side of some positions.

    Attributes:
      probs_BnV: probabilities on the draft vocabulary; means nothing with kind "ce".
      label_Bn: draft id of the most probable token. inside_Bn: whether it has one.
      negentropy_Bn: the sum of p log p; meant with kind "kl" only.
    """

    probs_BnV: jax.Array
    label_Bn: jax.Array
    inside_Bn: jax.Array
    negentropy_Bn: jax.Array

    def at(self, index: jax.Array, size: int) -> _Side:
        """Those of `size` positions from `index` on."""
        arrays = (self.probs_BnV, self.label_Bn, self.inside_Bn, self.negentropy_Bn)
        return _Side(*(jax.lax.dynamic_slice_in_dim(x, index, size, 1) for x in arrays))


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """What drafts are held to, part by part.

    Attributes:
      logits, target_ids_V: see `_output_layer` and `_distributions`.
      shifted_BTE: the target's hidden states, at n those after token n + 1, as far as the last offset reaches.
      weights_SBT: of the drafts that have a part in the loss.
      offsets: of all drafts, ascending. size: positions of a part.
    """

    target: TargetModel
    kind: str
    logits: Callable[..., jax.Array]
    target_ids_V: jax.Array | None
    shifted_BTE: jax.Array
    weights_SBT: jax.Array
    offsets: tuple[int, ...]
    size: int

    def loss(self, parameters: Any, hidden_SBTE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(loss, matches [S, B, T]), with its gradients taken on the way."""

        @jax.custom_vjp
        def fused(parameters: Any, hidden_SBTE: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self._whole(parameters, hidden_SBTE, False)[:2]

        def forward(parameters: Any, hidden_SBTE: jax.Array) -> tuple[Any, Any]:
            loss, same, grads, hidden_grads = self._whole(parameters, hidden_SBTE, True)
            return (loss, same), (grads, hidden_grads)

        def backward(saved: Any, cotangents: Any) -> Any:
            grads, hidden_grads = jax.tree.map(lambda x: x * cotangents[0].astype(x.dtype), saved)
            missing = [(0, len(self.offsets) - self.weights_SBT.shape[0])] + [(0, 0)] * 3
            own = jax.tree.map(lambda x, p: x.astype(p.dtype), grads, parameters)
            return own, jnp.pad(hidden_grads, missing)

        fused.defvjp(forward, backward)
        return fused(parameters, hidden_SBTE)

    def _whole(self, parameters: Any, hidden_SBTE: jax.Array, gradients: bool) -> tuple[Any, ...]:
        """(loss, matches [S, B, T], gradient of parameters, of hidden [trained, B, T, E]); () or None without."""
        parts = hidden_SBTE.shape[2] // self.size
        starts = jnp.arange(parts, dtype=jnp.int32) * jnp.int32(self.size)
        if parts == 1:
            return self._part(parameters, hidden_SBTE, starts[0], gradients)

        def body(total: Any, start: jax.Array) -> tuple[Any, Any]:
            loss, same, grads, hidden_grads = self._part(parameters, hidden_SBTE, start, gradients)
            return jax.tree.map(jnp.add, total, (loss, grads)), (same, hidden_grads)

        zeros = _zeros(parameters) if gradients else ()
        (loss, grads), found = jax.lax.scan(body, (jnp.float32(0.0), zeros), starts)
        # [parts, S, B, n, ...] -> [S, B, T, ...]
        join = lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], parts * self.size, *x.shape[4:])
        same, hidden_grads = jax.tree.map(join, found)
        return loss, same, grads, hidden_grads

    def _part(self, parameters: Any, hidden_SBTE: jax.Array, start: jax.Array, gradients: bool) -> tuple[Any, ...]:
        """What `whole` returns, of the positions from `start`."""
        cut = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, start, self.size, axis)
        mine_SBnE = cut(hidden_SBTE, 2)
        wide_BnE = jax.lax.dynamic_slice_in_dim(self.shifted_BTE, start, self.size + self.offsets[-1], 1)
        side = _distributions(self.target, wide_BnE, self.target_ids_V, mine_SBnE.dtype, self.kind)

        def learn(total: Any, at: tuple[jax.Array, ...]) -> tuple[Any, Any]:
            index, mine_BnE, weight_Bn = at
            there = side.at(index, self.size)
            value, same_Bn, own = self._draft(parameters, mine_BnE, weight_Bn, there, gradients)
            loss, grads = total
            if own is None:
                return (loss + value, grads), same_Bn
            grads = jax.tree.map(lambda total, own: total + own.astype(jnp.float32), grads, own[1])
            return (loss + value, grads), (same_Bn, own[0])

        def compare(_: Any, at: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
            index, mine_BnE = at
            there = side.at(index, self.size)
            return (), _same(self.logits(mine_BnE, *parameters), there.label_Bn, there.inside_Bn)

        trained = self.weights_SBT.shape[0]
        zeros = _zeros(parameters) if gradients else ()
        index_S = jnp.asarray(self.offsets, jnp.int32)
        columns = (index_S[:trained], mine_SBnE[:trained], cut(self.weights_SBT, 2))
        (loss, grads), found = jax.lax.scan(learn, (jnp.float32(0.0), zeros), columns)
        same, hidden_grads = found if gradients else (found, None)
        if len(self.offsets) > trained:
            _, more = jax.lax.scan(compare, (), (index_S[trained:], mine_SBnE[trained:]))
            same = jnp.concatenate([same, more])
        return loss, same, grads, hidden_grads

    def _draft(
        self, parameters: Any, mine_BnE: jax.Array, weight_Bn: jax.Array, side: _Side, gradients: bool
    ) -> tuple[jax.Array, jax.Array, tuple[jax.Array, Any] | None]:
        """(loss, matches, gradients of hidden and of parameters) of one draft."""
        weight_Bn = jnp.where(side.inside_Bn, weight_Bn, 0.0)
        if gradients:
            z, pull = jax.vjp(lambda h, p: self.logits(h, *p), mine_BnE, parameters)
        else:
            z, pull = self.logits(mine_BnE, *parameters), None
        normaliser_Bn = jax.nn.logsumexp(z, axis=-1)
        if self.kind == "ce":
            chosen_Bn = jnp.take_along_axis(z, side.label_Bn[..., None], axis=-1)[..., 0]
        else:
            chosen_Bn = jnp.sum(side.probs_BnV.astype(z.dtype) * z, axis=-1)
        entropy_Bn = normaliser_Bn - chosen_Bn
        if self.kind == "kl":
            entropy_Bn = entropy_Bn + side.negentropy_Bn
        value, same_Bn = jnp.sum(weight_Bn * entropy_Bn), _same(z, side.label_Bn, side.inside_Bn)
        if pull is None:
            return value, same_Bn, None
        own_BnV = jnp.exp(z - normaliser_Bn[..., None])
        if self.kind == "ce":
            wanted = (jnp.arange(z.shape[-1])[None, None, :] == side.label_Bn[..., None]).astype(z.dtype)
        else:
            wanted = side.probs_BnV.astype(z.dtype)
        return value, same_Bn, pull(weight_Bn[..., None] * (own_BnV - wanted))


def _zeros(parameters: Any) -> Any:
    # Sums over many parts are float32 whatever the parameters are: in bfloat16 128 parts cost 2% of the gradient.
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), parameters)


def _output_layer(head: Any, hidden_BnE: jax.Array) -> tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]:
    """(logits(hidden, *parameters), those of the head's parameters that `head.logits` reads)."""
    graph, trained, rest = nnx.split(head, nnx.Param, ...)
    leaves, structure = jax.tree.flatten(trained)

    def logits(hidden_BnE: jax.Array, *leaves: jax.Array) -> jax.Array:
        module = nnx.merge(graph, jax.tree.unflatten(structure, leaves), rest)
        flat = module.logits(hidden_BnE.reshape(1, -1, hidden_BnE.shape[-1]))  # one row: see ttt.unroll
        return flat.reshape(*hidden_BnE.shape[:2], -1)

    jaxpr = jax.make_jaxpr(logits)(hidden_BnE, *leaves).jaxpr
    inputs = {id(x) for equation in jaxpr.eqns for x in equation.invars}
    used = [i for i, x in enumerate(jaxpr.invars[1:]) if id(x) in inputs]

    def of_used(hidden_BnE: jax.Array, *parameters: jax.Array) -> jax.Array:
        whole = list(leaves)
        for i, parameter in zip(used, parameters, strict=True):
            whole[i] = parameter
        return logits(hidden_BnE, *whole)

    return of_used, tuple(leaves[i] for i in used)


def _same(logits_BnV: jax.Array, label_Bn: jax.Array, inside_Bn: jax.Array) -> jax.Array:
    """Whether the label has the largest logit (faster than an argmax, which XLA's CPU backend does not vectorise)."""
    own_Bn = jnp.take_along_axis(logits_BnV, label_Bn[..., None], axis=-1)[..., 0]
    return (own_Bn >= jnp.max(logits_BnV, axis=-1)) & inside_Bn


def _distributions(
    target: TargetModel, hidden_BnE: jax.Array, target_ids_V: jax.Array | None, dtype: jnp.dtype, kind: str
) -> _Side:
    """The target's side of the positions of hidden_BnE."""
    logits_BnV = target.logits(hidden_BnE)
    best_Bn = first_choice(logits_BnV)
    label_Bn, inside_Bn = best_Bn, jnp.ones(best_Bn.shape, bool)
    if target_ids_V is not None:
        missing = jnp.full((logits_BnV.shape[-1],), -1, jnp.int32)
        draft_ids_V = missing.at[target_ids_V].set(jnp.arange(target_ids_V.shape[0], dtype=jnp.int32))
        label_Bn = draft_ids_V[best_Bn]
        label_Bn, inside_Bn = jnp.maximum(label_Bn, 0), label_Bn >= 0
        logits_BnV = jnp.take(logits_BnV, target_ids_V, axis=-1)
    if kind == "ce":
        return _Side(logits_BnV, label_Bn, inside_Bn, inside_Bn.astype(jnp.float32))
    probs_BnV = jax.nn.softmax(logits_BnV, axis=-1)
    negentropy_Bn = inside_Bn.astype(jnp.float32)
    if kind == "kl":
        negentropy_Bn = jnp.sum(probs_BnV * jax.nn.log_softmax(logits_BnV, axis=-1), axis=-1)
    return _Side(probs_BnV.astype(dtype), label_Bn, inside_Bn, negentropy_Bn)
