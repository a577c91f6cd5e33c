"""What a caller asks for and what it gets back: sampling parameters, requests, outputs, metrics.

Standard library only; every other part of jaxspec may import this. Must not know devices, pages or tokenizers:
`Request.slot` and `Request.pages` belong to the scheduler and are only carried here.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxspec.names import Advice, tells_names

#: Below this temperature a row takes the argmax (dividing by it would overflow float32 logits).
GREEDY_TEMPERATURE = 1e-5
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 32
MAX_LOGPROBS = 20
MAX_CHOICES = 64
MAX_PRIORITY = 100
_INT32_MAX = 2**31 - 1
_NO_BEAMS = Advice("leave it out, there is no beam search")
_GRAMMAR = "generate(..., grammar={%r: ...})"
#: What Hugging Face, llama.cpp and vLLM call what is called otherwise here.
SAMPLING_ELSEWHERE = {
    "max_new_tokens": "max_tokens", "n_predict": "max_tokens", "num_return_sequences": "n", "repeat_penalty":
    "repetition_penalty", "stop_strings": "stop", "eos_token_id": "stop_token_ids", "do_sample": "temperature",
    "max_completion_tokens": "max_tokens", "max_length": "max_tokens", "n_probs": "logprobs", "stop_sequences": "stop",
    "guided_decoding": "generate(..., grammar=)", "structured_outputs": "generate(..., grammar=)",
    "grammar": "generate(..., grammar=)", "response_format": "generate(..., grammar=)",
    "guided_json": _GRAMMAR % "json_schema", "guided_regex": _GRAMMAR % "regex", "guided_choice": _GRAMMAR % "choice",
    "guided_grammar": _GRAMMAR % "lark", "json_schema": _GRAMMAR % "json_schema", "regex": _GRAMMAR % "regex",
    "best_of": Advice("leave it out, ask for n completions and keep the one that you like best"),
    "num_beams": _NO_BEAMS, "use_beam_search": _NO_BEAMS, "length_penalty": _NO_BEAMS,
    "bad_words": Advice("leave it out, logit_bias makes tokens unlikely"),
    "logits_processors": Advice("leave it out, there are logit_bias, penalties and grammars"),
    "prompt_logprobs": Advice("leave it out, log-probabilities are of generated tokens alone"),
    "spaces_between_special_tokens": Advice("leave it out, texts are as the tokenizer decodes them"),
    "detokenize": Advice("leave it out, an LLM without a tokenizer (skip_tokenizer_init) has no texts"),
    "truncate_prompt_tokens": Advice("leave it out, a prompt too long is refused; cut its token ids"),
    "output_kind": Advice("leave it out, LLM.stream gives what is added and LLM.generate the whole"),
    "top_n_tokens": "logprobs",
}  # fmt: skip
#: The same of flags, where what a text has to be is one as well.
SAMPLING_FLAGS = {
    **SAMPLING_ELSEWHERE,
    "allowed_token_ids": Advice("leave the flag out, a grammar says what a text may be; programs have SamplingParams"),
    "guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice",
    "grammar": "json_schema, regex, choice", "guided_decoding": "json_schema, regex, choice",
    "structured_outputs": "json_schema, regex, choice", "response_format": "json_schema",
}  # fmt: skip


def _integer(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int of [low, high]; numpy integers are taken, bools are not."""
    integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not integral or not low <= int(value) <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")
    return int(value)


def _number(name: str, value: Any, low: float, high: float, *, above_low: bool = False) -> float:
    """`value` as a finite float of [low, high], or of (low, high] with `above_low`."""
    number: Any = value if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if not low <= number <= high or (above_low and number == low):  # NaN fails the first comparison
        left = "(" if above_low else "["
        raise ValueError(f"{name} must be a finite number in {left}{low:g}, {high:g}], got {value!r}")
    return float(number)


def _items(name: str, value: Any, limit: int) -> tuple[Any, ...]:
    if value is None:
        return ()
    listed = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    if not listed:
        raise ValueError(f"{name} must be a sequence of at most {limit} entries, got {value!r}")
    items = tuple(value)
    if len(items) > limit:
        raise ValueError(f"{name} may have at most {limit} entries, got {len(items)}")
    return items


