"""LLM: the offline front. Prompts in, finished or streaming completions out, from as many threads as one likes."""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from jaxspec.adaptive.controller import Recorder
from jaxspec.adaptive.policy import TierPolicy
from jaxspec.arguments import engine_config
from jaxspec.assemble import build_engine
from jaxspec.config import SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.events import Delta, Event, Finished
from jaxspec.names import tells_arguments
from jaxspec.prepared import Grammars, Prepared, prepare
from jaxspec.prompts import CALL_ELSEWHERE, Conversation, Prompt
from jaxspec.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from jaxspec.shared import SharedEngine
from jaxspec.stats import EngineStats
from jaxspec.text.modes import ChatModes
from jaxspec.text.tokenizer import Tokenizer

#: Between two looks whether weights have been loaded.
_LOOK_SECONDS = 0.02
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Group:
    """One prompt's completions on their way.

    Attributes:
      position: of the prompt in the call.
      text: of the prompt; None where token ids were given.
      ids: the engine's request ids, by completion index.
      parts: finished completions by index.
    """

    position: int
    text: str | None
    ids: list[str]
    parts: dict[int, RequestOutput]

    def merged(self) -> RequestOutput:
        """The finished completions as one output, with summed metrics."""
        ordered = [self.parts[i] for i in sorted(self.parts)]
        first = ordered[0]
        outputs: list[CompletionOutput] = [part.outputs[0] for part in ordered]
        metrics = RequestMetrics.total([part.metrics for part in ordered])
        return dataclasses.replace(first, prompt=self.text, outputs=outputs, metrics=metrics)


