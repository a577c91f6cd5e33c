"""`python -m jaxspec.train mtp`: a multi-token prediction module, chained over its own output.

The loss is FastMTP's (arXiv:2509.18362, equation 2): in step k the module reads the text's token n + 1 + k and its own
output of step k - 1, and is held to the text's token n + 2 + k. One step is DeepSeek-V3's module at depth 1.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.checkpointing import heads
from jaxspec.models.base import ModelConfig, TargetModel
from jaxspec.models.layers import Shared, Transformer, causal_attention, shared_lm_head
from jaxspec.speculation.drafters.mtp_head import MtpConfig, MtpHead
from jaxspec.train.data.batch import Batch, ahead
from jaxspec.train.drafters import drafts, starts
from jaxspec.train.drafters.recipe import TargetStates
from jaxspec.train.objective.chunks import best_tokens, text_cross_entropy
from jaxspec.train.objective.loss import draft_loss, masked_mean, mean_weights
from jaxspec.train.objective.ttt import unroll
from jaxspec.train.run import command

LAYER_TYPES = ("qwen3", "llama", "target")
#: Tokens on which a new module's scale is measured.
_SAMPLE = 256


@dataclasses.dataclass(frozen=True)
class MtpRecipe:
    """Sum over the steps k of decay**k / sum(decay**j) times the mean cross entropy of learned positions.

    Attributes:
      steps: how often the module is chained.
      decay: FastMTP's beta.
      soft: the labels are the target's distributions instead of the text's tokens.
    """

    steps: int = 3
    decay: float = 0.6
    soft: bool = False
    aux_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"decay must lie in (0, 1], got {self.decay}")

    @property
    def depth(self) -> int:
        """Drafts of a chain."""
        return self.steps

    @property
    def weights(self) -> tuple[float, ...]:
        """Of each step's mean; they sum to one."""
        total = sum(self.decay**k for k in range(self.steps))
        return tuple(self.decay**k / total for k in range(self.steps))

    def loss(
        self, module: MtpHead, target: TargetModel, batch: Batch, states: TargetStates, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """See Recipe."""
        kept = batch.tokens_BT.shape[1] - 1 - self.steps
        hidden = unroll(module, batch, states.hidden_BTE, self.steps)
        if self.soft:
            weights = [mean_weights(batch.learned_ahead(2 + k), w) for k, w in enumerate(self.weights)]
            loss, matches_BTD = draft_loss(module, target, hidden, states.hidden_BTE, weights)
            return loss, matches_BTD[:, :kept], {}
        best_BT = best_tokens(target, states.hidden_BTE)
        loss, matches, metrics = jnp.float32(0.0), [], {}
        for k, (weight, hidden_BTE) in enumerate(zip(self.weights, hidden, strict=True)):
            labels_BT, choice_BT = ahead(batch.tokens_BT, 2 + k), ahead(best_BT, 1 + k)
            found = text_cross_entropy(module.logits, hidden_BTE, labels_BT, choice_BT, module.config.vocab_size)
            entropy = masked_mean(found[0], batch.learned_ahead(2 + k))
            loss = loss + weight * entropy
            matches.append(found[1][:, :kept])
            metrics[f"loss_{k + 1}"] = entropy
        return loss, jnp.stack(matches, axis=-1), metrics


def new_head(layer_type: str, target: TargetModel, tokens_BT: jax.Array, seed: int) -> MtpHead:
    """A module that passes the target's hidden state on to a copy of the target's last decoder layer.

    fc is the identity on the hidden half and zero on the embedding's. The norms around the layer undo the target's
    final gain and put it back, and restore the size that the stream has in the target, so that without its layer the
    module says what the target says.

    Args:
      layer_type: "qwen3" (norms on queries and keys, no biases), "llama" (neither) or "target" (as the target has it).
        The target's attention is copied unless its queries are normed and the module's are not.
      tokens_BT: a piece of text to measure the stream on.

    Raises:
      ValueError: a target whose layers are not those of models.layers.
    """
    cfg = target.config
    if not isinstance(target, Transformer):
        raise ValueError(f"a new MTP module copies a layer of Llama's shape, got a target of family {cfg.family!r}")
    layer = _target_layer(target)
    if layer_type != "target":
        plain = {"attention_bias": False, "output_bias": False, "mlp_bias": False}
        layer = dataclasses.replace(layer, qk_norm=layer_type == "qwen3", **plain)
    tables = Shared(target.embedding[...]), shared_lm_head(target)
    head = MtpHead(MtpConfig(layer, cfg.num_layers), *tables, rngs=nnx.Rngs(params=seed))
    _copy_layer(head, target)
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None, :], tokens_BT.shape)
    hidden_BTE, stream_BTE = target(tokens_BT, positions_BT, causal_attention, (cfg.num_layers,))
    assert stream_BTE is not None
    size = lambda x: float(np.median(np.sqrt(np.mean(np.asarray(x, np.float32) ** 2, axis=-1))))
    gain_E = np.asarray(target.norm.weight[...], np.float32)
    # A channel with no gain is lost in the hidden state.
    seen_E = np.abs(gain_E) > 1e-3 * np.sqrt(np.mean(gain_E**2))
    undo_E = np.where(seen_E, size(stream_BTE) * size(hidden_BTE) / np.where(seen_E, gain_E, 1.0), 0.0)
    head.hidden_norm.weight[...] = jnp.asarray(undo_E, jnp.float32)
    head.norm.weight[...] = jnp.asarray(gain_E)
    width = cfg.hidden_size
    head.fc.kernel[...] = jnp.concatenate([jnp.zeros((width, width)), jnp.eye(width)]).astype(jnp.float32)
    return head


