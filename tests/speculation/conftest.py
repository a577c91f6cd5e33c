"""A round on models that are one table look-up: thousands of rows at once, and their exact distribution is known."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.models.base import ModelConfig
from jaxspec.speculation.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.speculation.drafters.featureless import Featureless
from jaxspec.speculation.drafters.proposals import Ranking, propose_block
from jaxspec.speculation.drafters.suffix import prompt_lookup
from jaxspec.speculation.layouts import Batch, Budget, plain_calibration
from jaxspec.speculation.packed import packed_fn
from jaxspec.speculation.round import RoundSpec, round_fn
from jaxspec.speculation.sampling import SamplingState
from jaxspec.speculation.several import several_fn
from jaxspec.speculation.state import DecodeState, Geometry
from jaxspec.tier import Tier

V, EOS = 7, 6
CONFIG = ModelConfig("llama", V, V, 1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2)
PROMPT = [3, 1, 4, 1, 5, 1]


class MarkovModel(nnx.Module):
    """The next token depends on the last one alone; keys and values are token + 1, so that a pool can be read."""

    def __init__(self, table_VV: np.ndarray):
        self.config = CONFIG
        self.table = nnx.Param(jnp.asarray(table_VV, jnp.float32))

    def __call__(
        self, tokens_BN: jax.Array, positions_BN: jax.Array, attend: Any, aux_layers: Sequence[int] = ()
    ) -> tuple[jax.Array, None]:
        kv = jnp.broadcast_to(tokens_BN.astype(jnp.float32)[:, :, None, None] + 1, (*tokens_BN.shape, 1, 2))
        attend(0, kv, kv, kv)
        return tokens_BN.astype(jnp.float32)[:, :, None], None

    def logits(self, hidden_BNE: jax.Array) -> jax.Array:
        # A look-up, not a product: 0 * NaN would carry a poisoned row to every other.
        return jnp.take(self.table[...], hidden_BNE[:, :, 0].astype(jnp.int32), axis=0, mode="clip")


class MarkovCore:
    """The same as a draft network."""

    offset, aux_layers, aux_width, narrows = 0, (), 0, False
    num_layers, num_kv_heads, kv_width, vocab_size, dtype = 1, 1, 4, V, jnp.float32
    draft_vocab_size = V

    def __init__(self, table_VV: np.ndarray):
        self.graph, self.params = nnx.split(MarkovModel(table_VV))

    def bind(self, params: Any) -> Any:
        return nnx.merge(self.graph, params)

    def fuse(self, net: Any, aux_BNA: jax.Array) -> None:
        return None

    def forward(self, net: Any, tokens_BN: jax.Array, feature: None, positions_BN: jax.Array, attend: Any) -> jax.Array:
        return net(tokens_BN, positions_BN, attend)[0]

    def logits(self, net: Any, hidden_BNE: jax.Array) -> jax.Array:
        return net.logits(hidden_BNE)

    def target_ids(self, net: Any) -> None:
        return None


class ParallelTable(Featureless):
    """Proposes each depth's marginal under the table, whatever the path: the least that drafts in one pass know."""

    supports_trees = True
    max_topk = V

    def __init__(self, table_VV: np.ndarray):
        probs = np.exp(table_VV - table_VV.max(axis=1, keepdims=True))
        probs /= probs.sum(axis=1, keepdims=True)
        powers = itertools.accumulate([probs] * 3, np.matmul)
        self.logits_DVV = np.log(np.stack(list(powers))).astype(np.float32)

    def draft(
        self, params: Any, draft: Any, rows: Any, tokens_SL: jax.Array, tier: Tier, sampling: Any, noise_BDV: Any,
        sample: bool,
    ) -> Any:  # fmt: skip
        logits_BDV = jnp.swapaxes(jnp.take(jnp.asarray(self.logits_DVV[: tier.depth]), rows.root_B, axis=1), 0, 1)
        ranking = Ranking(rows, sampling, noise_BDV, V)
        return propose_block(logits_BDV, ranking, tier, sample=sample), draft


