"""The DFlash 2 network: DFlash's, with convolutions along the block, and a selector among its candidates.

Owns what DFlash 2 adds (Inco AI and z-lab, August 2026; z-lab/dflash 07ebd93, `speculators` and vllm#52816 have the
same). Must not know caches, checkpoints or training.

Places of a block see one another by attention alone, which is the same for all of them but for the position. In front
of and behind attention and MLP each place therefore mixes in the places just before it, channel by channel, with
weights of its own for each group of channels. The selector then scores a place's candidates given the token before.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.base import Attend, AttentionOptions
from jaxspec.models.layers import Linear
from jaxspec.models.rope import Tables
from jaxspec.speculation.drafters.dflash_head import BlockLayer, DflashConfig, DflashHead


@dataclasses.dataclass(frozen=True)
class Dflash2Config(DflashConfig):
    """Geometry of a DFlash 2 head, which drafts from the whole vocabulary.

    Attributes:
      conv_taps: places that a convolution mixes, the place itself included.
      conv_group: channels that share a place's own weights.
      selector_rank: of the selector's scores. selector_top_k: candidates of a place.

    Raises:
      ValueError: as DflashConfig; sizes that do not fit; the message names both.
    """

    conv_taps: int = 2
    conv_group: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most, of in (
            ("conv_taps", self.block_size, "block_size"),
            ("conv_group", self.layer.hidden_size, "hidden_size"),
            ("selector_rank", None, ""),
            ("selector_top_k", self.vocab_size, "vocab_size"),
        ):
            value = getattr(self, name)
            if value < 1 or (most is not None and value > most):
                bound = "at least 1" if most is None else f"from 1 to {of} {most}"
                raise ValueError(f"Dflash2Config.{name} must be {bound}, got {value}")
        if self.layer.hidden_size % self.conv_group:
            raise ValueError(
                f"Dflash2Config.conv_group must divide hidden_size {self.layer.hidden_size}, got {self.conv_group}"
            )
        if self.draft_vocab_size != self.vocab_size:
            raise ValueError(
                f"Dflash2Config.draft_vocab_size must be vocab_size {self.vocab_size}, got {self.draft_vocab_size}"
            )

    @property
    def dflash(self) -> DflashConfig:
        """The same without DFlash 2's own fields."""
        return DflashConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(DflashConfig)})


