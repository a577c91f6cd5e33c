"""What a user can configure, validated once, here.

Every message names the field, the value given and the values allowed. Must not import JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from jaxspec.adaptive import registry
from jaxspec.adaptive.kind import PolicyKind
from jaxspec.adaptive.objectives import CUMULATIVE, RULES, STEP
from jaxspec.names import tells_names
from jaxspec.tier import Tier, max_nodes

Verification = Literal["coupled", "rejection", "typical"]
VERIFICATIONS: tuple[str, ...] = get_args(Verification)
_MAX_DEPTH = 32
#: Most rounds of a dispatch.
MOST_ROUNDS = 16
#: Of EngineConfig.mixed_chunk: beyond, what a pass saves by reading the weights for two is little of what it takes.
MOST_MIXED = 1024
#: What vLLM and SGLang call these settings.
SPECULATION_ELSEWHERE = {
    "num_speculative_tokens": "depth", "speculative_num_steps": "depth", "speculative_eagle_topk": "topk",
    "speculative_num_draft_tokens": "num_nodes", "method": "LLM(drafter=)", "model": "LLM(drafter=)",
    "prompt_lookup_min": "ngram_min", "prompt_lookup_max": "ngram_max",
    "draft_tensor_parallel_size": "LLM(draft_tensor_parallel=)",
}  # fmt: skip
#: The same of flags, where a drafter is one as well.
SPECULATION_FLAGS = {
    **SPECULATION_ELSEWHERE, "method": "drafter", "speculative_model": "drafter", "speculative_algorithm": "drafter",
    "speculative_draft_model_path": "drafter", "speculative_config": "drafter, depth",
}  # fmt: skip
#: What vLLM calls an engine's.
ENGINE_ELSEWHERE = {
    "max_model_len": "max_seq_len", "max_num_seqs": "max_batch_size", "gpu_memory_utilization": "memory_fraction",
    "tensor_parallel_size": "tensor_parallel", "block_size": "page_size", "num_gpu_blocks_override": "num_pages",
    "draft_tensor_parallel_size": "draft_tensor_parallel",
}  # fmt: skip


def _integer(owner: str, name: str, value: Any, low: int, high: int | None = None) -> None:
    bounds = f"an int of at least {low}" if high is None else f"an int in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ValueError(f"{owner}.{name} must be {bounds}, got {value!r}")


def _fraction(owner: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{owner}.{name} must be a number in (0, 1], got {value!r}")


def _budget(owner: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{owner}.{name} must be a positive number of tokens a request, got {value!r}")


def _items(owner: str, name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{owner}.{name} must be a tuple or list, got {value!r}")
    return tuple(value)


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
            _integer(me, "depth", self.depth, 0, _MAX_DEPTH)
        _integer(me, "topk", self.topk, 1, 64)
        if self.num_nodes is not None:
            _integer(me, "num_nodes", self.num_nodes, 1, 1024)
        if self.verification not in VERIFICATIONS:
            raise ValueError(f"{me}.verification must be one of {VERIFICATIONS}, got {self.verification!r}")
        if self.objective not in RULES:
            raise ValueError(f"{me}.objective must be one of {RULES}, got {self.objective!r}")
        for name in ("typical_threshold", "typical_alpha"):
            _fraction(me, name, getattr(self, name))
        _integer(me, "ngram_min", self.ngram_min, 1, 16)
        _integer(me, "ngram_max", self.ngram_max, 1, 16)
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"{me}.ngram_min {self.ngram_min} exceeds ngram_max {self.ngram_max}")
        self._check_suffix()
        if self.candidate_steps is not None:
            steps = _items(me, "candidate_steps", self.candidate_steps)
            for step in steps:
                _integer(me, "candidate_steps", step, 0, _MAX_DEPTH)
            if not steps:
                raise ValueError(f"{me}.candidate_steps must hold at least one depth, got {self.candidate_steps!r}")
            object.__setattr__(self, "candidate_steps", tuple(sorted(set(steps))))
        if self.num_speculative_tokens_per_batch_size is not None:
            name = "num_speculative_tokens_per_batch_size"
            rows = _items(me, name, self.num_speculative_tokens_per_batch_size)
            object.__setattr__(self, name, tuple(tuple(row) if isinstance(row, list) else row for row in rows))
        if self.tiers is not None:
            self._check_tiers(_items(me, "tiers", self.tiers))
        if self.budget is not None:
            _budget(me, "budget", self.budget)
        if self.candidate_budgets is not None:
            for budget in (budgets := _items(me, "candidate_budgets", self.candidate_budgets)):
                _budget(me, "candidate_budgets", budget)
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
            _integer(me, "hybrid_depth", self.hybrid_depth, 1, _MAX_DEPTH)
            if not self.hybrid:
                raise ValueError(f"{me}.hybrid_depth {self.hybrid_depth} is for hybrids, got hybrid False")
        files = self.suffix_corpus_files
        files = (files,) if isinstance(files, str | Path) else tuple(_items(me, "suffix_corpus_files", files))
        if not all(isinstance(path, str | Path) and str(path) for path in files):
            raise ValueError(f"{me}.suffix_corpus_files must hold paths, got {self.suffix_corpus_files!r}")
        object.__setattr__(self, "suffix_corpus_files", files)
        _integer(me, "suffix_corpus_tokens", tokens, 0, 2**28)
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
            raise ValueError(f"speculation must be a SpeculationConfig or a dict, got {type(value).__name__}")
        return cls(**{str(name): given for name, given in value.items()})


WARMUPS = ("background", "eager")
#: Implementations of the kernels, as pallas_kernels.dispatch knows them (not imported: this module knows no device).
KERNELS = (None, "reference", "tpu", "gpu", "interpret")


@tells_names(ENGINE_ELSEWHERE)
@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine.

    Attributes:
      max_batch_size: requests decoded together (device slots).
      max_seq_len: longest prompt plus output in tokens; None: the model's context, at most 2048.
      page_size: tokens a page of the KV pool.
      num_pages: pages of the pool, which all requests share; None: what memory_fraction leaves.
      memory_fraction: how much of a device's memory weights and pages may take (vLLM's gpu_memory_utilization), in
        (0, 1]: the pool gets what the weights leave, and activations the rest. Of the memory that JAX may use there; on
        CPUs of the machine's, which only bounds the pool. num_pages wins. None: 0.9, and no more pages than
        max_batch_size full sequences have.
      prefill_chunk: most tokens of one prompt that are computed between two rounds; None: 256 on CPUs, 1,024 on
        accelerators, within max_num_batched_tokens.
      max_num_batched_tokens: most tokens of all prompts that are computed between two rounds, at least prefill_chunk:
        short prompts are computed together. None: prefill_chunk.
      batch_buckets: padded batch sizes to compile, the largest being max_batch_size; None: powers of two.
      variants: which rounds to compile. "greedy" serves batches of plain greedy requests faster on accelerators;
        "sampled" serves every batch. ("greedy",) alone refuses requests that sample. None: both on accelerators,
        ("sampled",) on CPUs, where greedy batches cost as much with it and the warm-up half.
      rounds_per_dispatch: how many rounds one executable may run in a row, where the policy says the same for all of
        them, no prompt is under way or could begin, pages are left, and no row has a grammar or asks for
        log-probabilities. The tokens are the same; they, and aborts, come up to so many rounds late, the first token of
        a request that waits for a slot up to 2 * (n - 1) rounds. "auto": 4 on accelerators, for batch sizes at which a
        round could take less than twice the host's part of it, and only while it is measured to do so and 4 rounds
        take 10 ms at most, and while requests wait only where they save twice what slots are idle; else, and on CPUs,
        1. A number: so many, wherever they can.
      mixed_chunk: most prompt tokens that a round computes in the same pass, so that the weights are read once for
        prompts and for the requests that decode beside them (SGLang's --enable-mixed-chunk); what is left of a step's
        prompts follows. The tokens are the same. Not where a row or a prompt's end is under a grammar, nor with a
        policy's budgets. "auto": 128 on accelerators, for batch sizes from 4 on, and 0 on CPUs, where it does not pay.
        0: never.
      warmup: "background" serves as soon as plain decoding is compiled at the smallest batch size (or the static
        tier); more comes in the order of its expected use while requests run, with the same tokens. "eager" compiles
        everything first, which is what benchmarks want.
      dtype: "float32", "bfloat16" or None: float32 on CPU, bfloat16 on accelerators. Quantised weights keep theirs.
      int8_activations: a target whose linear maps are int8 with a scale per output also rounds what they read to int8,
        with a scale per token, as the makers of W8A8 checkpoints mean it: other logits, and on CPUs faster.
      tensor_parallel: devices that share every layer (the first ones of the backend); must divide the target's KV
        heads, heads, MLP width and vocabulary. The tokens are those of one device, up to rounding.
      draft_tensor_parallel: devices that share a drafter's layers, where tensor_parallel devices share the target's:
        these, too, or 1 (vLLM's draft_tensor_parallel_size): each device has the drafter and its pools whole and
        drafts alike, which takes memory and spares exchanges; tables that the drafter has of its target stay split.
        "auto": a profile's; else on accelerators what is better there, measured at the start, on CPUs the target's.
      kernels: which implementation of the kernels runs: "tpu", "gpu", "reference" (plain XLA), "interpret" (the TPU
        kernels interpreted, for tests), or None for the backend's own. A named one runs or fails with the reason;
        but sampling is plain XLA in any case where tensor_parallel splits the vocabulary.
      batch_invariant: what rounds make of a token has the same bits alone and in a batch, in plain decoding and in a
        verified chain, in bfloat16 too (vLLM's VLLM_BATCH_INVARIANT, SGLang's deterministic inference), for up to 32
        tokens in a round; prompts are computed one by one, none reuses another's pages, and everything is compiled
        before the first request. It does not hold for what is computed again of a text that lost its pages. Refused:
        trees of drafts, more tokens, several devices, models that the kernels for few rows do not serve, and devices
        other than Hopper GPUs.
      seed: base of the seeds of requests that bring none.
      enable_prefix_caching: reuse the pages of equal prompt prefixes.
      structured_output: compile what requests with a grammar need (JSON schema, regular expression, choice, ...):
        a longer warm-up, nothing for requests without one.
      skip_tokenizer_init: read no tokenizer: prompts are token ids, outputs have no text; stop strings, grammars and
        chats are refused.
      profile: a file of `python -m jaxspec.bench profile`: what rounds cost on this device, which then are not timed at
        the start. For the policies that weigh costs; of another device, model or drafter it is refused.
      compile_cache: True keeps compiled executables in the user's cache directory, a path
        keeps them there, False keeps none.
      keep_learnt: whether the policy begins with what it learnt of costs and acceptance in earlier runs of the same
        device, model, drafter and versions: True: kept beside the compiled executables, where those are; a path: kept
        in that directory. Figures only, no text. False: every start learns afresh.
      traffic_log: a file to which every finished request (ended by a stop or by its length) is appended as a JSON
        line of its token ids and temperature, for `python -m jaxspec.train` to learn from. It holds your users' text.
      feature_ring: a directory to which the target's states and tokens of all requests are written, for heads that are
        trained while they serve (`--data ring:DIR`). It holds your users' text. None: nothing is kept.
      feature_ring_mib: memory for them on each device until they are written, in MiB.
      feature_ring_disk_mib: most that the directory's files take, in MiB; the oldest are deleted.
      feature_ring_share: of the time in which a thread of the host may be busy copying and writing them; texts that
        begin while it is behind are left out. Above 0, at most 1.

    Raises:
      ValueError: a value out of range.
    """

    max_batch_size: int = 8
    max_seq_len: int | None = None
    page_size: int = 64
    num_pages: int | None = None
    memory_fraction: float | None = None
    prefill_chunk: int | None = None
    max_num_batched_tokens: int | None = None
    batch_buckets: tuple[int, ...] | None = None
    variants: tuple[str, ...] | None = None
    rounds_per_dispatch: int | str = "auto"
    mixed_chunk: int | str = "auto"
    warmup: str = "background"
    dtype: str | None = None
    int8_activations: bool = False
    tensor_parallel: int = 1
    draft_tensor_parallel: int | str = "auto"
    kernels: str | None = None
    batch_invariant: bool = False
    seed: int = 0
    enable_prefix_caching: bool = True
    structured_output: bool = False
    skip_tokenizer_init: bool = False
    profile: str | Path | None = None
    compile_cache: bool | str | Path = True
    keep_learnt: bool | str | Path = False
    traffic_log: str | Path | None = None
    feature_ring: str | Path | None = None
    feature_ring_mib: int = 64
    feature_ring_disk_mib: int = 4096
    feature_ring_share: float = 0.01

    def __post_init__(self) -> None:
        me = "EngineConfig"
        _integer(me, "max_batch_size", self.max_batch_size, 1, 1024)
        if self.max_seq_len is not None:
            _integer(me, "max_seq_len", self.max_seq_len, 2)
        _integer(me, "page_size", self.page_size, 1, 1024)
        if self.num_pages is not None:
            _integer(me, "num_pages", self.num_pages, 1)
        if self.memory_fraction is not None:
            _fraction(me, "memory_fraction", self.memory_fraction)
        for name in ("prefill_chunk", "max_num_batched_tokens"):
            if getattr(self, name) is not None:
                _integer(me, name, getattr(self, name), 1)
        chunk, together = self.prefill_chunk, self.max_num_batched_tokens
        if chunk is not None and together is not None and together < chunk:
            raise ValueError(f"{me}.max_num_batched_tokens must be at least prefill_chunk {chunk}, got {together}")
        _integer(me, "tensor_parallel", self.tensor_parallel, 1)
        drafts = self.draft_tensor_parallel
        if drafts != "auto" and (type(drafts) is not int or drafts not in (1, self.tensor_parallel)):
            raise ValueError(
                f"{me}.draft_tensor_parallel must be 'auto', 1 or tensor_parallel {self.tensor_parallel}, "
                f"got {drafts!r}"
            )
        _integer(me, "seed", self.seed, 0, 2**32 - 1)
        if self.batch_buckets is not None:
            sizes = _items(me, "batch_buckets", self.batch_buckets)
            for size in sizes:
                _integer(me, "batch_buckets", size, 1, self.max_batch_size)
            if max(sizes, default=0) != self.max_batch_size:
                raise ValueError(f"{me}.batch_buckets must end at max_batch_size {self.max_batch_size}, got {sizes}")
        if self.variants is not None and (not self.variants or not set(self.variants) <= {"greedy", "sampled"}):
            raise ValueError(f"{me}.variants must hold 'greedy', 'sampled' or both, or be None, got {self.variants!r}")
        rounds = self.rounds_per_dispatch
        if rounds != "auto" and (type(rounds) is not int or not 1 <= rounds <= MOST_ROUNDS):
            raise ValueError(f"{me}.rounds_per_dispatch must be 'auto' or an int in [1, {MOST_ROUNDS}], got {rounds!r}")
        mixed = self.mixed_chunk
        if mixed != "auto" and (type(mixed) is not int or not 0 <= mixed <= MOST_MIXED):
            raise ValueError(f"{me}.mixed_chunk must be 'auto' or an int in [0, {MOST_MIXED}], got {mixed!r}")
        if self.warmup not in WARMUPS:
            raise ValueError(f"{me}.warmup must be one of {WARMUPS}, got {self.warmup!r}")
        for name in ("batch_invariant", "enable_prefix_caching", "structured_output", "skip_tokenizer_init"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{me}.{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("compile_cache", "keep_learnt"):
            if not isinstance(getattr(self, name), bool | str | Path):
                raise ValueError(f"{me}.{name} must be True, False or a path, got {getattr(self, name)!r}")
        if self.profile is not None and (not isinstance(self.profile, str | Path) or not str(self.profile)):
            raise ValueError(f"{me}.profile must be None or a path, got {self.profile!r}")
        if self.traffic_log is not None and (not isinstance(self.traffic_log, str | Path) or not str(self.traffic_log)):
            raise ValueError(f"{me}.traffic_log must be None or a path, got {self.traffic_log!r}")
        if self.feature_ring is not None and (
            not isinstance(self.feature_ring, str | Path) or not str(self.feature_ring)
        ):
            raise ValueError(f"{me}.feature_ring must be None or a path, got {self.feature_ring!r}")
        for name in ("feature_ring_mib", "feature_ring_disk_mib"):
            _integer(me, name, getattr(self, name), 1)
        _fraction(me, "feature_ring_share", self.feature_ring_share)
        self._check_invariant()
        if self.kernels not in KERNELS:
            raise ValueError(f"{me}.kernels must be one of {KERNELS}, got {self.kernels!r}")
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"{me}.dtype must be 'float32', 'bfloat16' or None, got {self.dtype!r}")

    def _check_invariant(self) -> None:
        me = "batch_invariant=True"
        if not self.batch_invariant:
            return
        if self.tensor_parallel > 1:
            raise ValueError(f"{me} is for one device, got tensor_parallel={self.tensor_parallel}")
        if self.mixed_chunk not in ("auto", 0):
            raise ValueError(f"{me} computes no prompts in rounds, got mixed_chunk={self.mixed_chunk}")
        if self.kernels not in (None, "gpu"):
            raise ValueError(f"{me} has a kernel of its own for attention on GPUs, got kernels={self.kernels!r}")

    def check_ring(self, drafts: bool, reads_states: bool) -> None:
        """Refuses a ring of features beside a drafter that has none.

        Args:
          drafts: whether there is a drafter. reads_states: whether it reads the target's states.

        Raises:
          ValueError: names the ring.
        """
        if self.feature_ring is not None and not (drafts and reads_states):
            raise ValueError(
                f"feature_ring {str(self.feature_ring)!r} is for drafters that read the target's states; this engine "
                f"has {'one that reads none' if drafts else 'none'}"
            )

    @property
    def buckets(self) -> tuple[int, ...]:
        """Padded batch sizes: powers of two up to max_batch_size, and that size itself."""
        if self.batch_buckets is not None:
            return tuple(sorted(set(self.batch_buckets)))
        sizes = [1]
        while sizes[-1] * 2 < self.max_batch_size:
            sizes.append(sizes[-1] * 2)
        return tuple(dict.fromkeys([*sizes, self.max_batch_size]))
