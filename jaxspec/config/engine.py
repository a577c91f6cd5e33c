"""What a user can configure of an engine, validated once, here. Must not import JAX."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxspec.config import checks
from jaxspec.names import Advice, refuse_dtype, tells_names

#: Most rounds of a dispatch.
MOST_ROUNDS = 16
#: Of EngineConfig.mixed_chunk: beyond, what a pass saves by reading the weights for two is little of what it takes.
MOST_MIXED = 1024
_COMPILED = Advice("leave it out, rounds are always compiled, and warmup 'background' serves meanwhile")
_QUANTISED = Advice(
    "leave it out, a checkpoint says how it is quantised; `python -m jaxspec.quantize` writes one in 8 or 4 bits"
)
_WHERE = Advice("leave it out, everything runs where JAX does, on as many devices as tensor_parallel says")
_OWN_CODE = Advice("leave it out, nothing that a checkpoint brings is run")
_ALWAYS_CUT = Advice("leave it out, long prompts are always cut; prefill_chunk says into how long pieces")
#: What vLLM, SGLang, transformers and llama.cpp call an engine's.
ENGINE_ELSEWHERE = {
    "max_model_len": "max_seq_len", "max_num_seqs": "max_batch_size", "gpu_memory_utilization": "memory_fraction",
    "tensor_parallel_size": "tensor_parallel", "block_size": "page_size", "num_gpu_blocks_override": "num_pages",
    "draft_tensor_parallel_size": "draft_tensor_parallel", "attention_backend": "kernels",
    "enforce_eager": _COMPILED, "quantization": _QUANTISED, "trust_remote_code": _OWN_CODE,
    "enable_chunked_prefill": _ALWAYS_CUT, "tp_size": "tensor_parallel", "mem_fraction_static": "memory_fraction",
    "context_length": "max_seq_len", "max_running_requests": "max_batch_size", "chunked_prefill_size": "prefill_chunk",
    "disable_cuda_graph": _COMPILED, "disable_radix_cache": Advice("that is enable_prefix_caching, off"),
    "torch_dtype": "dtype", "device": _WHERE, "device_map": _WHERE, "load_in_8bit": _QUANTISED,
    "load_in_4bit": _QUANTISED, "ctx_size": "max_seq_len", "n_ctx": "max_seq_len", "parallel": "max_batch_size",
    "n_gpu_layers": _WHERE, "gpu_layers": _WHERE, "quantize": _QUANTISED,
    "revision": Advice("leave it out, `hf download --revision` has a directory for it, which is a model here"),
    "download_dir": Advice("leave it out, HF_HOME says where models from the hub lie"),
    "tokenizer": Advice("leave it out, the tokenizer is the checkpoint's own"),
    "kv_cache_dtype": Advice("leave it out, the cache has the dtype of activations"),
    "enable_lora": Advice("leave it out, adapters are not served; merge them into the checkpoint"),
    "swap_space": Advice("leave it out, what has to give its pages back is computed again"),
    "pipeline_parallel_size": Advice("leave it out, devices share every layer, as many as tensor_parallel says"),
    "chat_template": Advice("leave it out, the template is the checkpoint's own (chat_template.jinja beside it)"),
    "generation_config": Advice("leave it out, say in SamplingParams what is to be sampled"),
    "disable_log_stats": Advice("leave it out, LLM.stats is read by who asks for it"),
    "hf_token": Advice("leave it out, HF_TOKEN or `hf auth login` has it"),
    "distributed_executor_backend": Advice("leave it out, devices of one process share an engine by tensor_parallel"),
    "guided_decoding_backend": Advice("leave it out, structured_output compiles what grammars need"),
}  # fmt: skip
#: Short flags of all of them.
SHORT_FLAGS = {
    "-m": "model", "-c": "max_seq_len", "-np": "max_batch_size", "-tp": "tensor_parallel", "-md": "drafter",
    "-ngl": _WHERE, "-q": _QUANTISED,
}  # fmt: skip
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
        accelerators, and 2,048 on GPUs while nobody decodes (not with batch_invariant), within max_num_batched_tokens.
      max_num_batched_tokens: most tokens of all prompts that are computed between two rounds, at least prefill_chunk:
        short prompts are computed together. None: as many as of one prompt.
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
        tokens in a round, or 128 of a dense model in bfloat16 with heads of 128 channels; prompts are computed one by
        one, none reuses another's pages, and everything is compiled before the first request. It does not hold for what
        is computed again of a text that lost its pages. Refused: trees of drafts, more tokens, several devices, models
        that the kernels for few rows do not serve, and devices other than Hopper GPUs.
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
        checks.integer(me, "max_batch_size", self.max_batch_size, 1, 1024)
        if self.max_seq_len is not None:
            checks.integer(me, "max_seq_len", self.max_seq_len, 2)
        checks.integer(me, "page_size", self.page_size, 1, 1024)
        if self.num_pages is not None:
            checks.integer(me, "num_pages", self.num_pages, 1)
        if self.memory_fraction is not None:
            checks.fraction(me, "memory_fraction", self.memory_fraction)
        for name in ("prefill_chunk", "max_num_batched_tokens"):
            if getattr(self, name) is not None:
                checks.integer(me, name, getattr(self, name), 1)
        chunk, together = self.prefill_chunk, self.max_num_batched_tokens
        if chunk is not None and together is not None and together < chunk:
            raise ValueError(f"{me}.max_num_batched_tokens must be at least prefill_chunk {chunk}, got {together}")
        checks.integer(me, "tensor_parallel", self.tensor_parallel, 1)
        drafts = self.draft_tensor_parallel
        if drafts != "auto" and (type(drafts) is not int or drafts not in (1, self.tensor_parallel)):
            raise ValueError(
                f"{me}.draft_tensor_parallel must be 'auto', 1 or tensor_parallel {self.tensor_parallel}, "
                f"got {drafts!r}"
            )
        checks.integer(me, "seed", self.seed, 0, 2**32 - 1)
        if self.batch_buckets is not None:
            sizes = checks.items(me, "batch_buckets", self.batch_buckets)
            for size in sizes:
                checks.integer(me, "batch_buckets", size, 1, self.max_batch_size)
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
        if self.structured_output and self.skip_tokenizer_init:
            raise ValueError(f"{me}.structured_output needs a tokenizer, and skip_tokenizer_init=True reads none")
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
            checks.integer(me, name, getattr(self, name), 1)
        checks.fraction(me, "feature_ring_share", self.feature_ring_share)
        self._check_invariant()
        if self.kernels not in KERNELS:
            raise ValueError(f"{me}.kernels must be one of {KERNELS}, got {self.kernels!r}")
        refuse_dtype(f"{me}.dtype", self.dtype, none=True)

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
