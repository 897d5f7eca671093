from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Sequence(_message.Message):
    __slots__ = ("request_id", "choice_index", "attempt", "prompt_token_ids", "output_token_ids", "sampling", "speculation", "cache_salt", "model_fingerprint", "timeout_ms", "traceparent", "tracestate", "prediction_token_ids", "priority", "return_trees")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RETURN_TREES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice_index: int
    attempt: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    speculation: _common_pb2.SpeculationOptions
    cache_salt: str
    model_fingerprint: str
    timeout_ms: int
    traceparent: str
    tracestate: str
    prediction_token_ids: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    return_trees: bool
    def __init__(self, request_id: _Optional[str] = ..., choice_index: _Optional[int] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationOptions, _Mapping]] = ..., cache_salt: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., prediction_token_ids: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ..., return_trees: bool = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("submit", "abort")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    submit: Sequence
    abort: Abort
    def __init__(self, submit: _Optional[_Union[Sequence, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "choice_index", "kept_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice_index: int
    kept_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., choice_index: _Optional[int] = ..., kept_tokens: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("started", "tokens", "finished", "errors", "heartbeat", "draining", "queue_room", "load")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_ROOM_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    started: SessionStarted
    tokens: _containers.RepeatedCompositeFieldContainer[Tokens]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    errors: _containers.RepeatedCompositeFieldContainer[SequenceError]
    heartbeat: Heartbeat
    draining: bool
    queue_room: int
    load: Load
    def __init__(self, started: _Optional[_Union[SessionStarted, _Mapping]] = ..., tokens: _Optional[_Iterable[_Union[Tokens, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[SequenceError, _Mapping]]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., draining: bool = ..., queue_room: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "max_running", "num_blocks", "num_free_blocks")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    max_running: int
    num_blocks: int
    num_free_blocks: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., max_running: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ...) -> None: ...

class SessionStarted(_message.Message):
    __slots__ = ("epoch", "model_fingerprint")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    model_fingerprint: str
    def __init__(self, epoch: _Optional[int] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("step_id", "awaits_drafters")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    AWAITS_DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    awaits_drafters: bool
    def __init__(self, step_id: _Optional[int] = ..., awaits_drafters: bool = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("request_id", "choice_index", "attempt", "offset", "token_ids", "logprobs", "sources", "prompt_logprobs", "num_cached_tokens", "tree")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice_index: int
    attempt: int
    offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    sources: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    num_cached_tokens: int
    tree: VerifiedTree
    def __init__(self, request_id: _Optional[str] = ..., choice_index: _Optional[int] = ..., attempt: _Optional[int] = ..., offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., sources: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., tree: _Optional[_Union[VerifiedTree, _Mapping]] = ...) -> None: ...

class VerifiedTree(_message.Message):
    __slots__ = ("token_ids", "parents", "sources", "accepted")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    sources: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., sources: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("request_id", "choice_index", "attempt", "reason", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "speculation", "stop_token_id", "queue_ms", "prefill_ms", "decode_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice_index: int
    attempt: int
    reason: _common_pb2.FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    speculation: _common_pb2.SpeculationStats
    stop_token_id: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    def __init__(self, request_id: _Optional[str] = ..., choice_index: _Optional[int] = ..., attempt: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationStats, _Mapping]] = ..., stop_token_id: _Optional[int] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ...) -> None: ...

class SequenceError(_message.Message):
    __slots__ = ("request_id", "choice_index", "attempt", "code", "message", "field")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice_index: int
    attempt: int
    code: int
    message: str
    field: str
    def __init__(self, request_id: _Optional[str] = ..., choice_index: _Optional[int] = ..., attempt: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("tokens", "finished")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    tokens: Tokens
    finished: Finished
    def __init__(self, tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrafterState(_message.Message):
    __slots__ = ("name", "algorithm", "transport", "state", "num_attaches", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_rejected_drafts", "accepted_per_position", "num_awaited", "wait_us", "gauges", "address", "reason", "has_low_acceptance")
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_ATTACHES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_AWAITED_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HAS_LOW_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    algorithm: str
    transport: str
    state: str
    num_attaches: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_rejected_drafts: int
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    num_awaited: int
    wait_us: int
    gauges: _containers.ScalarMap[str, float]
    address: str
    reason: str
    has_low_acceptance: bool
    def __init__(self, name: _Optional[str] = ..., algorithm: _Optional[str] = ..., transport: _Optional[str] = ..., state: _Optional[str] = ..., num_attaches: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_rejected_drafts: _Optional[int] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., num_awaited: _Optional[int] = ..., wait_us: _Optional[int] = ..., gauges: _Optional[_Mapping[str, float]] = ..., address: _Optional[str] = ..., reason: _Optional[str] = ..., has_low_acceptance: bool = ...) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("version", "epoch", "model_name", "model_fingerprint", "dtype", "mode", "vocab_size", "max_model_len", "eos_token_ids", "block_size", "num_blocks", "num_free_blocks", "num_running", "num_waiting", "max_queue", "drafters", "num_steps", "num_preemptions", "num_prefix_cache_queries", "num_prefix_cache_hits", "num_generated_tokens", "num_prompt_tokens", "num_plain_batch_steps", "num_fallback_steps", "step_time_us", "speculative_max_batch_size", "device", "num_resident_steps", "overlap_blocked_steps", "fallback_reasons")
    class StepTimeUsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class OverlapBlockedStepsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FallbackReasonsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLAIN_BATCH_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_FALLBACK_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_US_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_RESIDENT_STEPS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_BLOCKED_STEPS_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_REASONS_FIELD_NUMBER: _ClassVar[int]
    version: str
    epoch: int
    model_name: str
    model_fingerprint: str
    dtype: str
    mode: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_running: int
    num_waiting: int
    max_queue: int
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterState]
    num_steps: int
    num_preemptions: int
    num_prefix_cache_queries: int
    num_prefix_cache_hits: int
    num_generated_tokens: int
    num_prompt_tokens: int
    num_plain_batch_steps: int
    num_fallback_steps: int
    step_time_us: _containers.ScalarMap[str, int]
    speculative_max_batch_size: int
    device: str
    num_resident_steps: int
    overlap_blocked_steps: _containers.ScalarMap[str, int]
    fallback_reasons: _containers.ScalarMap[str, int]
    def __init__(self, version: _Optional[str] = ..., epoch: _Optional[int] = ..., model_name: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., mode: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., max_queue: _Optional[int] = ..., drafters: _Optional[_Iterable[_Union[DrafterState, _Mapping]]] = ..., num_steps: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_prefix_cache_queries: _Optional[int] = ..., num_prefix_cache_hits: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_plain_batch_steps: _Optional[int] = ..., num_fallback_steps: _Optional[int] = ..., step_time_us: _Optional[_Mapping[str, int]] = ..., speculative_max_batch_size: _Optional[int] = ..., device: _Optional[str] = ..., num_resident_steps: _Optional[int] = ..., overlap_blocked_steps: _Optional[_Mapping[str, int]] = ..., fallback_reasons: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Corpus(_message.Message):
    __slots__ = ("name", "num_tokens", "drafter")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_tokens: int
    drafter: str
    def __init__(self, name: _Optional[str] = ..., num_tokens: _Optional[int] = ..., drafter: _Optional[str] = ...) -> None: ...

class AddCorpusRequest(_message.Message):
    __slots__ = ("drafter", "name", "token_ids", "append")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    name: str
    token_ids: bytes
    append: bool
    def __init__(self, drafter: _Optional[str] = ..., name: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., append: bool = ...) -> None: ...

class AddCorpusResponse(_message.Message):
    __slots__ = ("corpus",)
    CORPUS_FIELD_NUMBER: _ClassVar[int]
    corpus: Corpus
    def __init__(self, corpus: _Optional[_Union[Corpus, _Mapping]] = ...) -> None: ...

class RemoveCorpusRequest(_message.Message):
    __slots__ = ("drafter", "name")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    name: str
    def __init__(self, drafter: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RemoveCorpusResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCorporaRequest(_message.Message):
    __slots__ = ("drafter",)
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    def __init__(self, drafter: _Optional[str] = ...) -> None: ...

class ListCorporaResponse(_message.Message):
    __slots__ = ("corpora",)
    CORPORA_FIELD_NUMBER: _ClassVar[int]
    corpora: _containers.RepeatedCompositeFieldContainer[Corpus]
    def __init__(self, corpora: _Optional[_Iterable[_Union[Corpus, _Mapping]]] = ...) -> None: ...

class AttachDrafterRequest(_message.Message):
    __slots__ = ("name", "address", "transport")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    transport: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., transport: _Optional[str] = ...) -> None: ...

class AttachDrafterResponse(_message.Message):
    __slots__ = ("drafter",)
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    drafter: DrafterState
    def __init__(self, drafter: _Optional[_Union[DrafterState, _Mapping]] = ...) -> None: ...

class DetachDrafterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DetachDrafterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...
