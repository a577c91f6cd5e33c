"""Requests that ask for a time per token: how far each is behind, and what a token of it is worth to a shared budget.

Rules of two kinds. AdaServe's is cumulative (arXiv 2501.12162, section 4): a request that is behind what its target
promised by now needs several tokens at once, and its drafts come first. AdaSpec's is per step (SoCC '25, section 5.3):
no round may take longer than the target, so that a request that accepts nothing has its token in time; the adaptive
policy lets it take as long as the tokens allow that it should bring. Must not know JAX.
"""

from __future__ import annotations

from collections.abc import Sequence

#: What users can name.
CUMULATIVE, STEP = "cumulative", "step"
RULES = (CUMULATIVE, STEP)


def need(elapsed: float, emitted: float, seconds: float, tpot: float) -> float:
    """Tokens that a round must bring a request for it to be on time at the round's end; below 1: none in haste.

    Args:
      elapsed: seconds since its first token. emitted: tokens since then.
      seconds: of the round. tpot: seconds a token that it asks for.
    """
    return (elapsed + seconds) / tpot - emitted


def weights(needs: Sequence[float | None], deepest: int) -> list[float]:
    """What a drafted token of each row is worth, relative to one of a row that asks for nothing (1).

    A row that is on time with the token which every round brings weighs 1; one that lags weighs 1 more for each token
    that it lags, up to what a round can bring.

    Args:
      needs: of each row, see `need`; None where it asks for nothing.
      deepest: drafts of a row at most.
    """
    return [1.0 if behind is None else 1.0 + max(0.0, min(behind - 1.0, float(deepest))) for behind in needs]
