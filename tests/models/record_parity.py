"""Records what transformers answers to the cases of parity_cases.py into parity.npz. Run by hand, from the root:

    python -m pip install --editable ".[parity]"
    python tests/models/record_parity.py

Run it when a case, the seed or the fill of the weights changes, and commit the new parity.npz with that change. The
weights come from numpy, so the file holds none: test_models_recorded.py draws them again and needs no torch.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

# In the tests conftest.py provides this module; here it is found beside the script.
from parity_cases import (
    CASES,
    POSITIONS,
    PROMPTS_BN,
    RECORDING,
    SEED,
    TOLERANCE,
    Record,
    fingerprint,
    reference_answers,
    reference_model,
    save_records,
    weights,
)

from jaxspec.checkpointing.tensors import read_json, read_tensors

#: The lead over the second token that rounding on both sides cannot turn.
MIN_LEAD = 2 * TOLERANCE


def record(case: str, directory: Path) -> Record:
    """What transformers answers to one case; its checkpoint goes to the empty `directory`.

    Raises:
      ValueError: answers that would prove little or be fragile: flat logits, a continuation of few distinct tokens, or
        a greedy token whose lead over the second is within rounding.
    """
    model = reference_model(case, directory)
    tokens_BN, logits_BNV = reference_answers(model)
    prompt = PROMPTS_BN.shape[1]
    top_BN2 = np.sort(logits_BNV[:, prompt - 1 : -1], axis=-1)[..., -2:]
    lead, deviation = float(np.diff(top_BN2).min()), float(logits_BNV.std())
    distinct = min(len(set(row)) for row in tokens_BN[:, prompt:].tolist())
    if lead < MIN_LEAD or deviation < 0.5 or distinct <= 8:
        raise ValueError(
            f"{case}: least lead {lead:.1e} (at least {MIN_LEAD:.1e}), deviation of logits {deviation:.2f} (at least "
            f"0.5), distinct tokens {distinct} (at least 9); choose another SEED than {SEED}"
        )
    print(f"{case}: least lead {lead:.1e}, deviation of logits {deviation:.2f}, distinct tokens {distinct}")
    with read_tensors(directory) as reader:
        shapes = {name: list(reader.shape(name)) for name in reader.names}
    config = read_json(directory / "config.json")
    return Record(config, shapes, fingerprint(weights(shapes)), tokens_BN, logits_BNV[:, POSITIONS])


def main() -> None:
    """Records every case, then writes the file."""
    torch.set_num_threads(1)
    records = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            records[case] = record(case, Path(directory))
    save_records(RECORDING, records)
    size = RECORDING.stat().st_size / 1000
    print(f"{RECORDING}: {size:.0f} kB, torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
