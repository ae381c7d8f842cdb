"""Between the messages of runtime.proto that are about sessions and the nouns of `runtime.types`, in both directions.

No network, no engine. Servicers and clients share it, so each field has one place where it is read and one where it is
written. What a message can say and the server does not do is refused here with InvalidRequest, which names the field as the
.proto does. Generations have a codec of their own beside this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from runtime.errors import InvalidRequest
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.types import (
    CachePolicy,
    DrafterPolicy,
    SessionInfo,
    SessionOptions,
    SessionState,
    Switch,
)

MAX_LABELS = 32
MAX_LABEL_CHARS = 512
MAX_REQUEST_ID_CHARS = 128

_CAPTURE_OF_POLICY = {
    pb.CAPTURE_POLICY_UNSPECIFIED: Switch.INHERIT,
    pb.CAPTURE_POLICY_INHERIT: Switch.INHERIT,
    pb.CAPTURE_POLICY_OFF: Switch.OFF,
    pb.CAPTURE_POLICY_ON: Switch.ON,
}
_POLICY_OF_CAPTURE = {
    Switch.INHERIT: pb.CAPTURE_POLICY_INHERIT,
    Switch.OFF: pb.CAPTURE_POLICY_OFF,
    Switch.ON: pb.CAPTURE_POLICY_ON,
}
_STATE_OF_NAME: dict[SessionState, pb.SessionState] = {
    "idle": pb.SESSION_STATE_IDLE,
    "reserved": pb.SESSION_STATE_RESERVED,
    "generating": pb.SESSION_STATE_GENERATING,
}
_NAME_OF_STATE = {state: name for name, state in _STATE_OF_NAME.items()}
_OPTION_NAMES = frozenset(pb.SessionOptions.DESCRIPTOR.fields_by_name)


def refuse_unknown(message: Message, path: str = "") -> None:
    """Raise InvalidRequest if the message, or one inside it, has a field that this server's .proto does not know."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        where = path or message.DESCRIPTOR.name
        raise InvalidRequest(f"{where}#{number}", f"{where} has a field number {number}, which this server does not know.")
    for descriptor, value in message.ListFields():
        if isinstance(value, Message):  # no request repeats messages
            refuse_unknown(value, f"{path}.{descriptor.name}".lstrip("."))


@contextmanager
def within_options() -> Iterator[None]:
    """Let a refusal of a session's option name the field as the requests have it: options.ttl_s."""
    try:
        yield
    except InvalidRequest as error:
        if error.param.partition(".")[0] not in _OPTION_NAMES:
            raise
        raise InvalidRequest(f"options.{error.param}", error.message) from error


def session_options(message: pb.SessionOptions) -> SessionOptions:
    """The options, checked as far as that goes without a server; InvalidRequest names the field inside the message."""
    if message.capture_policy not in _CAPTURE_OF_POLICY:
        raise InvalidRequest("capture_policy", f"capture_policy {message.capture_policy} is not one of INHERIT, OFF, ON.")
    if message.HasField("ttl_s") and not message.ttl_s > 0:
        raise InvalidRequest("ttl_s", f"ttl_s must be more than 0 seconds, got {message.ttl_s}.")
    _check_texts(message)
    return SessionOptions(
        client_label=message.client_label,
        ttl_s=message.ttl_s if message.HasField("ttl_s") else None,
        eos_token_ids=tuple(message.eos_token_ids) or None,
        stop_token_ids=tuple(message.stop_token_ids),
        capture=_CAPTURE_OF_POLICY[message.capture_policy],
        cache_policy=_cache_policy(message.cache_policy),
        drafter_policy=_drafter_policy(message.drafter_policy),
        labels=MappingProxyType(dict(message.labels)),
    )


def _check_texts(message: pb.SessionOptions) -> None:
    """They stay in memory as long as the session does."""
    if len(message.client_label) > MAX_LABEL_CHARS:
        raise InvalidRequest(
            "client_label", f"client_label has {len(message.client_label)} characters; {MAX_LABEL_CHARS} are taken."
        )
    longest = max((len(text) for pair in message.labels.items() for text in pair), default=0)
    if len(message.labels) > MAX_LABELS or longest > MAX_LABEL_CHARS:
        raise InvalidRequest(
            "labels",
            f"Up to {MAX_LABELS} labels of at most {MAX_LABEL_CHARS} characters are taken, got {len(message.labels)} of up to "
            f"{longest}.",
        )


def request_id(request: Any) -> str | None:
    """The request's own name, None if it has none. InvalidRequest for one that is too long to be remembered."""
    name: str = request.request_id
    if len(name) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequest("request_id", f"request_id has {len(name)} characters; at most {MAX_REQUEST_ID_CHARS} are taken.")
    return name or None


