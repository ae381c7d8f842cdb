import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrafterState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFTER_STATE_UNSPECIFIED: _ClassVar[DrafterState]
    DRAFTER_STATE_STAGED: _ClassVar[DrafterState]
    DRAFTER_STATE_VALIDATED: _ClassVar[DrafterState]
    DRAFTER_STATE_ACTIVE: _ClassVar[DrafterState]
    DRAFTER_STATE_RETIRED: _ClassVar[DrafterState]
    DRAFTER_STATE_REJECTED: _ClassVar[DrafterState]
    DRAFTER_STATE_ROLLED_BACK: _ClassVar[DrafterState]
DRAFTER_STATE_UNSPECIFIED: DrafterState
DRAFTER_STATE_STAGED: DrafterState
DRAFTER_STATE_VALIDATED: DrafterState
DRAFTER_STATE_ACTIVE: DrafterState
DRAFTER_STATE_RETIRED: DrafterState
DRAFTER_STATE_REJECTED: DrafterState
DRAFTER_STATE_ROLLED_BACK: DrafterState

class Drafter(_message.Message):
    __slots__ = ("version", "state", "reason", "is_active", "is_embedded", "parent", "step", "metrics", "created_at")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    IS_EMBEDDED_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    version: str
    state: DrafterState
    reason: str
    is_active: bool
    is_embedded: bool
    parent: str
    step: int
    metrics: _containers.ScalarMap[str, float]
    created_at: _timestamp_pb2.Timestamp
    def __init__(self, version: _Optional[str] = ..., state: _Optional[_Union[DrafterState, str]] = ..., reason: _Optional[str] = ..., is_active: _Optional[bool] = ..., is_embedded: _Optional[bool] = ..., parent: _Optional[str] = ..., step: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("upload", "chunk", "directory", "version")
    class Upload(_message.Message):
        __slots__ = ("config_bytes", "weights_bytes", "sha256", "manifest")
        CONFIG_BYTES_FIELD_NUMBER: _ClassVar[int]
        WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
        SHA256_FIELD_NUMBER: _ClassVar[int]
        MANIFEST_FIELD_NUMBER: _ClassVar[int]
        config_bytes: int
        weights_bytes: int
        sha256: str
        manifest: StageRequest.Manifest
        def __init__(self, config_bytes: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., manifest: _Optional[_Union[StageRequest.Manifest, _Mapping]] = ...) -> None: ...
    class Directory(_message.Message):
        __slots__ = ("path", "manifest")
        PATH_FIELD_NUMBER: _ClassVar[int]
        MANIFEST_FIELD_NUMBER: _ClassVar[int]
        path: str
        manifest: StageRequest.Manifest
        def __init__(self, path: _Optional[str] = ..., manifest: _Optional[_Union[StageRequest.Manifest, _Mapping]] = ...) -> None: ...
    class Manifest(_message.Message):
        __slots__ = ("parent", "step", "target_fingerprint", "metrics", "notes")
        class MetricsEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: float
            def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
        PARENT_FIELD_NUMBER: _ClassVar[int]
        STEP_FIELD_NUMBER: _ClassVar[int]
        TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
        METRICS_FIELD_NUMBER: _ClassVar[int]
        NOTES_FIELD_NUMBER: _ClassVar[int]
        parent: str
        step: int
        target_fingerprint: str
        metrics: _containers.ScalarMap[str, float]
        notes: str
        def __init__(self, parent: _Optional[str] = ..., step: _Optional[int] = ..., target_fingerprint: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ..., notes: _Optional[str] = ...) -> None: ...
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    upload: StageRequest.Upload
    chunk: bytes
    directory: StageRequest.Directory
    version: str
    def __init__(self, upload: _Optional[_Union[StageRequest.Upload, _Mapping]] = ..., chunk: _Optional[bytes] = ..., directory: _Optional[_Union[StageRequest.Directory, _Mapping]] = ..., version: _Optional[str] = ...) -> None: ...

class ValidateRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class ActivateRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("drafters", "active_version")
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_VERSION_FIELD_NUMBER: _ClassVar[int]
    drafters: _containers.RepeatedCompositeFieldContainer[Drafter]
    active_version: str
    def __init__(self, drafters: _Optional[_Iterable[_Union[Drafter, _Mapping]]] = ..., active_version: _Optional[str] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class DownloadResponse(_message.Message):
    __slots__ = ("upload", "chunk")
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    upload: StageRequest.Upload
    chunk: bytes
    def __init__(self, upload: _Optional[_Union[StageRequest.Upload, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("include_history",)
    INCLUDE_HISTORY_FIELD_NUMBER: _ClassVar[int]
    include_history: bool
    def __init__(self, include_history: _Optional[bool] = ...) -> None: ...

class LifecycleEvent(_message.Message):
    __slots__ = ("kind", "version", "previous", "reason", "message", "seconds", "at")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[LifecycleEvent.Kind]
        KIND_VALIDATED: _ClassVar[LifecycleEvent.Kind]
        KIND_REJECTED: _ClassVar[LifecycleEvent.Kind]
        KIND_ACTIVATED: _ClassVar[LifecycleEvent.Kind]
        KIND_FAILED: _ClassVar[LifecycleEvent.Kind]
        KIND_ROLLED_BACK: _ClassVar[LifecycleEvent.Kind]
    KIND_UNSPECIFIED: LifecycleEvent.Kind
    KIND_VALIDATED: LifecycleEvent.Kind
    KIND_REJECTED: LifecycleEvent.Kind
    KIND_ACTIVATED: LifecycleEvent.Kind
    KIND_FAILED: LifecycleEvent.Kind
    KIND_ROLLED_BACK: LifecycleEvent.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    kind: LifecycleEvent.Kind
    version: str
    previous: str
    reason: str
    message: str
    seconds: float
    at: _timestamp_pb2.Timestamp
    def __init__(self, kind: _Optional[_Union[LifecycleEvent.Kind, str]] = ..., version: _Optional[str] = ..., previous: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., seconds: _Optional[float] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
