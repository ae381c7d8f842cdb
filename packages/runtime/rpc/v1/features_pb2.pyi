import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Sample(_message.Message):
    __slots__ = ("sample_id", "generation", "run_id", "source", "uri", "target_fingerprint", "aux_layer_ids", "drafter_version", "tokenizer_hash", "vocabulary_hash", "created_at", "features", "num_tokens", "num_bytes", "labels")
    class FeaturesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Sample.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Sample.Tensor, _Mapping]] = ...) -> None: ...
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class Tensor(_message.Message):
        __slots__ = ("shape", "dtype")
        SHAPE_FIELD_NUMBER: _ClassVar[int]
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        shape: _containers.RepeatedScalarFieldContainer[int]
        dtype: str
        def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    AUX_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_HASH_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    generation: int
    run_id: str
    source: str
    uri: str
    target_fingerprint: str
    aux_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    drafter_version: str
    tokenizer_hash: str
    vocabulary_hash: str
    created_at: float
    features: _containers.MessageMap[str, Sample.Tensor]
    num_tokens: int
    num_bytes: int
    labels: _containers.ScalarMap[str, str]
    def __init__(self, sample_id: _Optional[str] = ..., generation: _Optional[int] = ..., run_id: _Optional[str] = ..., source: _Optional[str] = ..., uri: _Optional[str] = ..., target_fingerprint: _Optional[str] = ..., aux_layer_ids: _Optional[_Iterable[int]] = ..., drafter_version: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., vocabulary_hash: _Optional[str] = ..., created_at: _Optional[float] = ..., features: _Optional[_Mapping[str, Sample.Tensor]] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("run_id", "path", "step", "metrics", "created_at")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    path: str
    step: int
    metrics: _containers.ScalarMap[str, float]
    created_at: _timestamp_pb2.Timestamp
    def __init__(self, run_id: _Optional[str] = ..., path: _Optional[str] = ..., step: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RecoverRequest(_message.Message):
    __slots__ = ("run_id", "holder")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    holder: str
    def __init__(self, run_id: _Optional[str] = ..., holder: _Optional[str] = ...) -> None: ...

class RecoverResponse(_message.Message):
    __slots__ = ("num_rows",)
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    def __init__(self, num_rows: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("run_id", "holder", "limit", "timeout_s", "known")
    class Known(_message.Message):
        __slots__ = ("sample_ids",)
        SAMPLE_IDS_FIELD_NUMBER: _ClassVar[int]
        sample_ids: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, sample_ids: _Optional[_Iterable[str]] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    holder: str
    limit: int
    timeout_s: float
    known: LeaseRequest.Known
    def __init__(self, run_id: _Optional[str] = ..., holder: _Optional[str] = ..., limit: _Optional[int] = ..., timeout_s: _Optional[float] = ..., known: _Optional[_Union[LeaseRequest.Known, _Mapping]] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    def __init__(self, samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("sample",)
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    sample: Sample
    def __init__(self, sample: _Optional[_Union[Sample, _Mapping]] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    def __init__(self, chunk: _Optional[bytes] = ...) -> None: ...

class AckRequest(_message.Message):
    __slots__ = ("run_id", "holder", "path", "step", "sample_ids", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_IDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    holder: str
    path: str
    step: int
    sample_ids: _containers.RepeatedScalarFieldContainer[str]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, run_id: _Optional[str] = ..., holder: _Optional[str] = ..., path: _Optional[str] = ..., step: _Optional[int] = ..., sample_ids: _Optional[_Iterable[str]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class AckResponse(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("run_id", "holder", "timeout_s")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    holder: str
    timeout_s: float
    def __init__(self, run_id: _Optional[str] = ..., holder: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("num_rows",)
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    def __init__(self, num_rows: _Optional[int] = ...) -> None: ...

class FailRequest(_message.Message):
    __slots__ = ("sample_id", "reason", "is_retryable", "run_id", "holder")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    reason: str
    is_retryable: bool
    run_id: str
    holder: str
    def __init__(self, sample_id: _Optional[str] = ..., reason: _Optional[str] = ..., is_retryable: _Optional[bool] = ..., run_id: _Optional[str] = ..., holder: _Optional[str] = ...) -> None: ...

class FailResponse(_message.Message):
    __slots__ = ("is_new",)
    IS_NEW_FIELD_NUMBER: _ClassVar[int]
    is_new: bool
    def __init__(self, is_new: _Optional[bool] = ...) -> None: ...

class GetCheckpointRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class ListHeldoutRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListHeldoutResponse(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    def __init__(self, samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ...) -> None: ...

class ListDurableRequest(_message.Message):
    __slots__ = ("run_id", "limit")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    limit: int
    def __init__(self, run_id: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListDurableResponse(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    def __init__(self, samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("num_rows", "used_bytes", "budget_bytes", "target_fingerprint", "watermarks", "is_shedding")
    class NumRowsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class Watermarks(_message.Message):
        __slots__ = ("high_rows", "low_rows", "high_bytes", "low_bytes")
        HIGH_ROWS_FIELD_NUMBER: _ClassVar[int]
        LOW_ROWS_FIELD_NUMBER: _ClassVar[int]
        HIGH_BYTES_FIELD_NUMBER: _ClassVar[int]
        LOW_BYTES_FIELD_NUMBER: _ClassVar[int]
        high_rows: int
        low_rows: int
        high_bytes: int
        low_bytes: int
        def __init__(self, high_rows: _Optional[int] = ..., low_rows: _Optional[int] = ..., high_bytes: _Optional[int] = ..., low_bytes: _Optional[int] = ...) -> None: ...
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WATERMARKS_FIELD_NUMBER: _ClassVar[int]
    IS_SHEDDING_FIELD_NUMBER: _ClassVar[int]
    num_rows: _containers.ScalarMap[str, int]
    used_bytes: int
    budget_bytes: int
    target_fingerprint: str
    watermarks: StatusResponse.Watermarks
    is_shedding: bool
    def __init__(self, num_rows: _Optional[_Mapping[str, int]] = ..., used_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., target_fingerprint: _Optional[str] = ..., watermarks: _Optional[_Union[StatusResponse.Watermarks, _Mapping]] = ..., is_shedding: _Optional[bool] = ...) -> None: ...