def _cache_policy(message: pb.CachePolicy) -> CachePolicy:
    if message.WhichOneof("kind") != "sink_window":
        return CachePolicy()
    policy = CachePolicy(message.sink_window.sink, message.sink_window.window)
    policy.check()
    return policy


def _drafter_policy(message: pb.DrafterPolicy) -> DrafterPolicy:
    match message.WhichOneof("kind"):
        case "pinned":
            policy = DrafterPolicy("pinned", message.pinned.version)
            policy.check()
            return policy
        case "off":
            return DrafterPolicy("off")
    return DrafterPolicy()


def create_request(options: SessionOptions, request_id: str = "") -> pb.CreateSessionRequest:
    return pb.CreateSessionRequest(request_id=request_id, options=options_message(options))


def options_message(options: SessionOptions) -> pb.SessionOptions:
    return pb.SessionOptions(
        client_label=options.client_label,
        ttl_s=options.ttl_s,
        eos_token_ids=options.eos_token_ids or (),
        stop_token_ids=options.stop_token_ids,
        cache_policy=_cache_policy_message(options.cache_policy),
        drafter_policy=_drafter_policy_message(options.drafter_policy),
        capture_policy=_POLICY_OF_CAPTURE[options.capture],
        labels=dict(options.labels),
    )


def _cache_policy_message(policy: CachePolicy) -> pb.CachePolicy:
    if policy.window is None:
        return pb.CachePolicy(full=pb.CachePolicy.Full())
    return pb.CachePolicy(sink_window=pb.CachePolicy.SinkWindow(sink=policy.sink, window=policy.window))


def _drafter_policy_message(policy: DrafterPolicy) -> pb.DrafterPolicy:
    if policy.kind == "pinned":
        return pb.DrafterPolicy(pinned=pb.DrafterPolicy.Pinned(version=policy.version))
    if policy.kind == "off":
        return pb.DrafterPolicy(off=pb.DrafterPolicy.Off())
    return pb.DrafterPolicy(follow_active=pb.DrafterPolicy.FollowActive())


def append_request(
    session_id: str, token_ids: Sequence[int], text: str, *, request_id: str, expected_history_length: int | None
) -> pb.AppendTokensRequest:
    return pb.AppendTokensRequest(
        session_id=session_id,
        request_id=request_id,
        expected_history_length=expected_history_length,
        token_ids=token_ids,
        text=text,
    )


def fork_request(
    session_id: str, options: SessionOptions | None, *, request_id: str, history_length: int | None
) -> pb.ForkSessionRequest:
    return pb.ForkSessionRequest(
        session_id=session_id,
        request_id=request_id,
        history_length=history_length,
        options=None if options is None else options_message(options),
    )


def session_message(info: SessionInfo, *, vocab_size: int, default_ttl_s: float) -> pb.Session:
    options = options_message(info.options)
    options.ttl_s = default_ttl_s if info.options.ttl_s is None else info.options.ttl_s
    message = pb.Session(
        session_id=info.session_id,
        state=_STATE_OF_NAME[info.state],
        history_length=info.history_length,
        cached_tokens=info.cached_tokens,
        dropped_tokens=info.dropped_tokens,
        options=options,
        target_version=info.target_fingerprint,
        drafter_version=info.drafter_version,
        max_context_tokens=info.max_context_tokens,
        vocab_size=vocab_size,
    )
    message.created_at.FromDatetime(datetime.fromtimestamp(info.created_at, UTC))
    message.last_used_at.FromDatetime(datetime.fromtimestamp(info.last_used_at, UTC))
    return message


def session_info(message: pb.Session) -> SessionInfo:
    return SessionInfo(
        session_id=message.session_id,
        state=_NAME_OF_STATE[message.state],
        history_length=message.history_length,
        cached_tokens=message.cached_tokens,
        options=session_options(message.options),
        target_fingerprint=message.target_version,
        drafter_version=message.drafter_version,
        max_context_tokens=message.max_context_tokens,
        created_at=message.created_at.ToDatetime(UTC).timestamp(),
        last_used_at=message.last_used_at.ToDatetime(UTC).timestamp(),
        dropped_tokens=message.dropped_tokens,
    )


@dataclass(frozen=True)
class SavedSession:
    """A session on a server's disk."""

    name: str
    num_bytes: int
    saved_at: float  # Unix seconds


def saved_session(message: pb.SavedSession) -> SavedSession:
    return SavedSession(message.name, message.num_bytes, message.saved_at.ToDatetime(UTC).timestamp())


def saved_session_message(saved: SavedSession) -> pb.SavedSession:
    message = pb.SavedSession(name=saved.name, num_bytes=saved.num_bytes)
    message.saved_at.FromDatetime(datetime.fromtimestamp(saved.saved_at, UTC))
    return message
