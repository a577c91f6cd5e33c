"""How tests let XLA compile for CPUs: quickly, in this process and in those that they start, and little."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import pytest

#: One module of LLVM for each program instead of one for each of its fusions. Tests compile thousands of small programs
#: and run each a few times: unoptimised and in one piece, they compile several times faster and take a fifth of the
#: memory mappings, of which Linux allows a process 65,530. JAX 0.12 has no emitters of fusions to be turned off.
FLAGS = " ".join(
    [
        *(["--xla_cpu_use_fusion_emitters=false"] if jax.__version_info__ < (0, 12) else []),
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
#: The same for another process, as its environment.
QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": FLAGS}


@contextlib.contextmanager
def prompts_alone() -> Iterator[None]:
    """Engines that are built meanwhile compute each prompt by itself, where that is not what is tested.

    Prompts that are computed together need one more executable. The session's engines of most drafters have it.
    """
    from jaxspec import assemble  # under the settings of conftest.py

    usual = assemble.prompts_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "prompts_of", lambda config: dataclasses.replace(usual(config), several=()))
        yield
