"""python -m jaxspec.bench.studies.confidences: whether drafts are accepted as often as calibrated confidences say.

Every kind of drafter that the demo has drafts chains for code and for prose, and all of it is verified. Requests of a
prompt are greedy once and sampled as often as asked. What each round said of its drafts and what came of them is then
given to the calibration as an engine does, round by round, each predicted before it is learnt. Figures are counts, and
repeat exactly.

Calibration error is the mean gap between predictions and outcomes over ten bins: of survival, the chance that a draft
is accepted with all before it, which budgets are spent by; by position; and of steps, given that those before were
accepted. "said" takes confidences at their word. "chance" is what predictions that are right would show, for outcomes
drawn by them. "turn" is what survival is off by after the text has changed from one kind to the other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.adaptive.calibration import Calibration, calibration_error
from jaxspec.adaptive.policy import DraftLabels, RoundStats
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.assemble import build_engine
from jaxspec.bench.offline import prompts
from jaxspec.bench.studies import report
from jaxspec.config import EngineConfig
from jaxspec.request import SamplingParams
from jaxspec.tier import Tier

TEXTS = {"code": prompts.CODE, "prose": prompts.PROSE}
KINDS = ("eagle3", "mtp", "peagle", "draft_model", "suffix", "ngram")
#: Rounds after a change of the text that are looked at together, and changes that there are.
AFTER, TURNS = ((0, 10), (10, 30), (30, 60)), 3
#: Draws behind what chance shows.
_DRAWS = 20


class _Kept(StaticPolicy):
    """Runs one chain, all of it verified, and keeps what was said of its drafts."""

    def __init__(self, depth: int) -> None:
        super().__init__(Tier(depth), float(depth))
        self.rounds: list[DraftLabels] = []

    def observe(self, stats: RoundStats) -> None:
        if stats.drafts is not None and stats.drafts.confidence:
            self.rounds.append(stats.drafts)


def record(kind: str, args: argparse.Namespace) -> dict[str, list[DraftLabels]]:
    """The rounds of a kind of drafter, by kind of text."""
    config = EngineConfig(
        max_batch_size=args.batch, max_seq_len=args.tokens + 128, batch_buckets=(args.batch,), dtype="float32",
        variants=("sampled",), enable_prefix_caching=False, warmup="eager",
    )  # fmt: skip
    speculation = {"policy": "static", "depth": args.depth, "budget": float(args.depth)}
    engine = build_engine("demo", kind, speculation, config, progress=False)
    assert engine.facts.tokenizer is not None
    found = {}
    for name, texts in TEXTS.items():
        kept = _Kept(args.depth)
        engine.use_policy(kept)
        for repeat in range(args.repeats):
            for i, text in enumerate(texts):
                how = SamplingParams(
                    temperature=args.temperature * (repeat > 0), seed=repeat * len(texts) + i, max_tokens=args.tokens
                )
                engine.add(engine.facts.tokenizer.encode(text), how)
        while engine.has_work:
            engine.step()
        found[name] = kept.rounds
    return found


def believed(rounds: Sequence[DraftLabels], calibration: Calibration | None) -> list[np.ndarray]:
    """Of each round the chance of each draft, given those before it, as it was believed before, [rows, depth]."""
    if calibration is not None:
        return [calibration.observe(drafts) for drafts in rounds]
    return [np.asarray(drafts.confidence, np.float64).reshape(-1, drafts.nodes) for drafts in rounds]


def happened(rounds: Sequence[DraftLabels]) -> tuple[np.ndarray, np.ndarray]:
    """Which drafts were reached, and which of these were right, [all rows, depth]."""
    shape = -1, rounds[0].nodes
    known, right = (
        np.concatenate([np.frombuffer(getattr(drafts, name), np.uint8).reshape(shape) for drafts in rounds]) != 0
        for name in ("known", "right")
    )
    return known, right & known


def errors(rates_RD: np.ndarray, known_RD: np.ndarray, right_RD: np.ndarray) -> dict[str, Any]:
    """Calibration errors of survival, over all drafts and by position, and of steps; and how much too high it is."""
    survival_RD, stands_RD = np.cumprod(rates_RD, axis=1), np.cumprod(right_RD, axis=1)
    rng, chance = np.random.default_rng(0), 0.0
    for _ in range(_DRAWS):
        drawn_RD = np.cumprod(rng.random(rates_RD.shape) < rates_RD, axis=1)
        chance += _error(survival_RD, drawn_RD) / _DRAWS
    return {
        "survival": _error(survival_RD, stands_RD),
        "chance": chance,
        "positions": [_error(p, hit) for p, hit in zip(survival_RD.T, stands_RD.T, strict=True)],
        "steps": _error(rates_RD[known_RD], right_RD[known_RD]),
        "bias": float(survival_RD.sum() / max(1, stands_RD.sum()) - 1),
        "accepted": float(stands_RD.sum() / len(stands_RD)),
        "rows": len(stands_RD),
    }


def _error(predicted: np.ndarray, happened: np.ndarray) -> float:
    return calibration_error(predicted.ravel().tolist(), (happened.ravel() != 0).tolist())


def after_turns(texts: Sequence[Sequence[DraftLabels]]) -> list[dict[str, float]]:
    """Survival's error in the rounds after changes: texts in turn, of which the first one begins.

    Rounds of all changes are put together; of each window its `survival`, `chance` and `bias`.
    """
    calibration, depth = Calibration(texts[0][0].nodes), texts[0][0].nodes
    parts: list[list[Any]] = [[] for _ in AFTER]
    for turn in range(TURNS + 1):
        rounds = texts[turn % len(texts)]
        rates = believed(rounds, calibration)
        if turn:
            for part, (first, end) in zip(parts, AFTER, strict=True):
                part.append((np.concatenate(rates[first:end]).reshape(-1, depth), *happened(rounds[first:end])))
    found = [errors(*(np.concatenate(x) for x in zip(*part, strict=True))) for part in parts]
    return [{name: one[name] for name in ("survival", "chance", "bias")} for one in found]


def study(kind: str, rounds: Mapping[str, Sequence[DraftLabels]]) -> list[dict[str, Any]]:
    """The figures of a kind of drafter: of each text, and of its changes."""
    rows: list[dict[str, Any]] = []
    for text, found in rounds.items():
        known, right = happened(found)
        for how, calibration in (("said", None), ("online", Calibration(found[0].nodes))):
            rates = np.concatenate(believed(found, calibration))
            rows.append({"kind": kind, "text": text, "how": how, **errors(rates, known, right)})
    return [*rows, {"kind": kind, "text": "turn", "after": after_turns(list(rounds.values()))}]


def line(row: Mapping[str, Any]) -> str:
    """A row of the table, in percent."""
    name = f"{row['kind']:<13}{row['text']:<7}"
    if row["text"] == "turn":
        windows = (
            f"rounds {first + 1} to {end}: {100 * one['survival']:.1f} ({100 * one['chance']:.1f})"
            for (first, end), one in zip(AFTER, row["after"], strict=True)
        )
        return name + ", ".join(windows)
    positions = " ".join(f"{100 * error:4.1f}" for error in row["positions"])
    return (
        f"{name}{row['how']:<8}{row['rows']:>6}{row['accepted']:>9.2f}{100 * row['survival']:>10.2f}"
        f"{100 * row['chance']:>8.2f}   {positions}{100 * row['steps']:>8.2f}{100 * row['bias']:>+8.1f}"
    )


def _kept(directory: Path, kind: str) -> Path:
    return directory / f"confidences_{kind}.json"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = report.parser("confidences", __doc__)
    add = parser.add_argument
    add("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="drafters")
    add("--batch", type=int, default=8, help="slots")
    add("--depth", type=int, default=5, help="drafts of a chain")
    add("--tokens", type=int, default=192, help="of a request, at most")
    add("--repeats", type=int, default=2, help="requests of each prompt: the first greedy, the others sampled")
    add("--temperature", type=float, default=0.7, help="of those")
    add("--save", type=Path, metavar="DIR", help="keep the rounds there (default: nowhere)")
    add("--read", type=Path, metavar="DIR", help="take rounds that were kept there (default: run the models)")
    args = report.parse(parser, argv)
    print("calibration error in percent: of survival, by chance, by position, of steps; survival too high by, percent")
    print(f"{'drafter':<13}{'text':<7}{'':<8}{'rows':>6}{'accepted':>9}{'survival':>10}{'chance':>8}")
    rows = []
    for kind in args.kind:
        if args.read:
            kept = json.loads(_kept(args.read, kind).read_text(encoding="utf-8"))
            rounds = {text: [DraftLabels.from_dict(one) for one in many] for text, many in kept.items()}
        else:
            rounds = record(kind, args)
        if args.save:
            text = json.dumps({text: [one.to_dict() for one in many] for text, many in rounds.items()})
            _kept(args.save, kind).write_text(text + "\n", encoding="utf-8")
        found = study(kind, rounds)
        rows += found
        print("\n".join(map(line, found)), flush=True)
    report.write(args, "confidences", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
