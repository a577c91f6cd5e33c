"""The server's log: one JSON object (or one line of text) a record, on standard error, written by a thread of its own.

Whoever logs only queues: a pipe that nobody reads must stop neither the engine nor the event loop. What does not fit
the queue is dropped, and counted in a record of its own.

Owns the format, and the promise that no prompt and no output reaches the log unless `log_prompts` says so: values that
a client sent travel in the messages of ValueErrors and StatusErrors, so of those only the type and the place are
written. Must not know services or the engine.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, TextIO

#: Loggers that tell about every compilation, connection and look-up of their own.
CHATTY = ("jax", "jaxlib", "absl", "asyncio", "grpc", "urllib3", "opentelemetry")
#: Records that may wait to be written: more than a second of a busy server's, a few megabytes.
QUEUED = 8192
#: Seconds in which what waits is written at the end of the process, unless nobody reads it.
FLUSH_SECONDS = 2.0
_FIELDS = "serve_fields"


def event(logger: logging.Logger, level: int, name: str, **fields: Any) -> None:
    """Writes a record with fields of its own; those that are None are left out.

    Args:
      name: what happened, in snake_case.
    """
    if logger.isEnabledFor(level):
        kept = {key: value for key, value in fields.items() if value is not None}
        logger.log(level, name, extra={_FIELDS: kept})


class QueuedHandler(logging.Handler):
    """Formats and writes on a thread of its own; whoever logs never waits for it.

    Not logging's QueueListener, whose end waits for a write that may never end.

    Args:
      stream: what is written to, by its descriptor where it has one: a write that blocks must hold no lock of the
        stream, which the interpreter takes when it ends.
      size: records that may wait; further ones are dropped, and a record says how many once there is room.

    Attributes:
      dropped: records lost so far.
    """

    def __init__(self, stream: TextIO, size: int = QUEUED) -> None:
        super().__init__()
        self.dropped = self._told = 0
        self._stream, self._descriptor = stream, _descriptor(stream)
        self._waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(size)
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a copy with its final message: the arguments may change before it is written."""
        record = copy.copy(record)
        try:
            record.msg, record.args = record.getMessage(), None
            self._waiting.put_nowait(record)
        except queue.Full:
            self.dropped += 1  # under the handler's lock
        except Exception:
            self.handleError(record)

    def drain(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Waits until all that was logged is written; False where that takes longer."""
        ends = time.monotonic() + seconds
        with self._waiting.all_tasks_done:
            while self._waiting.unfinished_tasks:
                left = ends - time.monotonic()
                if left <= 0:
                    return False
                self._waiting.all_tasks_done.wait(left)
        return True

    def close(self) -> None:
        """Writes what waits, for FLUSH_SECONDS at most, and ends the thread. logging calls it at exit."""
        if self.drain():
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(None)
        super().close()

    def _run(self) -> None:
        while True:
            record = self._waiting.get()
            try:
                if record is None:
                    return
                self._write(record)
                if self._told < self.dropped:
                    lost, self._told = self.dropped - self._told, self.dropped
                    self._write(_lost(lost))
            except Exception:  # of a pipe that nobody holds any more: there is nobody to tell, but it is counted
                self.acquire()
                self.dropped += 1
                self.release()
            finally:
                self._waiting.task_done()

    def _write(self, record: logging.LogRecord) -> None:
        line = self.format(record) + "\n"
        if self._descriptor is None:
            self._stream.write(line)
            self._stream.flush()
            return
        data = memoryview(line.encode("utf-8", "backslashreplace"))
        while data:
            data = data[os.write(self._descriptor, data) :]


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, AttributeError):  # io.UnsupportedOperation is an OSError
        return None


def _lost(count: int) -> logging.LogRecord:
    record = logging.LogRecord("serve", logging.WARNING, __file__, 0, "log_records_dropped", None, None)
    setattr(record, _FIELDS, {"count": count})
    return record


def configure(level: str, form: str, *, log_prompts: bool = False, stream: TextIO | None = None) -> QueuedHandler:
    """Sends every record of this process to one handler, and returns it. At exit what waits is written.

    Args:
      level: "debug", "info", "warning" or "error", for the project's own loggers; others start at "warning".
      form: "json" or "text".
      log_prompts: write the messages of exceptions that may hold what a client sent.
      stream: None is standard error.
    """
    handler = QueuedHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(log_prompts) if form == "json" else TextFormatter(log_prompts))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        if isinstance(old, QueuedHandler):
            old.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_a_line)
    return handler


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Anybody can send bytes that are no message; gRPC writes a traceback for each, the metrics count them."""
    return not (record.exc_info and type(record.exc_info[1]).__name__ == "DecodeError")


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: time (UTC, ISO 8601), level, event, and the record's fields.

    A record that is no event of the server has the event "log", with its logger and message.
    """

    def __init__(self, log_prompts: bool = False) -> None:
        super().__init__()
        self._log_prompts = log_prompts

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.entry(record), ensure_ascii=False, default=str)

    def entry(self, record: logging.LogRecord) -> dict[str, Any]:
        """The object that is written."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
        }
        fields = getattr(record, _FIELDS, None)
        if fields is None:
            entry |= {"event": "log", "logger": record.name, "message": record.getMessage()}
        else:
            entry |= {"event": record.getMessage(), **fields}
        if record.exc_info and record.exc_info[1] is not None:
            entry["exception"] = describe(record.exc_info[1], self._log_prompts)
        return entry


class TextFormatter(JsonFormatter):
    """The same entry for human eyes: time, level, event, then key=value."""

    def format(self, record: logging.LogRecord) -> str:
        entry = self.entry(record)
        head = f"{entry.pop('time')} {entry.pop('level'):7} {entry.pop('event')}"
        exception = entry.pop("exception", None)
        pairs = "".join(f" {key}={_shown(value)}" for key, value in entry.items())
        return head + pairs + (f"\n{exception}" if exception else "")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if any(c.isspace() or c in '"=' for c in text) or not text else text


def describe(error: BaseException, log_prompts: bool = False) -> str:
    """An exception and what caused it, with the places they passed, a line each.

    The message of a ValueError or of an error that a client is told about may hold what the client sent: it is left
    out, unless `log_prompts`.
    """
    lines = []
    link: BaseException | None = error
    while link is not None and len(lines) < 200:
        told = log_prompts or (not isinstance(link, ValueError | KeyError | TypeError) and not hasattr(link, "status"))
        message = f": {link}" if told and str(link) else "" if told else ": (message withheld, it may hold a prompt)"
        lines.append(f"{type(link).__name__}{message}")
        lines += _frames(link.__traceback__)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "\n".join(lines)


def _frames(trace: TracebackType | None) -> list[str]:
    return [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(trace)]