def _target_layer(target: TargetModel) -> ModelConfig:
    """The configuration of a module whose layer is shaped as the target's are."""
    plain = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_ids": ()}
    return dataclasses.replace(target.config, family="mtp", num_layers=1, **plain)


def check_layout(head: MtpHead, target: TargetModel, layout: str) -> None:
    """Refuses a module that the layout cannot hold, before training instead of after.

    Raises:
      ValueError: tables of its own where the layout has none; a layer unlike the target's in the target's checkpoint.
    """
    own = isinstance(head.embedding, nnx.Param) or (head.lm_head is not None and type(head.lm_head.kernel) is nnx.Param)
    if own and layout != "deepseek":
        raise ValueError(f"the module has tables of its own, which --layout deepseek holds, got {layout}")
    if layout != "speculators":
        heads.check_written(head.config.layer, _target_layer(target))


def _copy_layer(head: MtpHead, target: Transformer) -> None:
    """The last decoder layer's parameters, where the module has the same."""
    source, layer = target.layers[-1], head.layer
    attn, theirs = layer.attn, source.attn
    names = ["attn_norm.weight", "mlp_norm.weight", "mlp.gate_up.kernel", "mlp.gate_up.bias", "mlp.down.kernel"]
    names += ["mlp.down.bias"]
    if theirs.q_norm is None or attn.q_norm is not None:
        names += ["attn.qkv.kernel", "attn.qkv.bias", "attn.out.kernel", "attn.out.bias"]
        names += ["attn.q_norm.weight", "attn.k_norm.weight"]
    for name in names:
        mine, other = _find(layer, name), _find(source, name)
        if mine is not None and other is not None:
            mine.set_value(jnp.array(other.get_value(), jnp.float32, copy=True))
    if theirs.q_norm is None and attn.q_norm is not None and attn.k_norm is not None:
        # Norms that the target lacks start at the size that its queries and keys have for inputs of unit variance.
        assert source.attn_norm is not None
        gain_E = np.asarray(source.attn_norm.weight[...], np.float32)
        squares = (gain_E[:, None] * np.asarray(theirs.qkv.kernel[...], np.float32)) ** 2
        query, key = attn.num_heads * attn.head_dim, attn.num_kv_heads * attn.head_dim
        sizes = np.sqrt(squares.sum(axis=0))
        attn.q_norm.weight[...] = jnp.full((attn.head_dim,), float(np.sqrt(np.mean(sizes[:query] ** 2))), jnp.float32)
        key_size = float(np.sqrt(np.mean(sizes[query : query + key] ** 2)))
        attn.k_norm.weight[...] = jnp.full((attn.head_dim,), key_size, jnp.float32)


def _find(node: Any, path: str) -> Any:
    for name in path.split("."):
        node = None if node is None else getattr(node, name)
    return node


#: See drafts.Trainer.
chain = drafts.unrolled


def add_arguments(p: argparse.ArgumentParser) -> None:
    """What only MTP modules have."""
    command.add_common_arguments(p)
    p.add_argument("--mtp-steps", type=int, default=3, help="how often the module is chained")
    p.add_argument("--decay", type=float, default=0.6, help="weight of each further step's loss (FastMTP's beta)")
    p.add_argument("--soft", action="store_true", help="learn the target's distributions instead of the texts' tokens")
    p.add_argument("--layer-type", choices=LAYER_TYPES, help="default: qwen3 (all that speculators builds), or target "
                   "where the layout puts the module into the target's checkpoint")  # fmt: skip


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes args.out and returns the record. --init-from may be a target that carries a module.

    Raises:
      ValueError: options out of range or that exclude each other, or --init-from that holds another drafter.
    """
    layout = starts.check_layout("mtp", args.layout)
    inside = args.layout in ("deepseek", "qwen3_next")
    shape = starts.geometry(args, {"layer_type": "target" if inside else "qwen3"})
    if inside and shape["layer_type"] != "target":
        raise ValueError(f"--layout {args.layout} needs --layer-type target, got {shape['layer_type']}")
    MtpRecipe(args.mtp_steps, args.decay)
    setup = command.prepare(args)
    starts.check_length(setup.rows.length, args.mtp_steps)
    target = setup.target
    if args.init_from is not None:
        head = starts.load_initial("mtp", args.init_from, target)
    else:
        sample = setup.rows.tokens[:1, : min(_SAMPLE, setup.rows.length)]
        head = new_head(shape["layer_type"], target, jnp.asarray(sample), args.seed)
    check_layout(head, target, layout)
    recipe = MtpRecipe(args.mtp_steps, args.decay, args.soft)
    extra = {"steps": args.mtp_steps, "decay": args.decay, "soft": args.soft}
    return command.fit(setup, recipe, head, kind="mtp", extra_record=extra)
