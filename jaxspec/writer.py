"""Texts by the batch: an engine that is fed so that it never runs dry, in this process or in actors of a cluster.

Every text has a seed of its own and the engine runs one batch size without a prefix cache, so a text depends neither on
those beside it nor on the process that writes it. (On accelerators two processes may round differently; then texts may
part where two tokens tie.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxspec import clusters
from jaxspec.adaptive.registry import OFF
from jaxspec.clusters import Cluster
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.drafters.registry import NONE
from jaxspec.events import Finished
from jaxspec.request import FinishReason, SamplingParams

_BATCH, _CPU_BATCH = 128, 16


class Asked(NamedTuple):
    """A text to write: the tokens before it, and how it is sampled."""

    tokens: list[int]
    params: SamplingParams


class Written(NamedTuple):
    """A text.

    Attributes:
      text: "" without a tokenizer. error: why there is none; None: there is.
    """

    token_ids: list[int]
    text: str
    reason: FinishReason
    error: str | None


@dataclasses.dataclass(frozen=True)
class WriterConfig:
    """An engine for texts by the batch.

    Attributes:
      model: a directory, the same on all machines of a cluster. drafter: as LLM's.
      longest: prompt and output together, in tokens.
      sampled: whether any text asks for more than the argmax (SamplingParams.plain_greedy).
      tokenizer: whether texts are to be read besides tokens.
      batch: written together; None: 16 on a CPU and 128 elsewhere.
    """

    model: Path
    drafter: str | Path | None
    longest: int
    sampled: bool = True
    tokenizer: bool = True
    batch: int | None = None


class Writer:
    """An engine, and what keeps it busy."""

    def __init__(self, how: WriterConfig):
        import jax

        from jaxspec.assemble import build_engine

        self._batch = how.batch or (_CPU_BATCH if jax.default_backend() == "cpu" else _BATCH)
        config = EngineConfig(
            max_batch_size=self._batch, batch_buckets=(self._batch,), max_seq_len=how.longest,
            enable_prefix_caching=False, variants=("sampled",) if how.sampled else ("greedy",),
            skip_tokenizer_init=not how.tokenizer,
        )  # fmt: skip
        policy = SpeculationConfig(policy=OFF) if how.drafter == NONE else SpeculationConfig()
        self._engine = build_engine(how.model, how.drafter, policy, config)

    def stream(self, texts: Iterable[tuple[int, Asked]]) -> Iterator[tuple[int, Written]]:
        """Writes numbered texts; each comes when it is finished."""
        engine, coming = self._engine, iter(texts)
        numbers: dict[str, int] = {}
        while True:
            while len(numbers) < 2 * self._batch and (following := next(coming, None)) is not None:
                number, asked = following
                numbers[engine.add(asked.tokens, asked.params)] = number
            if not numbers:
                return
            for event in engine.step():
                if isinstance(event, Finished):
                    output = event.output
                    written = Written(output.token_ids, output.text, event.reason, output.outputs[0].error)
                    yield numbers.pop(event.request_id), written

    def __call__(self, texts: Sequence[Asked]) -> list[Written]:
        """Writes texts; in their order."""
        done = dict(self.stream(enumerate(texts)))
        return [done[number] for number in range(len(texts))]


def write(how: WriterConfig, texts: Sequence[Asked], cluster: Cluster | None = None) -> Iterator[tuple[int, Written]]:
    """Yields (number of the text, what was written) as they are finished.

    Args:
      cluster: None: an engine in this process.

    Raises:
      ValueError: what the engine refuses.
    """
    if cluster is None:
        yield from Writer(how).stream(enumerate(texts))
    else:
        yield from clusters.spread(_Make(how), texts, cluster, 4 * (how.batch or _BATCH))


@dataclasses.dataclass(frozen=True)
class _Make:
    """`Writer`, to be pickled."""

    how: WriterConfig

    def __call__(self) -> Writer:
        return Writer(self.how)
