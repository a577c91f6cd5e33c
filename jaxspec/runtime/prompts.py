"""What prompts bring to the device: a request's row of the state, and the calls that compute a step's chunks.

Must not know executables, nor when anything runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxspec.request import Request, SamplingParams
from jaxspec.runtime.results import Pending
from jaxspec.scheduling.plan import PrefillChunk
from jaxspec.scheduling.shapes import Call, Piece, PrefillShape
from jaxspec.speculation.layouts import Admission, Chunks
from jaxspec.speculation.sampling import INT32_MAX, MAX_STOP_IDS, SamplingState
from jaxspec.speculation.state import Geometry
from pallas_kernels.rejection_sampling.reference import NEG_INF


def admission(chunk: PrefillChunk, eos: Sequence[int], vocab_size: int) -> Admission:
    """The row of a request whose first chunk this is.

    Args:
      eos: token ids that min_tokens bans besides the request's own stop ids.
    """
    request, params, text = chunk.request, chunk.request.params, chunk.request.token_ids
    stops = list(params.stop_token_ids)
    if params.min_tokens and not params.ignore_eos:
        stops += eos
    stops += [vocab_size] * (MAX_STOP_IDS - len(stops))
    prompt_len = len(request.prompt_token_ids)
    derived = {
        "temperature": 0.0 if params.greedy else params.temperature, "top_k": max(params.top_k, 0),
        "seed": request.seed, "prompt_len": prompt_len,
        "ban_until": min(prompt_len + params.min_tokens, INT32_MAX), "ends_at": prompt_len + request.max_tokens,
        "eos_ends": int(not params.ignore_eos), "num_stops": len(params.stop_token_ids),
    }  # fmt: skip
    numbers = {
        field: derived[number.name] if number.name in derived else getattr(params, number.name)
        for field, number in SamplingState.numbers().items()
    }
    return Admission(chunk.slot, chunk.start, len(text), numbers, stops, chunk.page_table, text)


def bias_of(params: SamplingParams, vocab_size: int) -> np.ndarray:
    """A request's logit bias, float32 [1, V]; of tokens that are not allowed what no logit makes up for."""
    bias = np.zeros((1, vocab_size), np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = NEG_INF
        bias[0, list(params.allowed_token_ids)] = 0.0
    for token, value in (params.logit_bias or {}).items():
        bias[0, token] += value
    return bias


@dataclasses.dataclass(frozen=True)
class ChunkCall:
    """One call for pieces of a step's chunks.

    Attributes:
      chunks: one of each piece; those whose prompts end here come first.
      ending: how many those are.
      counts: tokens of each piece.
      new: the chunks that begin here with their request's first tokens.
    """

    shape: PrefillShape
    chunks: tuple[PrefillChunk, ...]
    ending: int
    counts: tuple[int, ...]
    new: tuple[PrefillChunk, ...]

    @classmethod
    def of(cls, shape: PrefillShape, pieces: Sequence[Piece], chunks: Sequence[PrefillChunk]) -> ChunkCall:
        """The call of a shape for pieces of `chunks`."""

        def ends(piece: Piece) -> bool:
            chunk = chunks[piece.chunk]
            return chunk.is_last and chunk.start + piece.start + piece.count == chunk.end

        ordered = sorted(pieces, key=ends, reverse=True)
        counts = tuple(piece.count for piece in ordered)
        new = tuple(chunks[p.chunk] for p in ordered if p.start == 0 and chunks[p.chunk].is_first)
        return cls(shape, tuple(chunks[piece.chunk] for piece in ordered), sum(map(ends, ordered)), counts, new)

    @property
    def begins(self) -> list[tuple[Request, int]]:
        """(request, its epoch) of those whose prompts end here, in the call's order."""
        return [(chunk.request, chunk.request.epoch) for chunk in self.chunks[: self.ending]]

    def array(self, geo: Geometry) -> np.ndarray:
        """What the device reads, as `Chunks`."""
        rows = [
            (chunk.slot, count, i < self.ending)
            for i, (chunk, count) in enumerate(zip(self.chunks, self.counts, strict=True))
        ]
        return Chunks.of(geo, self.shape.rows, rows).array


@dataclasses.dataclass
class PromptWork:
    """The chunks of a step, and how far they are dispatched.

    Attributes:
      chunks: of different requests.
      allowed: of each what the token after it may be, as an int32 set of bits [W]; None: anything.
      pending: dispatched calls that end prompts.
      calls: those that are left to dispatch; None: nothing is dispatched.
    """

    chunks: Sequence[PrefillChunk]
    allowed: Sequence[np.ndarray | None]
    pending: list[Pending] = dataclasses.field(default_factory=list)
    calls: Sequence[Call] | None = None

    @property
    def free(self) -> bool:
        """Whether no token after a chunk is restricted."""
        return all(mask is None for mask in self.allowed)

    @property
    def counts(self) -> list[int]:
        """Tokens of each chunk."""
        return [chunk.end - chunk.start for chunk in self.chunks]

    def mask(self, chunk: PrefillChunk) -> np.ndarray | None:
        """What the token after a chunk may be."""
        return next(mask for other, mask in zip(self.chunks, self.allowed, strict=True) if other is chunk)
