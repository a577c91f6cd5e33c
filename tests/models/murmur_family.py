"""A family that shares nothing with Llama, as a contributor would write one: learned positions, LayerNorm, biases
everywhere, a GELU MLP, fused keys and values, scores that are scaled and capped, and names of its own throughout.

No source outside this directory knows it: test_models_family.py registers it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.models.base import Attend, AttentionOptions, ModelConfig, Split, TargetModel
from jaxspec.models.family import Family, check_positive, token_ids
from jaxspec.models.weight_map import Weight

#: Rows that the checkpoint's table of positions has in front and nobody reads.
SPARE = 2


@dataclasses.dataclass(frozen=True)
class MurmurConfig(ModelConfig):
    """Attributes:
    score_scale, score_cap, window: see AttentionOptions; no cap and no window where None.
    """

    score_scale: float = 0.25
    score_cap: float | None = None
    window: int | None = None


def read_config(hf: dict[str, Any]) -> MurmurConfig:
    for name in ("n_vocab", "d_model", "n_block", "n_head", "n_ctx"):
        check_positive(hf, name, required=True)
    if hf["d_model"] % hf["n_head"]:
        raise ValueError(f"config.json: d_model {hf['d_model']} is not a multiple of n_head {hf['n_head']}")
    bos = token_ids(hf.get("bos_token_id"))
    return MurmurConfig(
        family="murmur", vocab_size=hf["n_vocab"], hidden_size=hf["d_model"], intermediate_size=3 * hf["d_model"],
        num_layers=hf["n_block"], num_heads=hf["n_head"], num_kv_heads=hf["n_head"],
        head_dim=hf["d_model"] // hf["n_head"], max_position_embeddings=hf["n_ctx"],
        tie_word_embeddings=hf["tied"], bos_token_id=bos[0] if bos else None,
        eos_token_ids=token_ids(hf.get("eos_token_id")), score_scale=hf["score_scale"], score_cap=hf["score_cap"],
        window=hf["window"],
    )  # fmt: skip


def write_config(cfg: MurmurConfig) -> dict[str, Any]:
    return {
        "model_type": "murmur", "n_vocab": cfg.vocab_size, "d_model": cfg.hidden_size, "n_block": cfg.num_layers,
        "n_head": cfg.num_heads, "n_ctx": cfg.max_position_embeddings, "tied": cfg.tie_word_embeddings,
        "bos_token_id": cfg.bos_token_id, "eos_token_id": list(cfg.eos_token_ids) or None,
        "score_scale": cfg.score_scale, "score_cap": cfg.score_cap, "window": cfg.window,
    }  # fmt: skip


class Affine(nnx.Module):
    """x W + b; W stored [in, out]."""

    def __init__(self, d_in: int, d_out: int, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        draw = jnp.zeros if rngs is None else lambda shape, kind: jax.random.normal(rngs.params(), shape, kind)
        self.kernel = nnx.Param(draw((d_in, d_out), dtype) / np.sqrt(d_in).astype(dtype))
        self.shift = nnx.Param(draw((d_out,), dtype) / 4)

    def __call__(self, x_BNE: jax.Array) -> jax.Array:
        return x_BNE @ self.kernel[...] + self.shift[...][None, None, :]

    def columns(self, widths: Sequence[int] = ()) -> list[Split]:
        return [Split(self, "kernel", 1, widths), Split(self, "shift", 0, widths)]

    def rows(self) -> list[Split]:
        return [Split(self, "kernel", 0)]

    def weights(self, name: str, parts: Sequence[str] = ("",)) -> Iterator[Weight]:
        widths = (self.kernel.shape[1] // len(parts),) * len(parts)
        yield Weight(self.kernel, tuple(f"{name}{part}.w" for part in parts), widths, transposed=True)
        yield Weight(self.shift, tuple(f"{name}{part}.b" for part in parts), widths)


class Centred(nnx.Module):
    """LayerNorm."""

    def __init__(self, width: int, dtype: jnp.dtype):
        self.slope, self.shift = nnx.Param(jnp.ones((width,), dtype)), nnx.Param(jnp.zeros((width,), dtype))

    def __call__(self, x_BNE: jax.Array) -> jax.Array:
        normed = jax.nn.standardize(x_BNE, axis=-1, epsilon=1e-5)
        return normed * self.slope[...][None, None, :] + self.shift[...][None, None, :]

    def weights(self, name: str) -> Iterator[Weight]:
        yield Weight(self.slope, (f"{name}.slope",), self.slope.shape)
        yield Weight(self.shift, (f"{name}.shift",), self.shift.shape)


class Listen(nnx.Module):
    """Attention; keys and values come from one map, in as many groups as devices share it."""

    def __init__(self, cfg: MurmurConfig, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        width = cfg.hidden_size
        self.heads, self.shards = cfg.num_heads, 1
        self.options = AttentionOptions(cfg.window, cfg.score_cap, cfg.score_scale)
        self.ask = Affine(width, width, dtype, rngs)
        self.tell = Affine(width, 2 * width, dtype, rngs)
        self.mix = Affine(width, width, dtype, rngs)

    def __call__(self, x_BNE: jax.Array, attend: Attend, layer: int) -> jax.Array:
        b, n, e = x_BNE.shape
        both = self.tell(x_BNE).reshape(b, n, self.shards, 2, self.heads // self.shards, e // self.heads)
        k, v = (both[:, :, :, i].reshape(b, n, self.heads, -1) for i in (0, 1))
        out = attend(layer, self.ask(x_BNE).reshape(b, n, self.heads, -1), k, v, self.options)
        return self.mix(out.reshape(b, n, e))

    def splits(self, shards: int) -> list[Split]:
        if self.heads % shards:
            return []
        self.shards, width = shards, self.ask.kernel.shape[1]
        return [*self.ask.columns(), *self.tell.columns((width, width)), *self.mix.rows()]


class Think(nnx.Module):
    """A GELU MLP."""

    def __init__(self, cfg: MurmurConfig, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        self.wide = Affine(cfg.hidden_size, cfg.intermediate_size, dtype, rngs)
        self.narrow = Affine(cfg.intermediate_size, cfg.hidden_size, dtype, rngs)

    def __call__(self, x_BNE: jax.Array) -> jax.Array:
        return self.narrow(jax.nn.gelu(self.wide(x_BNE)))

    def splits(self, shards: int) -> list[Split]:
        return [*self.wide.columns(), *self.narrow.rows()]


class Murmur(TargetModel):
    """The model."""

    def __init__(self, cfg: MurmurConfig, /, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        self.config = cfg
        e = cfg.hidden_size
        draw = jnp.zeros if rngs is None else lambda shape, kind: jax.random.normal(rngs.params(), shape, kind)
        self.words = nnx.Param(draw((cfg.vocab_size, e), dtype))
        self.places = nnx.Param(draw((cfg.max_position_embeddings, e), dtype) / 2)
        self.ears = nnx.List([Listen(cfg, dtype, rngs) for _ in range(cfg.num_layers)])
        self.minds = nnx.List([Think(cfg, dtype, rngs) for _ in range(cfg.num_layers)])
        self.norms = nnx.List([Centred(e, dtype) for _ in range(2 * cfg.num_layers + 1)])
        self.say = None if cfg.tie_word_embeddings else Affine(e, cfg.vocab_size, dtype, rngs)

    @property
    def embedding(self) -> nnx.Variable:
        return self.words

    @property
    def lm_head(self) -> Affine | None:
        return self.say

    def embed(self, tokens_BN: jax.Array) -> jax.Array:
        return jnp.take(self.words[...], tokens_BN, axis=0, mode="clip")

    def __call__(
        self, tokens_BN: jax.Array, positions_BN: jax.Array, attend: Attend, aux_layers: Sequence[int] = ()
    ) -> tuple[jax.Array, jax.Array | None]:
        x_BNE = self.embed(tokens_BN) + jnp.take(self.places[...], positions_BN, axis=0, mode="clip")
        streams = [x_BNE]
        for i, (listen, think) in enumerate(zip(self.ears, self.minds, strict=True)):
            x_BNE = x_BNE + listen(self.norms[2 * i](x_BNE), attend, i)
            x_BNE = x_BNE + think(self.norms[2 * i + 1](x_BNE))
            streams.append(x_BNE)
        streams.append(self.norms[-1](x_BNE))
        return streams[-1], jnp.concatenate([streams[i] for i in aux_layers], axis=-1) if aux_layers else None

    def logits(self, hidden_BNE: jax.Array) -> jax.Array:
        out = hidden_BNE @ self.words[...].T if self.say is None else self.say(hidden_BNE)
        return 2.5 * out.astype(jnp.float32)

    def splits(self, shards: int) -> list[Split]:
        return [Split(self, "words", 0), *([] if self.say is None else self.say.columns())]


class Places(Weight):
    """The table of positions, which the file has with SPARE rows of zeros in front."""

    @property
    def shapes(self) -> Iterator[tuple[int, ...]]:
        rows, width = self.param.shape
        yield rows + SPARE, width

    def join(self, parts: Sequence[np.ndarray]) -> jax.Array:
        return super().join([parts[0][SPARE:]])

    def split(self, dtype: DTypeLike) -> Sequence[np.ndarray]:
        return [np.pad(super().split(dtype)[0], ((SPARE, 0), (0, 0)))]


def weights(model: Murmur) -> Iterator[Weight]:
    e = model.config.hidden_size
    yield Weight(model.words, ("words",), (e,), copies=("say.w",) if model.say is None else ())
    yield Places(model.places, ("places",), (e,))
    for i, (listen, think) in enumerate(zip(model.ears, model.minds, strict=True)):
        yield from listen.ask.weights(f"{i}.ask")
        yield from listen.tell.weights(f"{i}.tell", (".keys", ".values"))
        yield from listen.mix.weights(f"{i}.mix")
        yield from think.wide.weights(f"{i}.wide")
        yield from think.narrow.weights(f"{i}.narrow")
    for i, norm in enumerate(model.norms):
        yield from norm.weights(f"norms.{i}")
    if model.say is not None:
        yield from model.say.weights("say")


FAMILY = Family("murmur", ("MurmurForSpeech",), read_config, write_config, Murmur, weights, ("num_heads",))
