"""The DSpark network: DFlash's, with what each draft owes to the one before, and how sure it is of each.

Owns the two parts that DSpark adds to DFlash (arXiv 2607.05147, sections 3.1 and 3.2; those of DeepSpec and
`speculators` are the same). Must not know caches, checkpoints or training.

All places of a block are computed at once, so their distributions know nothing of one another. The Markov head adds
logits of low rank for the token before: a row of one table for that token, times a row of another for each candidate.
Drafting thus goes token by token again, but without the network. The confidence head says how probable it is that
the target accepts the draft of a place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.layers import Linear
from jaxspec.speculation.drafters.dflash_head import DflashConfig, DflashHead

#: What the Markov head makes of the token before: its row alone, gated by the place's hidden state, or a recurrent
#: state of all tokens before in the block.
MARKOV_TYPES = ("vanilla", "gated", "rnn")


#: Candidates of a place where the table of all is large; top 16 were as good as all in sfllm#42. They are not where
#: much of what is said comes from the token before, so a table that is read in microseconds is read whole.
SHORTLIST, WHOLE_BYTES = 16, 16 << 20


@dataclasses.dataclass(frozen=True)
class DsparkConfig(DflashConfig):
    """Geometry of a DSpark head.

    Attributes:
      sample_from_anchor: as DflashConfig's, but on by default.
      markov_rank: of the logits that depend on the token before.
      markov_type: one of MARKOV_TYPES.
      confidence: whether there is a confidence head. confidence_reads_token: it sees the token before, too.

    Raises:
      ValueError: as DflashConfig; a rank below 1 or an unknown type.
    """

    sample_from_anchor: bool = True
    markov_rank: int = 256
    markov_type: str = "vanilla"
    confidence: bool = True
    confidence_reads_token: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_rank < 1:
            raise ValueError(
                f"DsparkConfig.markov_rank must be at least 1 (without a Markov head it is a DFlash head), "
                f"got {self.markov_rank}"
            )
        if self.markov_type not in MARKOV_TYPES:
            raise ValueError(f"DsparkConfig.markov_type must be one of {MARKOV_TYPES}, got {self.markov_type!r}")

    @property
    def dflash(self) -> DflashConfig:
        """The same without DSpark's own fields."""
        return DflashConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(DflashConfig)})


