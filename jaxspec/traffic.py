"""The log of served requests, from which draft heads can learn. Off unless EngineConfig.traffic_log names a file.

It holds what users wrote and what the model answered, as token ids that the checkpoint's tokenizer turns back into
text: keep and share it accordingly. Standard library only; must not know engines or training. A line is

    {"prompt_token_ids": [...], "output_token_ids": [...], "temperature": 0.7}

with "filtered": true where more than the temperature shaped the distribution (top-p, penalties, a bias, ...).
"""

from __future__ import annotations

import json
import logging
import os
import stat
import weakref
from pathlib import Path

from jaxspec.request import Request, SamplingParams

_log = logging.getLogger(__name__)


class TrafficLog:
    """Appends a JSON line for each request that it is given.

    Every line is one unbuffered write, so nothing waits for `close` and several engines may append to one file. An
    error while writing (a full disk) never reaches the caller: it is warned of once, what was written of the line is
    taken back, and logging stops.

    Args:
      path: created where it does not exist, readable by its owner only.

    Raises:
      ValueError: the file cannot be opened for appending, or does not end at a line's end.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as e:
            raise ValueError(f"traffic_log {str(path)!r} cannot be opened for appending: {e}") from e
        self._fd: int | None = fd
        self._closing = weakref.finalize(self, os.close, fd)
        about = os.fstat(fd)
        self._regular = stat.S_ISREG(about.st_mode)
        if self._regular and about.st_size and os.pread(fd, 1, about.st_size - 1) != b"\n":
            self.close()
            raise ValueError(f"traffic_log {str(path)!r} ends within a line; a log's last line is complete")

    def record(self, request: Request) -> None:
        """Logs a finished request; nothing after `close` or an error."""
        if self._fd is None:
            return
        row = {
            "prompt_token_ids": request.prompt_token_ids,
            "output_token_ids": request.output_token_ids,
            "temperature": request.params.temperature,
            **({"filtered": True} if _filtered(request.params) else {}),
        }
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._fd, line)
            if written < len(line):
                self._take_back(written)
                raise OSError(f"only {written} of {len(line)} bytes were written")
        except OSError as e:
            _log.warning("logging of traffic to %s stops: %s", self.path, e)
            self.close()

    def close(self) -> None:
        """Ends the log; may be called again."""
        self._fd = None
        self._closing()

    def _take_back(self, written: int) -> None:
        assert self._fd is not None
        end = os.lseek(self._fd, 0, os.SEEK_CUR)
        if self._regular and os.fstat(self._fd).st_size == end:  # nobody has appended since
            os.ftruncate(self._fd, end - written)


def _filtered(params: SamplingParams) -> bool:
    kept_all = params.top_p == 1.0 and params.top_k in (0, -1) and params.min_p == 0.0
    return not kept_all or params.uses_penalties or params.biased or params.masks_stop_tokens