class BlockConvolution(nnx.Module):
    """Convolutions of a part's input and output, whose weights depend on the input; new ones change nothing.

    Attributes:
      base: [2, taps, E] weights that all places share, of the input and of the output.
      own: from the input to what a place adds to them, [2, taps, groups].
    """

    def __init__(self, cfg: Dflash2Config, *, dtype: jnp.dtype):
        width = cfg.layer.hidden_size
        self.places, self.shape = cfg.block_size, (2, cfg.conv_taps, width // cfg.conv_group)
        self.base = nnx.Param(jnp.zeros((2, cfg.conv_taps, width), dtype).at[:, 0].set(1))
        self.own = Linear(width, 2 * cfg.conv_taps * self.shape[2], dtype=dtype, rngs=None)

    def weights(self, x_BNE: jax.Array) -> jax.Array:
        """Of every place, [2, taps, B, N, E]."""
        own = self.own(x_BNE).reshape(*x_BNE.shape[:2], *self.shape)
        own = jnp.repeat(jnp.moveaxis(own, (2, 3), (0, 1)), x_BNE.shape[-1] // self.shape[2], axis=-1)
        return own + self.base[...][:, :, None, None]

    def mixed(self, x_BNE: jax.Array, weights_tBNE: jax.Array) -> jax.Array:
        """Each place with the ones before it in its block; N is a multiple of a block's places."""
        b, n, e = x_BNE.shape
        blocks = x_BNE.reshape(b, n // self.places, self.places, e)
        total = x_BNE * weights_tBNE[0]
        for tap in range(1, self.shape[1]):
            before = jnp.pad(blocks[:, :, : self.places - tap], ((0, 0), (0, 0), (tap, 0), (0, 0)))
            total = total + before.reshape(b, n, e) * weights_tBNE[tap]
        return total


class ConvolvedLayer(BlockLayer):
    """A BlockLayer with convolutions around its parts."""

    def __init__(self, cfg: Dflash2Config, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        super().__init__(cfg.layer, dtype=dtype, rngs=rngs)
        self.attn_conv = BlockConvolution(cfg, dtype=dtype)
        self.mlp_conv = BlockConvolution(cfg, dtype=dtype)

    def __call__(
        self, x_BNE: jax.Array, rope: Tables, attend: Attend, layer: int, options: AttentionOptions
    ) -> jax.Array:
        normed = self.attn_norm(x_BNE)
        weights = self.attn_conv.weights(normed)
        out = self.attn(self.attn_conv.mixed(normed, weights[0]), rope, attend, layer, options)
        x_BNE = x_BNE + self.attn_conv.mixed(out, weights[1])
        normed = self.mlp_norm(x_BNE)
        weights = self.mlp_conv.weights(normed)
        out = self.mlp(self.mlp_conv.mixed(normed, weights[0]))
        return x_BNE + self.mlp_conv.mixed(out, weights[1])


class Selector(nnx.Module):
    """Scores of a place's candidates by the token before; new ones are zero.

    Attributes:
      before: [V, r] rows of the token before. after: [V, r] rows of the candidates.
      project: of hidden states, [E, r].
    """

    def __init__(self, cfg: Dflash2Config, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        shape = (cfg.vocab_size, cfg.selector_rank)
        before = jnp.zeros(shape, dtype)
        if rngs is not None:
            before = (0.1 * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)
        self.before, self.after = nnx.Param(before), nnx.Param(jnp.zeros(shape, dtype))
        self.project = Linear(cfg.layer.hidden_size, cfg.selector_rank, dtype=dtype, rngs=rngs)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Rows [.., r] of the tokens before."""
        return jnp.take(self.before[...], tokens, axis=0, mode="clip")

    def step(self, hidden: jax.Array, row: jax.Array, state: jax.Array | None = None) -> tuple[jax.Array, None]:
        """See `walks.Steps`; nothing goes along."""
        return row * self.project(hidden), None

    def scores(self, features_Xr: jax.Array, ids_XK: jax.Array) -> jax.Array:
        """What is added to the logits of some candidates, float32 [.., K]."""
        rows_XKr = jnp.take(self.after[...], ids_XK, axis=0, mode="clip")
        return jnp.einsum("...r,...kr->...k", features_Xr, rows_XKr, preferred_element_type=jnp.float32)


class Dflash2Head(DflashHead):
    """A DFlash head with convolutions and a selector. With rngs None its parameters are placeholders."""

    config: Dflash2Config

    def __init__(
        self, cfg: Dflash2Config, embedding: nnx.Variable, lm_head: Linear | None, *,
        dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs | None = None,
    ):  # fmt: skip
        super().__init__(cfg, embedding, lm_head, dtype=dtype, rngs=rngs)
        self.selector = Selector(cfg, dtype=dtype, rngs=rngs)

    def _layer(self, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> BlockLayer:
        return ConvolvedLayer(self.config, dtype=dtype, rngs=rngs)

    @classmethod
    def on(cls, head: DflashHead, cfg: Dflash2Config, rngs: nnx.Rngs) -> Dflash2Head:
        """A head that drafts what a DFlash head does.

        Args:
          cfg: the head's own, with DFlash 2's fields.
        """
        assert cfg.dflash == head.config, (cfg, head.config)
        new = cls(cfg, head.embedding, head.lm_head, dtype=head.norm.weight[...].dtype, rngs=rngs)
        nnx.update(new, nnx.state(head))
        return new

    @property
    def listed(self) -> int:
        """See `walks.WalkingHead`."""
        return self.config.selector_top_k

    def walk(self) -> tuple[Selector, None]:
        """See `walks.WalkingHead`; it does not say how sure it is."""
        return self.selector, None

    def joined(self, hidden_XDE: jax.Array, before_XD: jax.Array) -> jax.Array:
        """Hidden states of predicting places with what the tokens before make of them, [.., D, E + r].

        Args:
          before_XD: the token before each place's draft.
        """
        features, _ = self.selector.step(hidden_XDE, self.selector.embed(before_XD))
        return jnp.concatenate([hidden_XDE, features], axis=-1)

    def parts(self, joined_BNX: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(float32 logits [B, N, V] before the selector, what candidates' rows are multiplied with [B, N, r])."""
        hidden_BNE, features_BNr = jnp.split(joined_BNX, [self.config.layer.hidden_size], axis=-1)
        return self.logits(hidden_BNE), features_BNr

    def joined_logits(self, joined_BNX: jax.Array) -> jax.Array:
        """Float32 logits of what `joined` gives, [B, N, V]; -inf for what is no candidate."""
        logits_BNV, features_BNr = self.parts(joined_BNX)
        best_BNK, ids_BNK = jax.lax.top_k(logits_BNV, self.config.selector_top_k)
        scores_BNK = best_BNK + self.selector.scores(features_BNr, ids_BNK)
        put = jax.vmap(jax.vmap(lambda ids, scores, wide: wide.at[ids].set(scores)))
        return put(ids_BNK, scores_BNK, jnp.full_like(logits_BNV, -jnp.inf))
