import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CapturePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPTURE_POLICY_UNSPECIFIED: _ClassVar[CapturePolicy]
    CAPTURE_POLICY_INHERIT: _ClassVar[CapturePolicy]
    CAPTURE_POLICY_OFF: _ClassVar[CapturePolicy]
    CAPTURE_POLICY_ON: _ClassVar[CapturePolicy]

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_STATE_UNSPECIFIED: _ClassVar[SessionState]
    SESSION_STATE_IDLE: _ClassVar[SessionState]
    SESSION_STATE_GENERATING: _ClassVar[SessionState]
    SESSION_STATE_RESERVED: _ClassVar[SessionState]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
CAPTURE_POLICY_UNSPECIFIED: CapturePolicy
CAPTURE_POLICY_INHERIT: CapturePolicy
CAPTURE_POLICY_OFF: CapturePolicy
CAPTURE_POLICY_ON: CapturePolicy
SESSION_STATE_UNSPECIFIED: SessionState
SESSION_STATE_IDLE: SessionState
SESSION_STATE_GENERATING: SessionState
SESSION_STATE_RESERVED: SessionState
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason

class CachePolicy(_message.Message):
    __slots__ = ("full", "sink_window")
    class Full(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class SinkWindow(_message.Message):
        __slots__ = ("sink", "window")
        SINK_FIELD_NUMBER: _ClassVar[int]
        WINDOW_FIELD_NUMBER: _ClassVar[int]
        sink: int
        window: int
        def __init__(self, sink: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...
    FULL_FIELD_NUMBER: _ClassVar[int]
    SINK_WINDOW_FIELD_NUMBER: _ClassVar[int]
    full: CachePolicy.Full
    sink_window: CachePolicy.SinkWindow
    def __init__(self, full: _Optional[_Union[CachePolicy.Full, _Mapping]] = ..., sink_window: _Optional[_Union[CachePolicy.SinkWindow, _Mapping]] = ...) -> None: ...

class DrafterPolicy(_message.Message):
    __slots__ = ("follow_active", "pinned", "off")
    class FollowActive(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Pinned(_message.Message):
        __slots__ = ("version",)
        VERSION_FIELD_NUMBER: _ClassVar[int]
        version: str
        def __init__(self, version: _Optional[str] = ...) -> None: ...
    class Off(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    FOLLOW_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    follow_active: DrafterPolicy.FollowActive
    pinned: DrafterPolicy.Pinned
    off: DrafterPolicy.Off
    def __init__(self, follow_active: _Optional[_Union[DrafterPolicy.FollowActive, _Mapping]] = ..., pinned: _Optional[_Union[DrafterPolicy.Pinned, _Mapping]] = ..., off: _Optional[_Union[DrafterPolicy.Off, _Mapping]] = ...) -> None: ...

class SessionOptions(_message.Message):
    __slots__ = ("client_label", "ttl_s", "eos_token_ids", "stop_token_ids", "cache_policy", "drafter_policy", "capture_policy", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CLIENT_LABEL_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_POLICY_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_POLICY_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_POLICY_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    client_label: str
    ttl_s: float
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_policy: CachePolicy
    drafter_policy: DrafterPolicy
    capture_policy: CapturePolicy
    labels: _containers.ScalarMap[str, str]
    def __init__(self, client_label: _Optional[str] = ..., ttl_s: _Optional[float] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., cache_policy: _Optional[_Union[CachePolicy, _Mapping]] = ..., drafter_policy: _Optional[_Union[DrafterPolicy, _Mapping]] = ..., capture_policy: _Optional[_Union[CapturePolicy, str]] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "state", "history_length", "cached_tokens", "dropped_tokens", "options", "target_version", "drafter_version", "max_context_tokens", "vocab_size", "created_at", "last_used_at")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TARGET_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_AT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    state: SessionState
    history_length: int
    cached_tokens: int
    dropped_tokens: int
    options: SessionOptions
    target_version: str
    drafter_version: str
    max_context_tokens: int
    vocab_size: int
    created_at: _timestamp_pb2.Timestamp
    last_used_at: _timestamp_pb2.Timestamp
    def __init__(self, session_id: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ..., history_length: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., dropped_tokens: _Optional[int] = ..., options: _Optional[_Union[SessionOptions, _Mapping]] = ..., target_version: _Optional[str] = ..., drafter_version: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_used_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("request_id", "options")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    options: SessionOptions
    def __init__(self, request_id: _Optional[str] = ..., options: _Optional[_Union[SessionOptions, _Mapping]] = ...) -> None: ...

class AppendTokensRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "expected_history_length", "token_ids", "text")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    expected_history_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., expected_history_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ...) -> None: ...

class AppendTokensResponse(_message.Message):
    __slots__ = ("history_length", "cached_tokens")
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    history_length: int
    cached_tokens: int
    def __init__(self, history_length: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForkSessionRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "history_length", "options")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    history_length: int
    options: SessionOptions
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., history_length: _Optional[int] = ..., options: _Optional[_Union[SessionOptions, _Mapping]] = ...) -> None: ...

class SaveSessionRequest(_message.Message):
    __slots__ = ("session_id", "name")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    name: str
    def __init__(self, session_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class SavedSession(_message.Message):
    __slots__ = ("name", "num_bytes", "saved_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_bytes: int
    saved_at: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., num_bytes: _Optional[int] = ..., saved_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RestoreSessionRequest(_message.Message):
    __slots__ = ("name", "request_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    request_id: str
    def __init__(self, name: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ListSavedSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSavedSessionsResponse(_message.Message):
    __slots__ = ("saved_sessions",)
    SAVED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    saved_sessions: _containers.RepeatedCompositeFieldContainer[SavedSession]
    def __init__(self, saved_sessions: _Optional[_Iterable[_Union[SavedSession, _Mapping]]] = ...) -> None: ...

class DeleteSavedSessionRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteSavedSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SpeculationOverride(_message.Message):
    __slots__ = ("enabled", "max_draft_tokens")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    max_draft_tokens: int
    def __init__(self, enabled: _Optional[bool] = ..., max_draft_tokens: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "lark")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    lark: str
    def __init__(self, json_schema: _Optional[str] = ..., lark: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "expected_history_length", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "include_stop", "ignore_eos", "logprobs", "top_logprobs", "speculation", "grammar", "detokenize")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    expected_history_length: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop: bool
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int
    speculation: SpeculationOverride
    grammar: Grammar
    detokenize: bool
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., expected_history_length: _Optional[int] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop: _Optional[bool] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., speculation: _Optional[_Union[SpeculationOverride, _Mapping]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., detokenize: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "tokens", "done", "history_truncated")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    HISTORY_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    tokens: Tokens
    done: Done
    history_truncated: HistoryTruncated
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., history_truncated: _Optional[_Union[HistoryTruncated, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "drafter_version", "target_version", "history_length")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_VERSION_FIELD_NUMBER: _ClassVar[int]
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    drafter_version: str
    target_version: str
    history_length: int
    def __init__(self, request_id: _Optional[str] = ..., drafter_version: _Optional[str] = ..., target_version: _Optional[str] = ..., history_length: _Optional[int] = ...) -> None: ...

class HistoryTruncated(_message.Message):
    __slots__ = ("dropped",)
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    dropped: int
    def __init__(self, dropped: _Optional[int] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("token_ids", "text", "logprobs", "drafted")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    drafted: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., drafted: _Optional[_Iterable[bool]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "top")
    class Alternative(_message.Message):
        __slots__ = ("token_id", "logprob")
        TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
        LOGPROB_FIELD_NUMBER: _ClassVar[int]
        token_id: int
        logprob: float
        def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob.Alternative]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob.Alternative, _Mapping]]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("finish_reason", "stop_string", "stop_token_id", "usage", "speculation", "drafter_versions", "history_length")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    stop_string: str
    stop_token_id: int
    usage: Usage
    speculation: SpeculationStats
    drafter_versions: _containers.RepeatedScalarFieldContainer[str]
    history_length: int
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., drafter_versions: _Optional[_Iterable[str]] = ..., history_length: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("steps", "drafted", "accepted", "mean_acceptance_length", "accepted_per_position", "drafted_per_position")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    steps: int
    drafted: int
    accepted: int
    mean_acceptance_length: float
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    drafted_per_position: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, steps: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., mean_acceptance_length: _Optional[float] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., drafted_per_position: _Optional[_Iterable[int]] = ...) -> None: ...
