from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TreeLimits(_message.Message):
    __slots__ = ("max_depth", "max_branches")
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAX_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    max_depth: int
    max_branches: int
    def __init__(self, max_depth: _Optional[int] = ..., max_branches: _Optional[int] = ...) -> None: ...

class TargetInfo(_message.Message):
    __slots__ = ("checkpoint_hash", "vocab_size", "max_model_len", "max_slots", "max_nodes", "hidden_size", "num_layers", "block_size", "num_blocks", "checkpoint", "usual_trees")
    CHECKPOINT_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    USUAL_TREES_FIELD_NUMBER: _ClassVar[int]
    checkpoint_hash: str
    vocab_size: int
    max_model_len: int
    max_slots: int
    max_nodes: int
    hidden_size: int
    num_layers: int
    block_size: int
    num_blocks: int
    checkpoint: str
    usual_trees: _containers.RepeatedCompositeFieldContainer[TreeLimits]
    def __init__(self, checkpoint_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_slots: _Optional[int] = ..., max_nodes: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., checkpoint: _Optional[str] = ..., usual_trees: _Optional[_Iterable[_Union[TreeLimits, _Mapping]]] = ...) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: TargetInfo
    def __init__(self, target: _Optional[_Union[TargetInfo, _Mapping]] = ...) -> None: ...

