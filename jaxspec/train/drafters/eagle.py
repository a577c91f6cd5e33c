"""`python -m jaxspec.train eagle3`: EAGLE-3, EAGLE-3.1 and EAGLE-1 heads on a frozen target.

Owns what an EAGLE head starts from and how it learns: by training-time test (Li et al. 2025), EAGLE-1 by predicting
the target's next feature (Li et al. 2024).
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.drafters.directories import read_kind
from jaxspec.models.base import TargetModel
from jaxspec.models.layers import Shared, Transformer, shared_lm_head
from jaxspec.models.quantised import Quantised
from jaxspec.speculation.drafters.eagle1_head import Eagle1Config, Eagle1Head
from jaxspec.speculation.drafters.eagle3_head import Buffer, Eagle3Config, Eagle3Head
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters import drafts, starts
from jaxspec.train.drafters.recipe import TargetStates
from jaxspec.train.objective.loss import LOSSES, draft_loss, masked_mean, mean_weights, smooth_l1
from jaxspec.train.objective.ttt import unroll
from jaxspec.train.run import command

ARCHITECTURES = ("eagle3", "eagle3.1", "eagle1")
#: A draft vocabulary that would hold this share of the tokens might as well hold all.
NEARLY_FULL = 0.9
#: Arguments that describe a new head; --init-from has them from its directory.
_GEOMETRY = (
    "arch", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim", "aux_layers",
    "draft_vocab_size", "coverage", "norm_before_residual", "norm_before_fc", "rope_theta",
)  # fmt: skip


#: See drafts.Trainer.
chain = drafts.unrolled


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Geometry not given is the target's."""
    command.add_common_arguments(p)
    p.add_argument("--arch", choices=ARCHITECTURES, help="default: eagle3.1, or what --init-from is")
    p.add_argument("--hidden-size", type=int, help="width of the head (default: the target's)")
    p.add_argument("--intermediate-size", type=int, help="width of its MLP (default: the target's)")
    p.add_argument("--layers", type=int, help="decoder layers (default 1)")
    p.add_argument("--heads", type=int, help="query heads (default: the target's)")
    p.add_argument("--kv-heads", type=int, help="key-value heads (default: the target's)")
    p.add_argument("--head-dim", type=int, help="width of a query head (default: the target's)")
    p.add_argument("--rope-theta", type=float, help="base of the rotary positions (default: the target's)")
    p.add_argument("--aux-layers", type=int, nargs="+", help="layers whose input is read (default: 2, N/2, N-3)")
    p.add_argument("--draft-vocab-size", type=int, help="default: by --coverage")
    p.add_argument("--coverage", type=float, help="share of the learned tokens that can be drafted (default 0.985)")
    p.add_argument("--norm-before-residual", action="store_true", default=None,
        help="the residual starts from the normed feature (default: off)")  # fmt: skip
    p.add_argument("--norm-before-fc", action="store_true", default=None,
        help="a norm over the concatenated states before fc (default: off)")  # fmt: skip
    p.add_argument("--train-embedding", action=argparse.BooleanOptionalAction, default=None,
                   help="default: where the head is narrower than the target")  # fmt: skip
    p.add_argument("--ttt-steps", type=int, default=7, help="drafts of the training-time test (EAGLE-1: of the log)")
    p.add_argument("--decay", type=float, default=0.8, help="weight of each further step's loss")
    p.add_argument("--loss", choices=LOSSES, default="soft", help="cross entropy to the target's distribution, KL, or "
                   "cross entropy to its best token")  # fmt: skip
    p.add_argument("--feature-noise", type=float, default=0.1, help="EAGLE-1: uniform noise on input features")
    p.add_argument("--logit-weight", type=float, default=0.1, help="EAGLE-1: weight of the loss on logits")


