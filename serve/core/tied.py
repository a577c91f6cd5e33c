"""python -m serve.core.tied PARENT MODULE [ARGUMENT ...]: `python -m MODULE ...`, told to end when its parent dies.

For children whose parent may be killed without a word. The Linux kernel then sends them SIGTERM; elsewhere the module
simply runs. The child sets this itself, because a parent with threads must not run Python between fork and exec.
Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, module, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        # What is set outlives exec.
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != int(parent):  # it died before the kernel was told
            sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    main()