@tells_names(SAMPLING_ELSEWHERE)
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends; names and defaults are vLLM's.

    Attributes:
      n: completions of the same prompt, 1 to 64.
      temperature: 0 to 1e6; below 1e-5 the argmax is taken.
      top_p: nucleus mass in (0, 1].
      top_k: candidates kept; 0 or -1 keeps all.
      min_p: drops tokens less likely than this share of the likeliest one, [0, 1].
      seed: 0 to 2**32 - 1; None lets the engine choose one.
      max_tokens: most generated tokens; None: until the context is full, which ends a text in any case
        (FinishReason.LENGTH).
      min_tokens: before so many no stop token can be drawn.
      stop: strings that end the text; one string or up to 64, stored as a tuple.
      stop_token_ids: up to 32 further ids that end the text, besides the model's own end of sequence. None here and of
        `stop`, vLLM's default, is none.
      ignore_eos: go on after the model's end of sequence.
      presence_penalty, frequency_penalty: [-2, 2], over generated tokens.
      repetition_penalty: [0.001, 1000], over prompt and generated tokens; 1 is none.
      logit_bias: added to the logits of these token ids, each in [-100, 100].
      allowed_token_ids: no others can be drawn, end of sequence included; at least one. None: all. Not with a grammar.
      logprobs: alternatives reported for each token, 0 to 20; None reports nothing.
      include_stop_str_in_output: keep the stop string at the end of the text.
      skip_special_tokens: leave special tokens out of the text.

    Raises:
      ValueError: names the field, what was given and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        checked = {
            "n": _integer("n", self.n, 1, MAX_CHOICES),
            "temperature": _number("temperature", self.temperature, 0.0, 1e6),
            "top_p": _number("top_p", self.top_p, 0.0, 1.0, above_low=True),
            "top_k": _integer("top_k", self.top_k, -1, _INT32_MAX),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "seed": None if self.seed is None else _integer("seed", self.seed, 0, 2**32 - 1),
            "max_tokens": None if self.max_tokens is None else _integer("max_tokens", self.max_tokens, 1, _INT32_MAX),
            "stop": self._checked_stop(),
            "stop_token_ids": tuple(
                _integer("stop_token_ids", token, 0, _INT32_MAX)
                for token in _items("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
            ),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3),
            "logit_bias": self._checked_bias(),
            "allowed_token_ids": self._checked_allowed(),
            "logprobs": None if self.logprobs is None else _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS),
        }
        checked["min_tokens"] = _integer("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if checked["max_tokens"] is not None and checked["min_tokens"] > checked["max_tokens"]:
            raise ValueError(f"min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            flag = getattr(self, name)
            if flag is not True and flag is not False:
                raise ValueError(f"{name} must be True or False, got {flag!r}")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def _checked_stop(self) -> tuple[str, ...]:
        strings = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop, MAX_STOP_STRINGS)
        for string in strings:
            if not isinstance(string, str) or not string:
                raise ValueError(f"stop must hold non-empty strings, got {string!r}")
        return strings

    def _checked_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        mapping = isinstance(self.logit_bias, Mapping)
        if not mapping:
            raise ValueError(f"logit_bias must map token ids to numbers in [-100, 100], got {self.logit_bias!r}")
        return {
            _integer("logit_bias token id", token, 0, _INT32_MAX): _number(f"logit_bias[{token}]", bias, -100.0, 100.0)
            for token, bias in self.logit_bias.items()
        }

    def _checked_allowed(self) -> tuple[int, ...] | None:
        if self.allowed_token_ids is None:
            return None
        allowed = _items("allowed_token_ids", self.allowed_token_ids, _INT32_MAX)
        if not allowed:
            raise ValueError("allowed_token_ids must hold at least one token id, or be None, got none")
        return tuple(_integer("allowed_token_ids", token, 0, _INT32_MAX) for token in allowed)

    @property
    def biased(self) -> bool:
        """Something is added to the logits, whatever the text."""
        return bool(self.logit_bias) or self.allowed_token_ids is not None

    @property
    def greedy(self) -> bool:
        """The argmax is taken at every position."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def uses_penalties(self) -> bool:
        """Logits depend on the tokens so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def masks_stop_tokens(self) -> bool:
        """`min_tokens` has something to forbid: the end of sequence or a stop token."""
        return self.min_tokens > 0 and (not self.ignore_eos or bool(self.stop_token_ids))

    @property
    def plain_greedy(self) -> bool:
        """The argmax of the raw logits, nothing else asked for: the row may run in a "greedy" executable."""
        shaped = self.uses_penalties or self.biased or self.masks_stop_tokens
        return self.greedy and not shaped and self.logprobs is None

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError when a stop token, a biased or an allowed one lies outside [0, vocab_size)."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise ValueError(f"{name} must be below the vocabulary size {vocab_size}, got {token}")


class RequestStatus(enum.Enum):
    """Where a request is. A preempted request is WAITING again."""

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end of sequence, stop token or stop string
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ErrorKind(enum.StrEnum):
    """What a request failed of that ended with FinishReason.ERROR."""

    NON_FINITE = "non_finite"  # the target's logits were NaN or infinite
    GRAMMAR = "grammar"  # its own grammar could not go on


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token at one position.

    Attributes:
      token_id: the token.
      logprob: natural logarithm of its probability.
      rank: 1 for the likeliest token of the vocabulary; None where it was not computed.
    """

    token_id: int
    logprob: float
    rank: int | None = None


@dataclasses.dataclass
class RequestMetrics:
    """What a request cost. Times are seconds on the engine's clock; None until they happened.

    Attributes:
      rounds: decode rounds whose tokens were committed.
      drafted, accepted: draft tokens proposed and accepted over those rounds, bonus tokens excluded.
      acceptance_histogram: entry i counts the rounds that accepted i draft tokens.
      output_tokens: generated tokens so far.
      cached_prompt_tokens: prompt tokens found in the prefix cache at the first admission.
      preemptions: times the request gave its pages back and was computed again.
      tier_rounds: rounds by the name of the tier that ran.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    acceptance_histogram: list[int] = dataclasses.field(default_factory=list)
    output_tokens: int = 0
    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    tier_rounds: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def total(cls, parts: Sequence[RequestMetrics]) -> RequestMetrics:
        """What several completions cost together."""
        if len(parts) == 1:
            return parts[0]
        total = cls(arrival_time=min((p.arrival_time for p in parts), default=0.0))
        for p in parts:
            for name in ("rounds", "drafted", "accepted", "output_tokens", "cached_prompt_tokens", "preemptions"):
                setattr(total, name, getattr(total, name) + getattr(p, name))
            pairs = itertools.zip_longest(total.acceptance_histogram, p.acceptance_histogram, fillvalue=0)
            total.acceptance_histogram = [a + b for a, b in pairs]
            for name, count in p.tier_rounds.items():
                total.tier_rounds[name] = total.tier_rounds.get(name, 0) + count
        for name, pick in (("first_scheduled_time", min), ("first_token_time", min), ("finished_time", max)):
            times = [getattr(p, name) for p in parts if getattr(p, name) is not None]
            setattr(total, name, pick(times) if times else None)
        return total

    def record_rounds(self, tier_name: str, drafted: int, by_accepted: Sequence[int]) -> None:
        """Counts committed rounds of a tier.

        Args:
          drafted: tokens drafted for this row in each of them.
          by_accepted: entry i says how many of them accepted i.
        """
        rounds = sum(by_accepted)
        self.rounds += rounds
        self.drafted += drafted * rounds
        self.accepted += sum(accepted * count for accepted, count in enumerate(by_accepted))
        pairs = itertools.zip_longest(self.acceptance_histogram, by_accepted, fillvalue=0)
        histogram = [a + b for a, b in pairs]
        while histogram and not histogram[-1]:
            histogram.pop()
        self.acceptance_histogram = histogram
        self.tier_rounds[tier_name] = self.tier_rounds.get(tier_name, 0) + rounds

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a round, bonus included; 0.0 before the first round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the drafted tokens; 0.0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None before the end or with a single token."""
        if self.first_token_time is None or self.finished_time is None or self.output_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.output_tokens - 1)


@dataclasses.dataclass(eq=False)
class Request:
    """One sequence on its way through the engine. Mutable; compared by identity.

    Attributes:
      request_id: unique among live requests.
      prompt_token_ids: at least one token.
      params: how to sample.
      seed: the resolved seed, uint32; every draw of the request derives from it.
      arrival_time: seconds on the engine's clock.
      priority: lower runs first, -100 to 100 (see SchedulerConfig.aging_seconds).
      max_depth: most drafts accepted in a round; 0 decodes token by token, None takes what the tier gives.
      tpot: seconds a token after the first that it asks for; it changes speed only. None: as fast as may be.
      max_tokens: those of its parameters; the scheduler cuts them to what the context leaves.
      output_token_ids: generated tokens the host has seen.
      logprobs: an entry for each output token, where asked for.
      finish_reason: None until the end.
      slot: row of the device state; None while waiting.
      pages: the page table, in order.
      num_computed: leading tokens of prompt + outputs whose prefill was dispatched. What rounds add to it while the
        request runs, and what is in flight, the scheduler's SlotTable knows.
      num_cached_pages: leading pages of the table that the prefix cache knows.
      num_freed_pages: leading pages of the table that went back to the pool, behind every window.
      cacheable_generated: pages written by decode rounds may be reused as a prefix.
      epoch: grows at every preemption and at the end; results of rounds dispatched in an older epoch are dropped.
      metrics: what it cost.
      error, error_kind: message and kind of a request that ended with FinishReason.ERROR; both None otherwise.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    arrival_time: float = 0.0
    priority: int = 0
    max_depth: int | None = None
    tpot: float | None = None
    max_tokens: int = dataclasses.field(init=False)
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    num_cached_pages: int = 0
    num_freed_pages: int = 0
    cacheable_generated: bool = True
    epoch: int = 0
    metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)
    error: str | None = None
    error_kind: ErrorKind | None = None

    def __post_init__(self) -> None:
        self.seed = _integer("seed", self.seed, 0, 2**32 - 1)
        if not math.isfinite(self.arrival_time):
            raise ValueError(f"arrival_time must be finite, got {self.arrival_time!r}")
        self.priority = _integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.max_depth is not None:
            self.max_depth = _integer("max_depth", self.max_depth, 0, _INT32_MAX)
        if self.tpot is not None and (not isinstance(self.tpot, numbers.Real) or not 0 < self.tpot < math.inf):
            raise ValueError(f"tpot must be a positive number of seconds, got {self.tpot!r}")
        self.max_tokens = _INT32_MAX if self.params.max_tokens is None else self.params.max_tokens
        self.metrics.arrival_time = self.arrival_time

    def draft_limit(self, depth: int) -> int:
        """Most drafts that a round of this depth may accept for the request."""
        return depth if self.max_depth is None else min(depth, self.max_depth)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and outputs, as a new list."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        """Length of prompt and outputs."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED


@dataclasses.dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
      index: which of the `n` completions.
      token_ids, text: what was generated so far.
      finish_reason: None while it runs.
      stop_reason: the stop token or stop string that ended it; None for the end of sequence and other reasons.
      logprobs: for each token, log-probabilities by token id; None when not asked for.
      error, error_kind: what went wrong, in words and as a kind, with FinishReason.ERROR; both None otherwise.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    error_kind: ErrorKind | None = None


@dataclasses.dataclass
class RequestOutput:
    """Everything about one prompt: its completions and what they cost.

    Attributes:
      request_id: as given or assigned.
      prompt: the text; None when token ids were given, and of an engine, which has no other.
      prompt_token_ids: the tokens.
      outputs: one for each of the `n` completions, by index.
      metrics: over all completions.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics

    @property
    def token_ids(self) -> list[int]:
        """Of the first completion."""
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        """Of the first completion."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first completion."""
        return self.outputs[0].finish_reason

    @property
    def finished(self) -> bool:
        """Every completion has ended."""
        return all(output.finish_reason is not None for output in self.outputs)
