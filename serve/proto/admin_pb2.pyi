from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "model", "drafter", "policy", "verification", "lossless", "device", "devices", "dtype", "max_seq_len", "max_batch_size", "tiers", "buckets", "active_tier", "tier_switches", "rounds_by_tier", "mean_acceptance_length", "memory", "executables", "compilations_after_warmup", "warmup_seconds", "uptime_seconds", "state", "executables_ready", "startup_seconds", "drafter_version", "drafter_trial", "drafter_updates", "drafter_rollbacks", "draft_tensor_parallel")
    class RoundsByTierEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    LOSSLESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_TIER_FIELD_NUMBER: _ClassVar[int]
    TIER_SWITCHES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLES_FIELD_NUMBER: _ClassVar[int]
    COMPILATIONS_AFTER_WARMUP_FIELD_NUMBER: _ClassVar[int]
    WARMUP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLES_READY_FIELD_NUMBER: _ClassVar[int]
    STARTUP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_TRIAL_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_UPDATES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    drafter: str
    policy: str
    verification: str
    lossless: bool
    device: str
    devices: int
    dtype: str
    max_seq_len: int
    max_batch_size: int
    tiers: _containers.RepeatedScalarFieldContainer[str]
    buckets: _containers.RepeatedScalarFieldContainer[int]
    active_tier: str
    tier_switches: int
    rounds_by_tier: _containers.ScalarMap[str, int]
    mean_acceptance_length: float
    memory: Memory
    executables: int
    compilations_after_warmup: int
    warmup_seconds: float
    uptime_seconds: float
    state: str
    executables_ready: int
    startup_seconds: float
    drafter_version: int
    drafter_trial: bool
    drafter_updates: int
    drafter_rollbacks: int
    draft_tensor_parallel: int
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., drafter: _Optional[str] = ..., policy: _Optional[str] = ..., verification: _Optional[str] = ..., lossless: _Optional[bool] = ..., device: _Optional[str] = ..., devices: _Optional[int] = ..., dtype: _Optional[str] = ..., max_seq_len: _Optional[int] = ..., max_batch_size: _Optional[int] = ..., tiers: _Optional[_Iterable[str]] = ..., buckets: _Optional[_Iterable[int]] = ..., active_tier: _Optional[str] = ..., tier_switches: _Optional[int] = ..., rounds_by_tier: _Optional[_Mapping[str, int]] = ..., mean_acceptance_length: _Optional[float] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ..., executables: _Optional[int] = ..., compilations_after_warmup: _Optional[int] = ..., warmup_seconds: _Optional[float] = ..., uptime_seconds: _Optional[float] = ..., state: _Optional[str] = ..., executables_ready: _Optional[int] = ..., startup_seconds: _Optional[float] = ..., drafter_version: _Optional[int] = ..., drafter_trial: _Optional[bool] = ..., drafter_updates: _Optional[int] = ..., drafter_rollbacks: _Optional[int] = ..., draft_tensor_parallel: _Optional[int] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("weight_bytes", "kv_pool_bytes", "pages", "free_pages", "cached_pages", "page_size")
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    weight_bytes: int
    kv_pool_bytes: int
    pages: int
    free_pages: int
    cached_pages: int
    page_size: int
    def __init__(self, weight_bytes: _Optional[int] = ..., kv_pool_bytes: _Optional[int] = ..., pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ..., page_size: _Optional[int] = ...) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "waiting_prompt_tokens", "kv_cache_usage", "tokens_per_second", "max_running_requests")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    waiting_prompt_tokens: int
    kv_cache_usage: float
    tokens_per_second: float
    max_running_requests: int
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., waiting_prompt_tokens: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., max_running_requests: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_seconds",)
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    grace_seconds: float
    def __init__(self, grace_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("freed_pages",)
    FREED_PAGES_FIELD_NUMBER: _ClassVar[int]
    freed_pages: int
    def __init__(self, freed_pages: _Optional[int] = ...) -> None: ...

class SetSpeculationRequest(_message.Message):
    __slots__ = ("policy", "depth")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    policy: str
    depth: int
    def __init__(self, policy: _Optional[str] = ..., depth: _Optional[int] = ...) -> None: ...

class SetSpeculationResponse(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tiers: _Optional[_Iterable[str]] = ...) -> None: ...

class UpdateDrafterRequest(_message.Message):
    __slots__ = ("directory", "trial")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    TRIAL_FIELD_NUMBER: _ClassVar[int]
    directory: str
    trial: bool
    def __init__(self, directory: _Optional[str] = ..., trial: _Optional[bool] = ...) -> None: ...

class UpdateDrafterResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...