class PrepareResponse(_message.Message):
    __slots__ = ("algorithm", "features", "num_rerun", "blocks", "weights", "device", "resident")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    NUM_RERUN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    algorithm: str
    features: _containers.RepeatedScalarFieldContainer[int]
    num_rerun: int
    blocks: bool
    weights: bool
    device: str
    resident: bool
    def __init__(self, algorithm: _Optional[str] = ..., features: _Optional[_Iterable[int]] = ..., num_rerun: _Optional[int] = ..., blocks: bool = ..., weights: bool = ..., device: _Optional[str] = ..., resident: bool = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("epoch", "target", "arena_socket", "layout_version", "challenge")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ARENA_SOCKET_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    target: TargetInfo
    arena_socket: str
    layout_version: int
    challenge: bytes
    def __init__(self, epoch: _Optional[int] = ..., target: _Optional[_Union[TargetInfo, _Mapping]] = ..., arena_socket: _Optional[str] = ..., layout_version: _Optional[int] = ..., challenge: _Optional[bytes] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("name", "algorithm", "challenge_digest", "transport")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    name: str
    algorithm: str
    challenge_digest: bytes
    transport: str
    def __init__(self, name: _Optional[str] = ..., algorithm: _Optional[str] = ..., challenge_digest: _Optional[bytes] = ..., transport: _Optional[str] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("epoch", "step_id", "slots", "generations", "lengths", "prompt_lengths", "max_nodes", "new_token_starts", "new_tokens", "salts", "seeds", "choice_indices", "temperatures", "max_depths", "max_branches", "top_ks", "top_ps", "min_ps", "hidden_starts", "hidden", "block_starts", "block_ids", "prediction_starts", "prediction")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_STARTS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SALTS_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDICES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTHS_FIELD_NUMBER: _ClassVar[int]
    MAX_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    TOP_KS_FIELD_NUMBER: _ClassVar[int]
    TOP_PS_FIELD_NUMBER: _ClassVar[int]
    MIN_PS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STARTS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STARTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_STARTS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step_id: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    prompt_lengths: _containers.RepeatedScalarFieldContainer[int]
    max_nodes: _containers.RepeatedScalarFieldContainer[int]
    new_token_starts: _containers.RepeatedScalarFieldContainer[int]
    new_tokens: _containers.RepeatedScalarFieldContainer[int]
    salts: _containers.RepeatedScalarFieldContainer[int]
    seeds: _containers.RepeatedScalarFieldContainer[int]
    choice_indices: _containers.RepeatedScalarFieldContainer[int]
    temperatures: _containers.RepeatedScalarFieldContainer[float]
    max_depths: _containers.RepeatedScalarFieldContainer[int]
    max_branches: _containers.RepeatedScalarFieldContainer[int]
    top_ks: _containers.RepeatedScalarFieldContainer[int]
    top_ps: _containers.RepeatedScalarFieldContainer[float]
    min_ps: _containers.RepeatedScalarFieldContainer[float]
    hidden_starts: _containers.RepeatedScalarFieldContainer[int]
    hidden: bytes
    block_starts: _containers.RepeatedScalarFieldContainer[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    prediction_starts: _containers.RepeatedScalarFieldContainer[int]
    prediction: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., prompt_lengths: _Optional[_Iterable[int]] = ..., max_nodes: _Optional[_Iterable[int]] = ..., new_token_starts: _Optional[_Iterable[int]] = ..., new_tokens: _Optional[_Iterable[int]] = ..., salts: _Optional[_Iterable[int]] = ..., seeds: _Optional[_Iterable[int]] = ..., choice_indices: _Optional[_Iterable[int]] = ..., temperatures: _Optional[_Iterable[float]] = ..., max_depths: _Optional[_Iterable[int]] = ..., max_branches: _Optional[_Iterable[int]] = ..., top_ks: _Optional[_Iterable[int]] = ..., top_ps: _Optional[_Iterable[float]] = ..., min_ps: _Optional[_Iterable[float]] = ..., hidden_starts: _Optional[_Iterable[int]] = ..., hidden: _Optional[bytes] = ..., block_starts: _Optional[_Iterable[int]] = ..., block_ids: _Optional[_Iterable[int]] = ..., prediction_starts: _Optional[_Iterable[int]] = ..., prediction: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("epoch", "step_id", "node_starts", "tokens", "parents", "scores")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_STARTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step_id: int
    node_starts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., node_starts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., scores: _Optional[_Iterable[float]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("epoch", "slots")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TraceSequenceRequest(_message.Message):
    __slots__ = ("epoch", "slot", "generation", "traceparent", "tracestate")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    slot: int
    generation: int
    traceparent: str
    tracestate: str
    def __init__(self, epoch: _Optional[int] = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class TraceSequenceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("version", "name", "algorithm", "attached", "epoch", "transport", "gauges", "preparing")
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    PREPARING_FIELD_NUMBER: _ClassVar[int]
    version: str
    name: str
    algorithm: str
    attached: bool
    epoch: int
    transport: str
    gauges: _containers.ScalarMap[str, float]
    preparing: bool
    def __init__(self, version: _Optional[str] = ..., name: _Optional[str] = ..., algorithm: _Optional[str] = ..., attached: bool = ..., epoch: _Optional[int] = ..., transport: _Optional[str] = ..., gauges: _Optional[_Mapping[str, float]] = ..., preparing: bool = ...) -> None: ...

class Corpus(_message.Message):
    __slots__ = ("name", "num_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_tokens: int
    def __init__(self, name: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class AddCorpusRequest(_message.Message):
    __slots__ = ("name", "token_ids", "append")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    name: str
    token_ids: bytes
    append: bool
    def __init__(self, name: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., append: bool = ...) -> None: ...

class AddCorpusResponse(_message.Message):
    __slots__ = ("corpus",)
    CORPUS_FIELD_NUMBER: _ClassVar[int]
    corpus: Corpus
    def __init__(self, corpus: _Optional[_Union[Corpus, _Mapping]] = ...) -> None: ...

class RemoveCorpusRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveCorpusResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCorporaRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCorporaResponse(_message.Message):
    __slots__ = ("corpora",)
    CORPORA_FIELD_NUMBER: _ClassVar[int]
    corpora: _containers.RepeatedCompositeFieldContainer[Corpus]
    def __init__(self, corpora: _Optional[_Iterable[_Union[Corpus, _Mapping]]] = ...) -> None: ...
