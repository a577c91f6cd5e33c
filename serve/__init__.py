"""The generation server: gRPC in front of the engine. Imports jaxspec; nothing of jaxspec imports it."""

import os
import sys

# Commands of this package say themselves what went wrong, and a server's log may be JSON: none of gRPC's own lines. It
# reads this when it is imported; `python -m` imports this package before it names the command in sys.argv.
if sys.argv[:1] == ["-m"]:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