@dataclasses.dataclass(frozen=True)
class Eagle3Recipe:
    """Training-time test: sum over the drafts i of decay**i times their mean loss over learned positions.

    Positions whose most probable token cannot be drafted count as learned with loss 0.
    """

    aux_layers: tuple[int, ...]
    depth: int
    decay: float = 0.8
    loss_kind: str = "soft"

    def loss(
        self, module: Eagle3Head, target: TargetModel, batch: Batch, states: TargetStates, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """See Recipe."""
        assert states.aux_BTA is not None
        hidden = unroll(module, batch, states.aux_BTA, self.depth)
        weights = [mean_weights(batch.learned_ahead(2 + i), self.decay**i) for i in range(self.depth)]
        loss, matches_BTD = draft_loss(module, target, hidden, states.hidden_BTE, weights, kind=self.loss_kind)
        return loss, matches_BTD[:, : batch.tokens_BT.shape[1] - 1 - self.depth], {}


@dataclasses.dataclass(frozen=True)
class Eagle1Recipe:
    """Smooth L1 to the target's next feature plus logit_weight times the loss on its logits, from noisy features.

    Acceptance is that of `depth` drafts from features without noise; no gradient passes them.
    """

    aux_layers: tuple[int, ...]
    depth: int
    noise: float = 0.1
    logit_weight: float = 0.1
    loss_kind: str = "soft"

    def loss(
        self, module: Eagle1Head, target: TargetModel, batch: Batch, states: TargetStates, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """See Recipe."""
        feature_BTE = states.hidden_BTE
        noise_BTE = jax.random.uniform(key, feature_BTE.shape, jnp.float32, -self.noise, self.noise)
        noisy_BTE = feature_BTE + noise_BTE.astype(feature_BTE.dtype)
        predicted_BTE = unroll(module, batch, noisy_BTE, 1)[0]
        learned_BT = batch.learned_ahead(2)
        regression = masked_mean(smooth_l1(predicted_BTE[:, :-1], feature_BTE[:, 1:]), learned_BT[:, :-1])
        drafts = unroll(module, batch, feature_BTE, self.depth, gradients=0)
        logit_loss, matches = draft_loss(
            module, target, [predicted_BTE, *drafts], feature_BTE, [mean_weights(learned_BT)],
            kind=self.loss_kind, offsets=(0, *range(self.depth)),
        )  # fmt: skip
        matches_BND = matches[:, : batch.tokens_BT.shape[1] - 1 - self.depth, 1:]
        metrics = {"feature_loss": regression, "logit_loss": logit_loss}
        return regression + self.logit_weight * logit_loss, matches_BND, metrics


def draft_vocabulary(counts_V: np.ndarray, size: int | None, coverage: float, multiple: int = 256) -> np.ndarray:
    """The most frequent tokens, ascending, int64 [Vd].

    Args:
      counts_V: how often the target wrote each token.
      size: how many; None for as many as `coverage` of the counts needs, rounded up to
        `multiple`, or all where that is nearly all.

    Raises:
      ValueError: size or coverage out of range.
    """
    vocab_size = len(counts_V)
    if size is not None and not 1 <= size <= vocab_size:
        raise ValueError(f"draft_vocab_size must lie between 1 and the target's vocab_size {vocab_size}, got {size}")
    if not 0.0 < coverage <= 1.0:
        raise ValueError(f"coverage must lie in (0, 1], got {coverage}")
    frequent = np.argsort(-counts_V, kind="stable")
    if size is None:
        share = np.cumsum(counts_V[frequent]) / max(1, counts_V.sum())
        needed = int(np.searchsorted(share, coverage)) + 1
        size = -(-needed // multiple) * multiple
        if size >= NEARLY_FULL * vocab_size:
            size = vocab_size
    return np.sort(frequent[:size])


def new_head(cfg: Eagle3Config, target: TargetModel, target_ids: np.ndarray, seed: int) -> Eagle3Head:
    """A head that starts from the target: its tables, projected on their principal directions.

    The last auxiliary state passes fc by the same projection, so the untrained head already
    resembles the target cut off after that layer. A head as wide as the target has the tables themselves.
    """
    head = Eagle3Head(cfg, rngs=nnx.Rngs(params=seed))
    head.target_ids[...] = jnp.asarray(target_ids, jnp.int32)
    table_VE, output_VE = np.asarray(target.embedding[...], np.float32), _output_rows(target)
    if cfg.hidden_size == cfg.target_hidden_size:
        directions_EH = np.eye(cfg.hidden_size, dtype=np.float32)
    else:
        directions_EH = np.linalg.svd(output_VE, full_matrices=False)[2][: cfg.hidden_size].T
    width = directions_EH.shape[1]
    head.embedding[...] = head.embedding[...].at[:, :width].set(table_VE @ directions_EH)
    head.lm_head.kernel[...] = head.lm_head.kernel[...].at[:width].set((output_VE[target_ids] @ directions_EH).T)
    last = cfg.target_hidden_size * (cfg.num_aux - 1)
    head.fc.kernel[...] = head.fc.kernel[...].at[last:, :width].set(directions_EH)
    return head


def _output_rows(target: TargetModel) -> np.ndarray:
    """What the target's final states are multiplied with for each token's logit, the norm's gain included, [V, E]."""
    kernel_EV = target.embedding[...].T if target.lm_head is None else target.lm_head.kernel[...]
    rows_VE = np.asarray(kernel_EV.dequantised() if isinstance(kernel_EV, Quantised) else kernel_EV, np.float32).T
    if isinstance(target, Transformer):
        rows_VE = rows_VE * np.asarray(target.norm.weight[...], np.float32)[None, :]
    return rows_VE


def renew_vocabulary(head: Any, target: TargetModel, counts_V: np.ndarray) -> dict[str, Any]:
    """Gives a trained head's draft vocabulary the tokens that other texts use, as many as before.

    What lies outside of it can never be drafted, however long a head learns. First come the tokens that the texts use,
    by frequency, then those that the head had, the lowest ids first: tokenizers number what is frequent first. Rows of
    tokens that stay are kept; a new one's is the target's own row under the linear map that takes the target's rows of
    the old tokens nearest to the head's (least squares).

    Args:
      head: an Eagle3Head, or another with `lm_head` and `target_ids` of its own.
      counts_V: how often the target wrote each token.

    Returns:
      what to record: the share of the learned tokens that can be drafted.
    """
    old_ids, size = np.asarray(head.target_ids[...]), head.config.draft_vocab_size
    known_V = np.zeros(len(counts_V), bool)
    known_V[old_ids] = True
    new_ids = np.sort(np.lexsort((~known_V, -counts_V))[:size])
    share = lambda ids: float(counts_V[ids].sum() / max(1, counts_V.sum()))
    other = ~known_V[new_ids]
    if other.any():
        output_VE = _output_rows(target)
        kernel_HV = np.asarray(head.lm_head.kernel[...], np.float32)
        old_VE = output_VE[old_ids]
        square_EE = old_VE.T @ old_VE
        square_EE += np.eye(len(square_EE), dtype=np.float32) * (1e-3 * np.trace(square_EE) / len(square_EE))
        map_EH = np.linalg.solve(square_EE, old_VE.T @ kernel_HV.T)
        renewed_HV = np.empty_like(kernel_HV)
        order = np.argsort(old_ids)
        renewed_HV[:, ~other] = kernel_HV[:, order[np.searchsorted(old_ids[order], new_ids[~other])]]
        renewed_HV[:, other] = (output_VE[new_ids[other]] @ map_EH).T
        head.lm_head.kernel[...] = jnp.asarray(renewed_HV, head.lm_head.kernel[...].dtype)
        head.target_ids[...] = jnp.asarray(new_ids, jnp.int32)
    print(
        f"draft vocabulary: {int(other.sum()):,} of {size:,} tokens exchanged; it holds {share(new_ids):.2%} of the "
        f"learned ones, {share(old_ids):.2%} before", flush=True,
    )  # fmt: skip
    return {"draft_vocabulary_coverage": round(share(new_ids), 5)}


def renewed(head: Eagle3Head, setup: command.Setup) -> dict[str, Any]:
    """`renew_vocabulary` by what a command reads; a head that drafts all tokens stays as it is."""
    reduced = head.config.draft_vocab_size < head.config.vocab_size
    return renew_vocabulary(head, setup.target, setup.token_counts_V) if reduced else {}


def _geometry(args: argparse.Namespace, target: TargetModel) -> dict[str, Any]:
    """Sizes of the head's layers; those not given are the target's."""
    cfg = target.config
    given = lambda name, default: default if getattr(args, name) is None else getattr(args, name)
    return {
        "hidden_size": given("hidden_size", cfg.hidden_size),
        "intermediate_size": given("intermediate_size", cfg.intermediate_size),
        "num_layers": given("layers", 1),
        "num_heads": given("heads", cfg.num_heads),
        "num_kv_heads": given("kv_heads", cfg.num_kv_heads),
        "head_dim": given("head_dim", cfg.head_dim),
        "rms_norm_eps": cfg.rms_norm_eps,
        "rope_theta": given("rope_theta", cfg.rope_theta),
        "rope_scaling": cfg.rope_scaling if args.rope_theta is None else None,
        "max_position_embeddings": cfg.max_position_embeddings,
    }


def build_eagle3(setup: command.Setup) -> tuple[Eagle3Head, dict[str, Any]]:
    """A new head by the arguments, and what to record of it.

    Raises:
      ValueError: sizes or layers that do not fit (see Eagle3Config).
    """
    args, target = setup.args, setup.target
    layers = tuple(args.aux_layers or target.config.aux_layers)
    if not all(0 <= i <= target.config.num_layers for i in layers):
        raise ValueError(f"--aux-layers must lie in 0 .. {target.config.num_layers} (the target's), got {layers}")
    coverage = 0.985 if args.coverage is None else args.coverage
    target_ids = draft_vocabulary(setup.token_counts_V, args.draft_vocab_size, coverage)
    share = float(setup.token_counts_V[target_ids].sum() / max(1, setup.token_counts_V.sum()))
    print(f"draft vocabulary: {len(target_ids)} tokens, {share:.2%} of the learned ones", flush=True)
    newer = args.arch != "eagle3"
    if newer and args.norm_before_fc:
        raise ValueError("--norm-before-fc belongs to --arch eagle3, got it with eagle3.1, which norms each state")
    cfg = Eagle3Config(
        **_geometry(args, target),
        target_hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=len(target_ids),
        aux_layer_ids=layers,
        num_aux=len(layers),
        norm_before_residual=bool(args.norm_before_residual),
        norm_before_fc=bool(args.norm_before_fc),
        fc_norm=newer,
        norm_output=newer,
    )
    return new_head(cfg, target, target_ids, args.seed), {"draft_vocabulary_coverage": round(share, 5)}


def build_eagle1(setup: command.Setup) -> Eagle1Head:
    """A new head by the arguments; its embedding and output layer are the target's.

    Raises:
      ValueError: arguments that such a head does not have.
    """
    args, target = setup.args, setup.target
    for name in ("aux_layers", "draft_vocab_size", "coverage", "norm_before_residual", "norm_before_fc"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} belongs to EAGLE-3, got it with --arch eagle1")
    sizes = _geometry(args, target)
    if sizes["hidden_size"] != target.config.hidden_size:
        raise ValueError(
            f"--hidden-size of an EAGLE-1 head must be the target's {target.config.hidden_size}, "
            f"got {sizes['hidden_size']}"
        )
    layer = dataclasses.replace(target.config, **sizes)
    cfg = Eagle1Config(layer=layer, target_layers=target.config.num_layers)
    return Eagle1Head(cfg, Shared(target.embedding[...]), shared_lm_head(target), rngs=nnx.Rngs(params=args.seed))


def set_embedding(head: Any, target: TargetModel, train: bool | None) -> None:
    """Makes a head's embedding a trained parameter, or not (None: trained where the head is narrower).

    One that is not trained is the target's own where the values are the same, else the head's as it is.
    """
    own = head.embedding[...]
    table = target.embedding[...]
    narrower = own.shape[1] != target.config.hidden_size
    if train is None:
        train = narrower
    if train:
        head.embedding = nnx.Param(own.astype(jnp.float32))
    elif not narrower and bool(jnp.array_equal(own.astype(table.dtype), table)):
        head.embedding = Shared(table)
    else:
        head.embedding = Buffer(own.astype(table.dtype))


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes args.out, and returns (and saves as training.json) the record.

    Raises:
      ValueError: arguments that contradict each other or the target; see command.prepare and command.fit.
    """
    if args.ttt_steps < 1 or args.length < args.ttt_steps + 2:
        raise ValueError(f"--ttt-steps must lie in 1 .. --length {args.length} - 2, got {args.ttt_steps}")
    if args.init_from is not None:
        given = [name for name in _GEOMETRY if getattr(args, name) is not None]
        if given:
            raise ValueError(f"--init-from has its own architecture; leave out {given}")
        kind = read_kind(args.init_from)
        if kind not in ("eagle3", "eagle1"):
            raise ValueError(f"--init-from {args.init_from} must hold an eagle3 or eagle1 head, got {kind}")
    setup = command.prepare(args)
    target, record = setup.target, {}
    head: Any
    if args.init_from is not None:
        head = starts.load_initial(read_kind(args.init_from), args.init_from, target)
        record = renewed(head, setup) if isinstance(head, Eagle3Head) else {}
    elif args.arch == "eagle1":
        head = build_eagle1(setup)
    else:
        head, record = build_eagle3(setup)
    train = args.train_embedding
    if isinstance(head, Eagle1Head):
        set_embedding(head, target, bool(train))
        recipe = Eagle1Recipe(
            head.config.aux_layer_ids, args.ttt_steps, args.feature_noise, args.logit_weight, args.loss
        )
        return command.fit(setup, recipe, head, kind="eagle1", extra_record=record)
    if args.init_from is not None and train is None:
        train = isinstance(head.embedding, nnx.Param)  # as it was published
    set_embedding(head, target, train)
    recipe = Eagle3Recipe(head.config.aux_layer_ids, args.ttt_steps, args.decay, args.loss)
    return command.fit(setup, recipe, head, kind="eagle3", extra_record=record)