class LLM:
    """A language model with adaptive speculative decoding.

    For as many threads as one likes: calls that run at the same time share the batch, and each gets the tokens that it
    gets alone. Requests without a seed take theirs in the order in which they arrive, as they do in one thread.

    Args:
      model: "demo", a Hugging Face directory (config.json, safetensors, tokenizer.json), or a hub id
        ("organisation/model"), which is downloaded where the package huggingface_hub is installed.
      drafter: a name from jaxspec.drafters.registry ("none" for plain decoding), or a directory or hub id with a
        drafter's checkpoint. None: an EAGLE-3 head where one lies beside the model, else prompt look-up.
      speculation: a SpeculationConfig or a dict with its fields.
      max_batch_size: requests decoded together.
      max_seq_len: longest prompt plus output, in tokens; None: the model's context, at most 2048.
      seed: base of the seeds of requests that bring none.
      progress: bars on standard error, for what the first request needs to be compiled (more comes in the background,
        EngineConfig.warmup), and for the prompts of `generate` and `chat`.
      **engine: further fields of EngineConfig.

    Attributes:
      shared: the engine between its users.

    Raises:
      ValueError: what cannot be loaded or does not fit together; names the field and both values.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        drafter: str | Path | None = None,
        speculation: SpeculationConfig | Mapping[str, Any] | None = None,
        max_batch_size: int = 8,
        max_seq_len: int | None = None,
        seed: int = 0,
        *,
        progress: bool = True,
        **engine: Any,
    ):
        config = engine_config(engine, max_batch_size=max_batch_size, max_seq_len=max_seq_len, seed=seed)
        built = build_engine(model, drafter, speculation, config, progress=progress)
        self.shared, self._progress = SharedEngine(built), progress
        self._chats, self._told_of_chats = ChatModes(built.facts.chats, built.facts.tokenizer), False
        facts, tiers = built.facts, ", ".join(tier.name for tier in sorted(built.runner.reachable))
        self._description = (
            f"LLM({str(model)!r}, drafter={facts.drafter!r}, policy={facts.policy!r}, tiers=[{tiers}], "
            f"dtype={facts.dtype}, max_batch_size={facts.sizes.slots}, max_seq_len={facts.sizes.max_seq_len})"
        )

    def __repr__(self) -> str:
        return self._description

    def close(self) -> None:
        """Ends what still runs, in whichever thread, and lets go of the engine and its memory. Idempotent.

        After it, and in calls that it ends, everything but `close` raises RuntimeError.
        """
        self.shared.close(RuntimeError("this LLM was closed while the call ran"))
        gc.collect()  # an engine's parts refer to each other, and a pool is no pressure that the collector would feel

    def follow(self) -> None:
        """Where several processes share this LLM: in all but the first, which alone takes requests.

        Runs what the first process runs, and returns when that closes its LLM.

        Raises:
          HostLostError: the first process, or another, is gone.
          ValueError: this process follows none.
        """
        self.shared.call(lambda engine: engine.follow())

    @property
    def warm(self) -> bool:
        """Whether every executable has come and was timed."""
        return self.shared.engine.warm

    @property
    def compiling(self) -> bool:
        """Whether executables are still to come that no earlier process has compiled and kept."""
        return self.shared.engine.runner.compiling

    def finish_warmup(self) -> None:
        """Compiles nothing more after what is being compiled and what the next start is to draft with; waits for these.

        For processes that end before all is warm: what has come is kept, and the next one begins with it.
        """
        self.shared.engine.finish_warmup()  # in no turn: whoever waits may be interrupted

    def wait_until_warm(self) -> None:
        """Returns when every executable has come and was timed. Requests need not wait for it."""
        self.shared.engine.wait_until_warm()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @tells_arguments(CALL_ELSEWHERE)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        grammar: Grammars = None,
        priority: int | Sequence[int] = 0,
        tpot: float | None = None,
        max_depth: int | Sequence[int | None] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Completes one or many prompts.

        Args:
          prompts: a text, a list of token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these, which
            may be empty.
          sampling_params: one for all prompts, or one each; None is SamplingParams().
          grammar: what the texts have to be, a GrammarSpec or such as {"json_schema": {...}}, {"regex": "[0-9]+"} or
            {"choice": ["yes", "no"]}; one for all prompts, or one each. Needs LLM(structured_output=True).
          priority: of all prompts, or one each: lower runs first, -100 to 100.
          tpot: seconds a token after the first that they ask for, which under a budget serves those first that lag. It
            changes no token. None: as fast as may be.
          max_depth: most drafts accepted in a round, of all prompts, or one each; 0 decodes token by token. It changes
            no token under coupled verification. None: what the policy chooses.
          use_tqdm: a progress bar over prompts, where there is more than one; None: if this LLM shows its progress.

        Returns:
          One RequestOutput a prompt, in order. One that failed while it ran, by a grammar that allows nothing more,
          say, has FinishReason.ERROR, and its `error` says why.

        Raises:
          ValueError: a prompt or parameters that cannot be honoured. Nothing was run, and the engine stays usable.
          Exception: what a step raised, in whichever thread: it ends every call under way.
        """
        run = self._submit(prompts, sampling_params, grammar, priority, tpot, max_depth, whole=True)
        outputs: list[RequestOutput | None] = [None] * len(run.groups)
        try:
            shown = (self._progress if use_tqdm is None else use_tqdm) and len(run.groups) > 1
            with tqdm(total=len(run.groups), desc="prompts", disable=not shown) as bar:
                for position, event in run:
                    if isinstance(event, Finished):
                        outputs[position] = event.output
                        bar.update()
        finally:
            run.close()
        return [output for output in outputs if output is not None]

    @tells_arguments(CALL_ELSEWHERE)
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        grammar: Grammars = None,
        priority: int | Sequence[int] = 0,
        tpot: float | None = None,
        max_depth: int | Sequence[int | None] | None = None,
    ) -> Iterator[tuple[int, Delta | Finished]]:
        """Yields (position of the prompt, what was added or how it ended) as tokens come.

        Closing or dropping the iterator aborts what is left. The output of a Finished holds all completions of the
        prompt that have ended so far, the last one's the whole. Streams and calls of `generate` may be interleaved, in
        one thread or in several: whoever waits for a token advances all of them.
        """
        return self._submit(prompts, sampling_params, grammar, priority, tpot, max_depth, whole=False)

    @tells_arguments(CALL_ELSEWHERE)
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        grammar: Grammars = None,
        use_tqdm: bool | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Completes one or many conversations with the checkpoint's own chat template.

        Args:
          messages: [{"role": ..., "content": ...}, ...], or a list of such lists. A content may also be a list of text
            parts.
          sampling_params, grammar, use_tqdm: as `generate`.
          add_generation_prompt: whether the template opens the assistant's turn.
          tools, chat_template_kwargs: reach the template.

        Returns:
          One RequestOutput a conversation, in order, as vLLM's.

        Raises:
          ValueError: as `generate`, or the checkpoint has no chat template, or it refuses a conversation.
        """
        tokenizer = self.tokenizer
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise ValueError(f"messages must be a list of {{'role': ..., 'content': ...}}, got {messages!r}")
        one = bool(messages) and isinstance(messages[0], Mapping)
        variables = {**(chat_template_kwargs or {}), "add_generation_prompt": add_generation_prompt}
        if tools is not None:
            variables["tools"] = list(tools)
        conversations: list[Any] = [messages] if one else list(messages)
        if not self._told_of_chats and self._chats.unlike(variables):
            self._told_of_chats = True
            _log.warning("%s", self._chats.told(chat_template_kwargs or {}))
        texts = [tokenizer.apply_chat_template(messages, **variables) for messages in conversations]
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self.generate(ids, sampling_params, grammar=grammar, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, by vLLM's name for it.

        Raises:
          ValueError: as `tokenizer`.
        """
        return self.tokenizer

    @property
    def engine(self) -> Engine:
        """The engine, which is for one thread: use it while no other calls, or by `shared.call`."""
        return self.shared.engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
          ValueError: there is none, by skip_tokenizer_init.
        """
        tokenizer = self.engine.facts.tokenizer
        if tokenizer is None:
            raise ValueError("this LLM has no tokenizer (skip_tokenizer_init=True): prompts must be token ids")
        return tokenizer

    @property
    def stats(self) -> EngineStats:
        """Counters: rounds by tier, compilations after warm-up, prefix-cache hits, and more."""
        return self.shared.call(lambda engine: engine.stats)

    def use_policy(self, policy: TierPolicy, recorder: Recorder | None = None) -> None:
        """From the next step on, `policy` chooses the tier: see Engine.use_policy."""
        self.shared.call(lambda engine: engine.use_policy(policy, recorder))

    def update_drafter(self, directory: str | Path, *, trial: bool = True) -> int:
        """Exchanges the drafter's weights between two rounds; nothing is compiled, and no token changes.

        The new weights are of a checkpoint of the same kind, configuration and shapes. They take turns with those that
        are served until it is clear which bring more tokens a round (jaxspec.adaptive.versions); the others are kept.

        Args:
          trial: False: they are served at once.

        Returns:
          their version; `stats.drafter_version` is the served one's.

        Raises:
          ValueError: what cannot be read or does not fit, by name and with both values, or another update is under
            way; the weights stay as they are. Where several processes share this LLM, what any of them cannot read.
        """
        ticket = self.shared.call(lambda engine: engine.drafter_weights.begin(directory))
        # It loads beside the rounds of whoever steps.
        while (version := self.shared.call(lambda e: e.drafter_weights.finish(ticket, trial=trial))) is None:
            time.sleep(_LOOK_SECONDS)
        return version

    def flush_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns how many pages that freed. Live requests keep theirs."""
        return self.shared.call(lambda engine: engine.flush_prefix_cache())

    # Submission.

    def prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        grammar: Grammars,
    ) -> list[Prepared]:
        """All that needs no engine, and may take its time: checks, tokenization, grammars.

        Raises:
          ValueError: as `generate`.
        """
        encode = lambda text: self.tokenizer.encode(text)  # asked for only where there is a text
        return prepare(prompts, params, grammar, encode, self.engine.facts.grammars)

    def _submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        grammar: Grammars,
        priority: int | Sequence[int],
        tpot: float | None,
        max_depth: int | Sequence[int | None] | None,
        *,
        whole: bool,
    ) -> _Run:
        arrival_time = time.monotonic()
        prepared = self.prepare(prompts, params, grammar)
        priorities, depths = (
            _each(name, value, len(prepared)) for name, value in (("priority", priority), ("max_depth", max_depth))
        )

        def submit(engine: Engine) -> _Run:
            groups: list[_Group] = []
            try:
                for position, prompt in enumerate(prepared):
                    ids = prompt.add(engine, arrival_time, priorities[position], tpot, depths[position])
                    groups.append(_Group(position, prompt.text, ids, {}))
                run = _Run(self.shared, groups, whole)
                self.shared.listen(run, [request_id for group in groups for request_id in group.ids])
            except BaseException:
                for group in groups:
                    for request_id in group.ids:
                        engine.abort(request_id)
                raise
            return run

        return self.shared.call(submit)


