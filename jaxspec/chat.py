"""A conversation in the terminal: turns in, streamed answers out, and a line that says how they are made.

Must not know how an engine is built. Where standard input is no terminal, every line of it is a turn.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from jaxspec.events import Delta, Finished
from jaxspec.llm import LLM
from jaxspec.request import RequestMetrics, RequestOutput, SamplingParams
from jaxspec.text.grammar import GrammarSpec

_COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D leaves"
#: What looks like a command; paths and fractions do not.
_COMMAND = re.compile(r"/[a-z?]+")
#: Seconds between two looks of the status line.
_LOOK_SECONDS = 0.1


class StatusLine:
    """The last line of a terminal, which the rest scrolls above. Elsewhere it does nothing.

    Args:
      file: what is written to.
    """

    def __init__(self, file: TextIO):
        self._file, self._rows = file, 0
        self.shown = file.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def show(self, text: str) -> None:
        """Replaces the line."""
        if not self.shown:
            return
        columns, rows = os.get_terminal_size(self._file.fileno())
        # A scrolling region (DECSTBM) of all lines but the last, again when the window's size has changed. Setting one
        # moves the cursor, which is saved (DECSC), and which must not stand in the last line.
        region = "" if rows == self._rows else f"\n\x1b[A\x1b7\x1b[1;{rows - 1}r\x1b8"
        self._rows = rows
        self._file.write(f"{region}\x1b7\x1b[{rows};1H\x1b[2m{text[: columns - 1]}\x1b[0m\x1b[K\x1b8")
        self._file.flush()

    def close(self) -> None:
        """Gives the line back."""
        if self._rows:
            self._file.write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[K\x1b8")
            self._file.flush()
            self._rows = 0


class Chat:
    """One conversation.

    Args:
      params: of every answer; max_tokens is cut to what the context leaves.
      context: tokens of the longest conversation, answers included.
      grammar: what every answer has to be; None: anything.
      quiet: answers only.

    Attributes:
      messages: the conversation so far, as chat templates take it.
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, context: int, *, grammar: GrammarSpec | None = None, quiet: bool = False
    ):
        self._llm, self._params, self._context, self._grammar, self._quiet = llm, params, context, grammar, quiet
        self.messages: list[dict[str, str]] = []
        self._status, self._looked = StatusLine(sys.stderr), 0.0

    def run(self) -> int:
        """Answers turns until there are no more; returns the exit status: 1 where a turn was refused."""
        refused = False
        if sys.stdin.isatty() and not self._quiet:
            print(_COMMANDS, file=sys.stderr)
        try:
            for turn in turns():
                if turn == "/exit":
                    break
                if turn == "/reset":
                    self.messages.clear()
                    continue
                try:
                    if _COMMAND.fullmatch(turn):
                        raise ValueError(f"there is no command {turn}: {_COMMANDS}")
                    self.answer(turn)
                except ValueError as e:
                    refused = True
                    print(f"error: {e}", file=sys.stderr)
        finally:
            self._status.close()
        return int(refused)

    def answer(self, turn: str) -> RequestOutput:
        """Streams the answer to a turn and keeps both.

        Raises:
          ValueError: the chat template refuses the conversation, or the context has no room; the turn is forgotten.
        """
        messages = [*self.messages, {"role": "user", "content": turn}]
        tokenizer = self._llm.tokenizer
        tokens = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
        if len(tokens) >= self._context:
            raise ValueError(
                f"the conversation holds {len(tokens)} tokens and the context {self._context}; /reset forgets it"
            )
        began = time.perf_counter()
        final: RequestOutput | None = None
        for _, event in self._llm.stream(tokens, self._params, grammar=self._grammar):
            match event:
                case Delta():
                    print(event.text, end="", flush=True)
                    self._look(event.request_id)
                case Finished():
                    final = event.output
        assert final is not None
        print(flush=True)
        self.messages = [*messages, {"role": "assistant", "content": final.text}]
        if not self._quiet:
            self._tell(final, time.perf_counter() - began)
        return final

    def _look(self, request_id: str) -> None:
        """Brings the status line up to date, ten times a second."""
        now = time.monotonic()
        if self._quiet or not self._status.shown or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        metrics, stats = self._llm.shared.call(lambda engine: (engine.metrics(request_id), engine.stats))
        line = f"tier {stats.active_tier or 'none yet'}"
        if metrics is not None and metrics.drafted:
            line += f" | {metrics.acceptance_rate:.0%} of drafts accepted, {_a_round(metrics)}"
        self._status.show(line + still_compiling(stats.executables_ready, stats.executables))

    def _tell(self, output: RequestOutput, seconds: float) -> None:
        count = len(output.token_ids)
        line = f"{count} tokens, {count / seconds:.0f} tokens/s"
        if output.metrics.rounds:
            line += f", {_a_round(output.metrics)}"
        stats = self._llm.shared.call(lambda engine: engine.stats)
        line += still_compiling(stats.executables_ready, stats.executables)
        print(f"\x1b[2m{line}\x1b[0m" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


def turns() -> Iterator[str]:
    """Turns from standard input, without those that say nothing. A terminal is asked, with readline's editing."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    with contextlib.suppress(ImportError):  # not on every system
        import readline

        assert readline
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line


def still_compiling(ready: int, total: int) -> str:
    """The end of a line about speed, while deeper tiers and larger batches are not there yet."""
    return f" | compiling: {ready} of {total} executables" if ready < total else ""


def _a_round(metrics: RequestMetrics) -> str:
    return f"{metrics.mean_accepted_length:.2f} tokens a round"