class Unsure:
    """A drafter whose confidences mean nothing; its parameters are the drafter's own, and which of `MEANT` it says."""

    MEANT = ("its own", "inverted", "random", "constant", "NaN")

    def __init__(self, drafter: Any):
        self._drafter = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def draft(self, params: Any, draft: Any, rows: Any, *rest: Any) -> Any:
        own, which = params
        tree, draft = self._drafter.draft(own, draft, rows, *rest)
        c = tree.confidence_BN
        key = jax.random.key(rows.length_B.sum())
        said = jnp.stack([c, 1 - c, jax.random.uniform(key, c.shape), jnp.full_like(c, 0.5), jnp.full_like(c, np.nan)])
        return dataclasses.replace(tree, confidence_BN=said[which]), draft


@dataclasses.dataclass
class Markov:
    """Rounds over `slots` rows.

    Attributes:
      target, draft: next-token logits by last token.
    """

    target: np.ndarray
    draft: np.ndarray
    slots: int
    page_size: int = 8
    pages_per_seq: int = 3
    max_depth: int = 3

    def __post_init__(self) -> None:
        self.geo = Geometry(
            self.slots, self.slots * self.pages_per_seq, self.page_size, self.pages_per_seq, self.max_depth
        )
        self.graph, self.params = nnx.split(MarkovModel(self.target))
        self.core = MarkovCore(self.draft)
        self._jitted: dict[Any, Callable[..., Any]] = {}

    def state(self, prompt: Sequence[int] = PROMPT, **sampling: Any) -> DecodeState:
        """Every slot holds the prompt, whose last token is the root; scalars of `sampling` are for all slots."""
        geo, n = self.geo, len(prompt)
        if "empty" not in self._jitted:  # dozens of arrays, each of which would be a program by itself
            first = self._drafter("draft").init_state
            self._jitted["empty"] = jax.jit(
                lambda: (
                    DecodeState.empty(CONFIG, geo, jnp.dtype(jnp.float32), first(geo)),
                    SamplingState.empty(geo.slots, V),
                )
            )
        state, rows = self._jitted["empty"]()
        table = np.random.default_rng(0).permutation(geo.num_pages).reshape(geo.slots, geo.pages_per_seq)
        pages = np.asarray(state.pages).copy()
        for position, token in enumerate(prompt[:-1]):
            pages[table[:, position // geo.page_size], :, position % geo.page_size] = token + 1
        defaults = dict(
            seed_S=np.arange(geo.slots), in_prompt_SV=np.isin(np.arange(V), prompt), prompt_len_S=n, temperature_S=1.0
        )
        fields = {
            name: jnp.asarray(np.broadcast_to(np.asarray(value), getattr(rows, name).shape), getattr(rows, name).dtype)
            for name, value in (defaults | sampling).items()
        }
        draft = dataclasses.replace(
            state.draft,
            pages=jnp.asarray(pages),
            next_S=jnp.full(geo.slots, n - 1),
            length_S=jnp.full(geo.slots, n - 1),
        )
        return dataclasses.replace(
            state, pages=jnp.asarray(pages), table_SM=jnp.asarray(table, jnp.int32), draft=draft,
            tokens_SL=state.tokens_SL.at[:, :n].set(jnp.asarray(prompt)), length_S=jnp.full(geo.slots, n - 1),
            sampling=dataclasses.replace(rows, **fields),
        )  # fmt: skip

    def _drafter(self, kind: str) -> Any:
        if kind.startswith("unsure "):
            return Unsure(self._drafter(kind.removeprefix("unsure ")))
        if kind == "draft":
            return AutoregressiveDrafter(self.core, self.geo)
        return prompt_lookup(V) if kind == "ngram" else ParallelTable(self.draft)

    def batch(self, slots: Sequence[int] | None = None) -> np.ndarray:
        """A batch without new pages for these slots (all by default); `self.slots` is padding."""
        slots = range(self.slots) if slots is None else slots
        return Batch.of(self.geo, len(slots), slots, self.geo.max_depth).array

    def run(
        self, state: DecodeState, tier: Tier, *, kind: str = "draft", rejection: bool = False, sampled: bool = True,
        batch: np.ndarray | None = None, draft_params: Any = None, tokens: int | None = None, spend: Any = None,
        several: int | None = None,
    ) -> tuple[DecodeState, np.ndarray]:  # fmt: skip
        """One round; (state, packed).

        Args:
          tokens: of a packed round. spend: its calibration and `Budget`, where they are not plain.
          several: so many rounds in one executable, and what each emitted.
        """
        key = (tier, kind, rejection, sampled, tokens, several)
        if key not in self._jitted:
            spec = RoundSpec(self.graph, CONFIG, self.geo, self._drafter(kind), rejection, eos=(EOS,))
            made = round_fn(spec, tier, sampled) if tokens is None else packed_fn(spec, tier, sampled, tokens)
            made = made if several is None else several_fn(made, several)
            self._jitted[key] = jax.jit(made)
        params = self.core.params if draft_params is None else draft_params
        stateless = not kind.endswith("draft")
        if stateless:  # or nearly: matches of suffixes are a function of the text
            cache = state.draft
            state = dataclasses.replace(state, draft=self._drafter(kind).init_state(self.geo))
        batch = self.batch() if batch is None else batch
        if tokens is not None and spend is None:
            spend = plain_calibration(self.max_depth), Budget.even(len(batch))
        params = () if stateless and draft_params is None else params
        after, packed, _ = self._jitted[key](self.params, params, state, batch, *(spend or ()))
        return (dataclasses.replace(after, draft=cache) if stateless else after), np.asarray(packed)

    def generate(self, state: DecodeState, tier: Tier, count: int, **options: Any) -> tuple[np.ndarray, DecodeState]:
        """The next `count` tokens of every slot (a round brings at least one), and the state after the rounds."""
        first = int(state.length_S[0]) + 1
        for _ in range(count):
            state, packed = self.run(state, tier, **options)
            assert not packed[:, 1].any()
        return np.asarray(state.tokens_SL)[:, first : first + count], state


def exact_logits(
    table: np.ndarray, path: Sequence[int], prompt: Sequence[int], *, bias: Any = 0.0, ban: tuple[int, int] = (0, 0),
    repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """Logits after bias, a ban of token ban[1] for the first ban[0] outputs, and penalties over `path`."""
    x = table[[*prompt, *path][-1]].astype(np.float64) + bias
    if len(path) < ban[0]:
        x[ban[1]] = -np.inf
    for token in range(V):
        if token in path or token in prompt:
            x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        x[token] -= frequency * list(path).count(token) + presence * (token in path)
    return x


def exact_probs(
    x: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Temperature, min-p, top-k, top-p, in this order; 0 is greedy."""
    if temperature == 0:
        return np.eye(V)[int(x.argmax())]
    p = np.exp((x - x.max()) / temperature)
    p[p < min_p * p.max()] = 0
    if 0 < top_k < V:
        p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p)
    if top_p < 1:
        last = order[int(np.searchsorted(np.cumsum(p[order]), top_p))]
        p[p < p[last]] = 0
    return p / p.sum()


def joint(table: np.ndarray, count: int, prompt: Sequence[int], filters: dict[str, Any], adjust: dict[str, Any]) -> Any:
    """Exact probabilities of the next `count` tokens, an array of shape [V] * count."""
    out = np.zeros((V,) * count)
    for path in itertools.product(range(V), repeat=count):
        p = 1.0
        for i, token in enumerate(path):
            p *= exact_probs(exact_logits(table, path[:i], prompt, **adjust), **filters)[token] if p else 0.0
        out[path] = p
    return out


@pytest.fixture(scope="session")
def markov() -> Callable[[int], Markov]:
    """Builds rounds of a number of slots; the draft's table resembles the target's."""
    rng = np.random.default_rng(11)
    target = 1.3 * rng.normal(size=(V, V))
    draft = target + 0.8 * rng.normal(size=(V, V))
    made: dict[int, Markov] = {}
    return lambda slots: made.setdefault(slots, Markov(target, draft, slots))


@pytest.fixture(scope="session")
def exact_joint() -> Callable[..., Any]:
    return joint