def _each(name: str, value: Any, count: int) -> list[Any]:
    """An argument's value for each prompt."""
    values = list(value) if isinstance(value, Sequence) else [value] * count
    if len(values) != count:
        raise ValueError(f"{name} must be one or one for each prompt: got {len(values)} for {count}")
    return values


class _Run(Iterator[tuple[int, Delta | Finished]]):
    """The iterator behind generate and stream: one call's events, whoever steps the engine.

    Args:
      whole: only the last event of each prompt is wanted.
    """

    def __init__(self, shared: SharedEngine, groups: list[_Group], whole: bool):
        self._shared, self.groups, self._whole = shared, groups, whole
        self._owner = {request_id: group for group in groups for request_id in group.ids}
        self._live = set(self._owner)
        self._ready: deque[tuple[int, Delta | Finished]] = deque()
        self._error: Exception | None = None

    def take(self, event: Event) -> None:
        """Queues an event; the output of the last one of a prompt is the prompt's."""
        if event.request_id not in self._live:  # closed meanwhile
            return
        group = self._owner[event.request_id]
        match event:
            case Delta():
                if not self._whole:
                    self._ready.append((group.position, event))
            case Finished():
                group.parts[event.index] = event.output
                if len(group.parts) == len(group.ids) or not self._whole:
                    self._ready.append((group.position, dataclasses.replace(event, output=group.merged())))
                self._live.discard(event.request_id)  # last: who sees none live finds everything ready

    def fail(self, error: Exception) -> None:
        """What is ready comes, then the error, for good."""
        if self._live:  # else it has ended, or was closed
            self._error = error
            self._live.clear()

    def _settled(self) -> bool:
        return bool(self._ready) or not self._live

    def __next__(self) -> tuple[int, Delta | Finished]:
        while True:
            live = bool(self._live)
            try:
                return self._ready.popleft()
            except IndexError:
                pass
            if self._error is not None:
                raise self._error
            if not live:
                raise StopIteration
            self._shared.advance(self._settled)

    def close(self) -> None:
        """Aborts what is left, without waiting for a step that another thread is in."""
        self._end(self._shared.release)

    def _end(self, release: Callable[[Sequence[str]], None]) -> None:
        left = tuple(self._live)
        self._live.clear()
        self._ready.clear()
        if left:
            release(left)

    def __del__(self) -> None:
        # Also a stream that was never started holds a slot. The collector may run within a step, in this very thread.
        self._end(self._shared.abandon)
