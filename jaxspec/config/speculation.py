"""What a user can configure of speculation, validated once, here. Must not import JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from jaxspec.adaptive import registry
from jaxspec.adaptive.kind import PolicyKind
from jaxspec.adaptive.objectives import CUMULATIVE, RULES, STEP
from jaxspec.config import checks
from jaxspec.names import tells_names
from jaxspec.tier import Tier, max_nodes

Verification = Literal["coupled", "rejection", "typical"]
VERIFICATIONS: tuple[str, ...] = get_args(Verification)
DraftFormat = Literal["int8", "fp8", "int4-g128"]
DRAFT_FORMATS: tuple[str, ...] = get_args(DraftFormat)
DraftQuantization = Literal["auto", "none", DraftFormat]
DRAFT_QUANTIZATIONS: tuple[str, ...] = get_args(DraftQuantization)
_MAX_DEPTH = 32
#: What vLLM, SGLang, transformers and llama.cpp call these settings.
SPECULATION_ELSEWHERE = {
    "num_speculative_tokens": "depth", "speculative_num_steps": "depth", "speculative_eagle_topk": "topk",
    "speculative_num_draft_tokens": "num_nodes", "method": "LLM(drafter=)", "model": "LLM(drafter=)",
    "prompt_lookup_min": "ngram_min", "prompt_lookup_max": "ngram_max", "draft_max": "depth",
    "prompt_lookup_num_tokens": "depth", "num_assistant_tokens": "depth", "assistant_model": "LLM(drafter=)",
    "draft_tensor_parallel_size": "LLM(draft_tensor_parallel=)",
    "speculative_draft_model_quantization": "draft_quantization",
}  # fmt: skip
#: The same of flags, where a drafter is one as well.
SPECULATION_FLAGS = {
    **SPECULATION_ELSEWHERE, "method": "drafter", "speculative_model": "drafter", "speculative_algorithm": "drafter",
    "speculative_draft_model_path": "drafter", "speculative_config": "drafter, depth", "model_draft": "drafter",
    "assistant_model": "drafter", "speculation": "drafter, policy, depth",
}  # fmt: skip


def _takers(field: str) -> str:
    """The policies that accept a field, for messages."""
    return f"the {' or '.join(kind.name for kind in registry.kinds() if field in kind.fields)} policy"


@tells_names(SPECULATION_ELSEWHERE)
@dataclasses.dataclass(frozen=True)
class SpeculationConfig:
    """How much to draft, and how drafts are verified.

    Attributes:
      policy: a kind's name (see jaxspec.adaptive.registry), or the path of an SGLang-style JSON. None: "static" where
        `depth` is given, else "adaptive", which chooses round by round.
      depth: draft tokens of the static tier.
      topk: candidates a node; 1 drafts chains, more drafts trees: EAGLE-2's, or where all positions come from one pass
        (DFlash, P-EAGLE, Medusa) the likeliest nodes that so many candidates a position can make.
      num_nodes: nodes verified a round, root included. None: a chain's depth + 1; for a tree 2 * topk, the ratio of
        SGLang's default (5 steps, topk 4, 8 nodes), but at least depth + 1 and at most what depth and topk can make.
      candidate_steps: depths that the adaptive policy chooses among (0 is always added), or the heuristic one.
      candidate_budgets: budgets (see `budget`) that the adaptive policy chooses among for its tiers, besides
        verifying every draft; () for none. None: a few, at larger batch sizes. Those of survival and AdaSpec, too.
      tiers: the same as whole tiers, chains and trees mixed; excludes candidate_steps, depth, topk and num_nodes.
      num_speculative_tokens_per_batch_size: what the schedule policy runs, as in vLLM: (least batch size, greatest
        batch size, draft tokens), ascending from 1; a gap, and what is beyond the last, belongs to the entry below.
      verification: "coupled" (default: same seed, same tokens as plain decoding), "rejection" (Leviathan et al.
        2023; same distribution) or "typical" (Cai et al. 2024, Medusa: NOT lossless; sampled rows accept what the
        target finds plausible enough, greedy rows stay exact).
      typical_threshold, typical_alpha: of typical verification, which accepts a token of probability p where
        p > min(typical_threshold, typical_alpha * exp(-entropy)).
      draft_quantization: format that the drafter's weights are rounded to when they are loaded: "int8" or "fp8" (a
        scale per output) or "int4-g128". It changes what is drafted and no text; under rejection verification no
        distribution, under typical verification both. "none": as the checkpoint has them. "auto": int8 in bfloat16 on
        one Hopper GPU (JAX 0.11 or newer), where kernels serve all of a drafter that is not in few bits and borrows no
        output layer of its target's, but not under typical verification; else "none".
      ngram_min, ngram_max: shortest and longest suffix that the n-gram drafter matches.
      hybrid: each row and round drafts by suffix matches where these promise more accepted tokens than the drafter;
        trees hold the likeliest nodes of both. It needs coupled verification. The adaptive policy then has a tier more,
        that runs no drafter at all.
      hybrid_depth: most tokens in a row that a hybrid's drafter drafts; deeper nodes of a tier are matches alone, which
        cost no pass of the drafter. A number as large as the tiers' depth lets it draft all of it. None: 3 in trees,
        where each token takes the drafter a pass; else as many as the tier.
      suffix_corpus_tokens: room for texts of others than the request itself, in which a suffix drafter and a hybrid
        look too; 20 to 36 bytes a token on every device. 0: none, and nothing of a request outlives it.
      suffix_corpus_responses: finished responses go there, until newer ones take their place. They are other users'
        text: it changes no output, but how fast a text comes may tell that somebody had it before.
      suffix_corpus_files: files whose texts are there from the start: JSONL of a traffic log, else plain text.
      budget: of a static tier: how many drafted tokens a request the target verifies, on average: those of the whole
        batch that are likeliest to be accepted, few of one request and many of another. The text does not depend on
        it, under coupled verification, which it needs. None: all.
      objective: how requests that ask for a time per token get it where drafts share a budget. "cumulative" (AdaServe):
        those behind what they asked for by now come first; "step": besides, as far as the policy can, no round takes
        longer than the most urgent one asks: for one token (AdaSpec, as policies after it), or with the adaptive policy
        for those that the round is expected to bring a request of the poorer half of the batch.

    Raises:
      ValueError: see each field.
    """

    policy: str | None = None
    depth: int | None = None
    topk: int = 1
    num_nodes: int | None = None
    candidate_steps: tuple[int, ...] | None = None
    candidate_budgets: tuple[float, ...] | None = None
    tiers: tuple[Tier, ...] | None = None
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    verification: Verification = "coupled"
    typical_threshold: float = 0.09
    typical_alpha: float = 0.3
    draft_quantization: DraftQuantization = "auto"
    ngram_min: int = 1
    ngram_max: int = 4
    hybrid: bool = False
    hybrid_depth: int | None = None
    suffix_corpus_tokens: int = 0
    suffix_corpus_responses: bool = False
    suffix_corpus_files: tuple[str | Path, ...] = ()
    budget: float | None = None
    objective: str = CUMULATIVE

    def __post_init__(self) -> None:
        me = "SpeculationConfig"
        if self.policy is not None and not isinstance(self.policy, str | Path):
            known = ", ".join(map(repr, registry.names()))
            raise ValueError(f"{me}.policy must be {known} or a path, got {self.policy!r}")
        if self.depth is not None:
            checks.integer(me, "depth", self.depth, 0, _MAX_DEPTH)
        checks.integer(me, "topk", self.topk, 1, 64)
        if self.num_nodes is not None:
            checks.integer(me, "num_nodes", self.num_nodes, 1, 1024)
        if self.verification not in VERIFICATIONS:
            raise ValueError(f"{me}.verification must be one of {VERIFICATIONS}, got {self.verification!r}")
        if self.draft_quantization not in DRAFT_QUANTIZATIONS:
            raise ValueError(
                f"{me}.draft_quantization must be one of {DRAFT_QUANTIZATIONS}, got {self.draft_quantization!r}"
            )
        if self.objective not in RULES:
            raise ValueError(f"{me}.objective must be one of {RULES}, got {self.objective!r}")
        for name in ("typical_threshold", "typical_alpha"):
            checks.fraction(me, name, getattr(self, name))
        checks.integer(me, "ngram_min", self.ngram_min, 1, 16)
        checks.integer(me, "ngram_max", self.ngram_max, 1, 16)
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"{me}.ngram_min {self.ngram_min} exceeds ngram_max {self.ngram_max}")
        self._check_suffix()
        if self.candidate_steps is not None:
            steps = checks.items(me, "candidate_steps", self.candidate_steps)
            for step in steps:
                checks.integer(me, "candidate_steps", step, 0, _MAX_DEPTH)
            if not steps:
                raise ValueError(f"{me}.candidate_steps must hold at least one depth, got {self.candidate_steps!r}")
            object.__setattr__(self, "candidate_steps", tuple(sorted(set(steps))))
        if self.num_speculative_tokens_per_batch_size is not None:
            name = "num_speculative_tokens_per_batch_size"
            rows = checks.items(me, name, self.num_speculative_tokens_per_batch_size)
            object.__setattr__(self, name, tuple(tuple(row) if isinstance(row, list) else row for row in rows))
        if self.tiers is not None:
            self._check_tiers(checks.items(me, "tiers", self.tiers))
        if self.budget is not None:
            checks.budget(me, "budget", self.budget)
        if self.candidate_budgets is not None:
            for budget in (budgets := checks.items(me, "candidate_budgets", self.candidate_budgets)):
                checks.budget(me, "candidate_budgets", budget)
            object.__setattr__(self, "candidate_budgets", tuple(sorted(set(budgets))))
        self._check_policy()

    def _check_suffix(self) -> None:
        me, tokens = "SpeculationConfig", self.suffix_corpus_tokens
        for name in ("hybrid", "suffix_corpus_responses"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{me}.{name} must be True or False, got {getattr(self, name)!r}")
        if self.hybrid and self.verification != "coupled":
            raise ValueError(f"{me}.hybrid needs verification 'coupled', got {self.verification!r}")
        if self.hybrid_depth is not None:
            checks.integer(me, "hybrid_depth", self.hybrid_depth, 1, _MAX_DEPTH)
            if not self.hybrid:
                raise ValueError(f"{me}.hybrid_depth {self.hybrid_depth} is for hybrids, got hybrid False")
        files = self.suffix_corpus_files
        files = (files,) if isinstance(files, str | Path) else tuple(checks.items(me, "suffix_corpus_files", files))
        if not all(isinstance(path, str | Path) and str(path) for path in files):
            raise ValueError(f"{me}.suffix_corpus_files must hold paths, got {self.suffix_corpus_files!r}")
        object.__setattr__(self, "suffix_corpus_files", files)
        checks.integer(me, "suffix_corpus_tokens", tokens, 0, 2**28)
        if 0 < tokens < 64:
            raise ValueError(f"{me}.suffix_corpus_tokens must be 0 or at least 64, got {tokens}")
        if bool(tokens) != (self.suffix_corpus_responses or bool(files)):
            raise ValueError(
                f"{me}.suffix_corpus_tokens is the room for suffix_corpus_responses or suffix_corpus_files; got "
                f"{tokens}, {self.suffix_corpus_responses} and {len(files)} files"
            )

    def _check_policy(self) -> None:
        me, kind, policy = "SpeculationConfig", self.policy_kind, self.resolved_policy
        if self.candidate_steps is not None and "candidate_steps" not in kind.fields:
            what = f"{me}.candidate_steps {self.candidate_steps} belongs to {_takers('candidate_steps')}"
            if policy == registry.FIXED and self.depth is not None:
                raise ValueError(f"{what}, but depth {self.depth} asks for a static tier; give one of the two")
            raise ValueError(f"{what}, got policy {policy!r}")
        if self.depth is not None and "depth" not in kind.fields:
            raise ValueError(f"{me}.depth {self.depth} is a static tier's, got policy {policy!r}; use candidate_steps")
        if self.num_nodes is not None and self.topk == 1 and kind.chooses:
            raise ValueError(f"{me}.num_nodes {self.num_nodes} is for trees or a static tier, got topk 1 without depth")
        if self.budget is not None and "budget" not in kind.fields:
            raise ValueError(f"{me}.budget {self.budget} belongs to {_takers('budget')}, got policy {policy!r}")
        for name in ("candidate_budgets", "num_speculative_tokens_per_batch_size"):
            if getattr(self, name) is not None and name not in kind.fields:
                raise ValueError(f"{me}.{name} belongs to {_takers(name)}, got policy {policy!r}")
        if not kind.drafts and (self.hybrid or self.suffix_corpus_tokens):
            what = "hybrid True" if self.hybrid else f"suffix_corpus_tokens {self.suffix_corpus_tokens}"
            raise ValueError(f"{me}.{what} is for policies that draft, got policy {policy!r}")
        if self.objective == STEP and not kind.heeds_tpot:
            heed = [kind.name for kind in registry.kinds() if kind.heeds_tpot]
            raise ValueError(
                f"{me}.objective {STEP!r} bounds rounds by a time per token, of which only the policies {heed} know; "
                f"got policy {policy!r}"
            )
        kind.check(self)

    def check_lookups(self, looks_up: bool, remembers: bool) -> None:
        """Refuses a drafter that cannot do what is said of suffix matches.

        Args:
          looks_up: whether it drafts by them itself. remembers: whether it looks in texts of others.

        Raises:
          ValueError: a hybrid of two that look up, or room for texts in which nobody would look.
        """
        if self.hybrid and looks_up:
            raise ValueError("hybrid joins suffix matches with a drafter of another kind; this one looks up by itself")
        if self.suffix_corpus_tokens and not (self.hybrid or remembers):
            raise ValueError(
                f"suffix_corpus_tokens is for the drafter that looks up whole suffixes and for hybrids, of which this "
                f"engine has none; got {self.suffix_corpus_tokens}"
            )

    def _check_tiers(self, tiers: tuple[Tier, ...]) -> None:
        me = "SpeculationConfig"
        if not tiers or not all(isinstance(tier, Tier) for tier in tiers):
            raise ValueError(f"{me}.tiers must hold at least one Tier, got {self.tiers!r}")
        if max(tier.depth for tier in tiers) > _MAX_DEPTH:
            raise ValueError(f"{me}.tiers may be {_MAX_DEPTH} deep, got {max(tier.depth for tier in tiers)}")
        others = {"depth": self.depth, "candidate_steps": self.candidate_steps, "num_nodes": self.num_nodes}
        given = {name: value for name, value in others.items() if value is not None}
        if given or self.topk != 1 or "tiers" not in self.policy_kind.fields:
            raise ValueError(
                f"{me}.tiers {[str(t) for t in tiers]} is for {_takers('tiers')} alone, "
                f"got policy {self.resolved_policy!r}, topk {self.topk} and {given}"
            )
        object.__setattr__(self, "tiers", tuple(sorted({Tier(0), *tiers})))

    @property
    def resolved_policy(self) -> str:
        """The policy with its default filled in."""
        if self.policy is None:
            return registry.DEFAULT if self.depth is None else registry.FIXED
        return str(self.policy)

    @property
    def policy_kind(self) -> PolicyKind:
        """The kind of the resolved policy."""
        return registry.find(self.resolved_policy)

    @property
    def drafts_asked(self) -> str:
        """What of it nothing but a drafter can honour, by name and value; "" where it leaves all drafts open.

        Nothing under a policy that never drafts, which may be named beside all that another policy reads.
        """
        if not self.policy_kind.drafts:
            return ""
        rows = self.num_speculative_tokens_per_batch_size or ()
        asked: dict[str, Any] = {
            "hybrid": self.hybrid, "suffix_corpus_tokens": self.suffix_corpus_tokens, "depth": self.depth,
            "candidate_steps": self.candidate_steps if any(self.candidate_steps or ()) else None,
            "tiers": [tier.name for tier in self.tiers or () if tier.depth],
            "num_speculative_tokens_per_batch_size": rows if any(tokens for _, _, tokens in rows) else None,
            "topk": self.topk if self.topk > 1 else None, "num_nodes": self.num_nodes, "budget": self.budget,
            "candidate_budgets": self.candidate_budgets,
            "draft_quantization": self.draft_quantization if self.draft_quantization in DRAFT_FORMATS else None,
        }  # fmt: skip
        return next((f"{name} {value}" for name, value in asked.items() if value), "")

    def tier(self, depth: int) -> Tier:
        """The tier of `depth` draft tokens under this configuration's topk and num_nodes.

        A static tier is taken as it is written. Candidates of an adaptive set share num_nodes, which shallow trees
        cannot fill and deep ones may exceed: there it is clipped to what the depth allows.

        Raises:
          ValueError: a static tier whose num_nodes does not fit its depth and topk.
        """
        if depth == 0:
            return Tier(0)
        if self.topk == 1 and self.num_nodes is None:
            return Tier(depth)
        nodes = 2 * self.topk if self.num_nodes is None else self.num_nodes
        if self.policy_kind.chooses or self.num_nodes is None:
            nodes = min(max(nodes, depth + 1), max_nodes(depth, self.topk))
        return Tier(depth, self.topk, nodes)

    @classmethod
    def of(cls, value: SpeculationConfig | Mapping[str, Any] | None) -> SpeculationConfig:
        """Accepts the config itself, a dict with its fields, or None for the default."""
        if value is None:
            return cls()
        if isinstance(value, SpeculationConfig):
            return value
        if not isinstance(value, Mapping):
            hint = "; a drafter is an argument of its own, drafter=" if isinstance(value, str) else ""
            raise ValueError(f"speculation must be a SpeculationConfig or a dict, got {value!r}{hint}")
        return cls(**{str(name): given for name, given in value.items()})