class MarkovHead(nnx.Module):
    """Logits of low rank from the token before. New ones add nothing: the candidates' rows begin at zero.

    Attributes:
      before: [V, r] rows of the token before. after: [Vd, r] rows of the candidates.
    """

    def __init__(self, cfg: DsparkConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        rank, width = cfg.markov_rank, cfg.layer.hidden_size
        self.kind, self.rank = cfg.markov_type, rank
        before = jnp.zeros((cfg.vocab_size, rank), dtype)
        if rngs is not None:
            before = (0.1 * jax.random.normal(rngs.params(), before.shape, jnp.float32)).astype(dtype)
        self.before = nnx.Param(before)
        self.after = nnx.Param(jnp.zeros((cfg.draft_vocab_size, rank), dtype))
        mixed = {"vanilla": None, "gated": (width + rank, rank), "rnn": (2 * rank + width, 3 * rank)}[self.kind]
        self.mix = None if mixed is None else Linear(*mixed, bias=True, dtype=dtype, rngs=rngs)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Rows [.., r] of the tokens before."""
        return jnp.take(self.before[...], tokens, axis=0, mode="clip")

    def step(self, hidden: jax.Array, row: jax.Array, state: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """(what candidates' rows are multiplied with [.., r], the recurrent state after it) of one place.

        Args:
          hidden: [.., E]. row: of the token before, [.., r].
          state: after the place before, [.., r]; None at the first place, and of other types than "rnn".
        """
        if self.mix is None:
            return row, None
        if self.kind == "gated":
            return jax.nn.sigmoid(self.mix(jnp.concatenate([hidden, row], axis=-1))) * row, None
        state = jnp.zeros_like(row) if state is None else state
        gate, new, out = jnp.split(self.mix(jnp.concatenate([state, row, hidden], axis=-1)), 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        return jnp.tanh(out), gate * state + (1 - gate) * jnp.tanh(new)

    def along(self, hidden_XDE: jax.Array, row_XDr: jax.Array) -> jax.Array:
        """`step` at every place of blocks whose tokens are known, [.., D, r]."""
        if self.kind != "rnn":
            return self.step(hidden_XDE, row_XDr, None)[0]
        state, found = None, []
        for place in range(hidden_XDE.shape[-2]):
            out, state = self.step(hidden_XDE[..., place, :], row_XDr[..., place, :], state)
            found.append(out)
        return jnp.stack(found, axis=-2)

    def logits(self, features: jax.Array) -> jax.Array:
        """What it adds to the logits of all candidates, float32 [.., Vd]."""
        contract = (((features.ndim - 1,), (1,)), ((), ()))
        return jax.lax.dot_general(features, self.after[...], contract, preferred_element_type=jnp.float32)


class DsparkHead(DflashHead):
    """A DFlash head with a Markov and a confidence head. With rngs None its parameters are placeholders.

    New parts change nothing: `markov` adds no logits, and `confidence` says one half everywhere.
    """

    config: DsparkConfig

    def __init__(
        self, cfg: DsparkConfig, embedding: nnx.Variable, lm_head: Linear | None, *,
        dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs | None = None,
    ):  # fmt: skip
        super().__init__(cfg, embedding, lm_head, dtype=dtype, rngs=rngs)
        self.markov = MarkovHead(cfg, dtype=dtype, rngs=rngs)
        width = cfg.layer.hidden_size + cfg.confidence_reads_token * cfg.markov_rank
        self.confidence = Linear(width, 1, bias=True, dtype=dtype, rngs=None) if cfg.confidence else None

    @classmethod
    def on(cls, head: DflashHead, cfg: DsparkConfig, rngs: nnx.Rngs) -> DsparkHead:
        """A head that drafts what a DFlash head does.

        Args:
          cfg: the head's own, with DSpark's fields.
        """
        assert cfg.dflash == head.config, (cfg, head.config)
        new = cls(cfg, head.embedding, head.lm_head, dtype=head.norm.weight[...].dtype, rngs=rngs)
        nnx.update(new, nnx.state(head))
        return new

    def sure(self, hidden: jax.Array, row: jax.Array) -> jax.Array:
        """Logits of the probability that the target accepts the draft of a place, float32 [..].

        Args:
          hidden: [.., E]. row: of the token before, [.., r].
        """
        assert self.confidence is not None
        seen = jnp.concatenate([hidden, row], axis=-1) if self.config.confidence_reads_token else hidden
        return self.confidence(seen)[..., 0].astype(jnp.float32)

    @property
    def listed(self) -> int | None:
        """See `walks.WalkingHead`."""
        table = self.markov.after[...]
        return None if table.size * table.dtype.itemsize <= WHOLE_BYTES else SHORTLIST

    def walk(self) -> tuple[MarkovHead, Callable[[jax.Array, jax.Array], jax.Array] | None]:
        """See `walks.WalkingHead`."""
        return self.markov, None if self.confidence is None else self.sure

    def joined(self, hidden_XDE: jax.Array, before_XD: jax.Array) -> jax.Array:
        """Hidden states of predicting places with what the tokens before make of them, [.., D, E + r].

        Args:
          before_XD: the token before each place's draft.
        """
        return jnp.concatenate([hidden_XDE, self.markov.along(hidden_XDE, self.markov.embed(before_XD))], axis=-1)

    def joined_logits(self, joined_BNX: jax.Array) -> jax.Array:
        """Float32 logits over the draft vocabulary of what `joined` gives, [B, N, Vd]."""
        hidden_BNE, features_BNr = jnp.split(joined_BNX, [self.config.layer.hidden_size], axis=-1)
        return self.logits(hidden_BNE) + self.markov.logits(features_BNr)
