"""Between the messages of `slipstream.v1` and the nouns of `runtime.types`, in both directions. No network, no engine.

Servicers and clients share it, so each field has one place where it is read and one where it is written. What a message
can say and the server does not do is refused here with InvalidRequest, which names the field as the .proto does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from runtime.errors import InvalidRequest
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.types import (
    CachePolicy,
    Done,
    DrafterPolicy,
    FinishReason,
    Grammar,
    HistoryTruncated,
    SamplingParams,
    SessionInfo,
    SessionOptions,
    SessionState,
    SpeculationStats,
    Started,
    Switch,
    TokenLogprob,
    Tokens,
    Usage,
)

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
_REASON_OF_FINISH: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
}
_FINISH_OF_REASON = {reason: finish for finish, reason in _REASON_OF_FINISH.items()}
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


# --- sessions ---


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


# --- generation ---

_OPTIONAL_PARAMS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def sampling_params(request: pb.GenerateRequest, vocab_size: int) -> SamplingParams:
    """The checked parameters; InvalidRequest names the field as it is called in the message."""
    params = _sampling_params(request)
    try:
        params.check(vocab_size)
    except InvalidRequest as error:
        if error.param == "max_draft_tokens":
            raise InvalidRequest("speculation.max_draft_tokens", error.message) from error
        raise
    return params


def _sampling_params(request: pb.GenerateRequest) -> SamplingParams:
    given = {name: getattr(request, name) for name in _OPTIONAL_PARAMS if request.HasField(name)}
    speculation = request.speculation
    return SamplingParams(
        **given,
        logit_bias=MappingProxyType(dict(request.logit_bias)),
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        include_stop=request.include_stop,
        ignore_eos=request.ignore_eos,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        speculate=speculation.enabled if speculation.HasField("enabled") else True,
        max_draft_tokens=speculation.max_draft_tokens if speculation.HasField("max_draft_tokens") else None,
        grammar=_grammar(request.grammar) if request.HasField("grammar") else None,
    )


def _grammar(message: pb.Grammar) -> Grammar:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("grammar", "grammar holds neither json_schema nor lark; give one, or leave grammar out.")
    return Grammar(kind, getattr(message, kind))


def generate_request(
    session_id: str, params: SamplingParams, *, request_id: str = "", expected_history_length: int | None = None
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        session_id=session_id,
        request_id=request_id,
        expected_history_length=expected_history_length,
        **{name: getattr(params, name) for name in _OPTIONAL_PARAMS},
        logit_bias=dict(params.logit_bias),
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        include_stop=params.include_stop,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        top_logprobs=params.top_logprobs,
        speculation=pb.SpeculationOverride(enabled=params.speculate, max_draft_tokens=params.max_draft_tokens),
        grammar=None if params.grammar is None else pb.Grammar(**{params.grammar.kind: params.grammar.text}),
    )


def event_message(event: Started | Tokens | HistoryTruncated | Done) -> pb.GenerateResponse:
    if isinstance(event, Started):
        return pb.GenerateResponse(
            started=pb.Started(
                request_id=event.request_id,
                drafter_version=event.drafter_version,
                target_version=event.target_fingerprint,
                history_length=event.history_length,
            )
        )
    if isinstance(event, Tokens):
        return pb.GenerateResponse(
            tokens=pb.Tokens(
                token_ids=event.token_ids,
                text=event.text,
                logprobs=[_logprob_message(item) for item in event.logprobs],
                drafted=event.drafted,
            )
        )
    if isinstance(event, HistoryTruncated):
        return pb.GenerateResponse(history_truncated=pb.HistoryTruncated(dropped=event.dropped))
    return pb.GenerateResponse(done=_done_message(event))


def _logprob_message(item: TokenLogprob) -> pb.TokenLogprob:
    top = [pb.TokenLogprob.Alternative(token_id=token_id, logprob=logprob) for token_id, logprob in item.top]
    return pb.TokenLogprob(token_id=item.token_id, logprob=item.logprob, top=top)


def _done_message(done: Done) -> pb.Done:
    stats = done.speculation
    return pb.Done(
        finish_reason=_REASON_OF_FINISH[done.finish_reason],
        stop_string=done.matched_stop if isinstance(done.matched_stop, str) else None,
        stop_token_id=done.matched_stop if isinstance(done.matched_stop, int) else None,
        usage=pb.Usage(
            prompt_tokens=done.usage.prompt_tokens,
            completion_tokens=done.usage.completion_tokens,
            cached_tokens=done.usage.cached_tokens,
        ),
        speculation=pb.SpeculationStats(
            steps=stats.num_steps,
            drafted=stats.num_drafted,
            accepted=stats.num_accepted,
            mean_acceptance_length=stats.mean_acceptance_length,
            accepted_per_position=stats.accepted_per_position,
            drafted_per_position=stats.drafted_per_position,
        ),
        drafter_versions=done.drafter_versions,
        history_length=done.history_length,
    )


def event(message: pb.GenerateResponse, session_id: str) -> Started | Tokens | HistoryTruncated | Done:
    kind = message.WhichOneof("event")
    if kind == "started":
        started = message.started
        return Started(started.request_id, session_id, started.drafter_version, started.target_version, started.history_length)
    if kind == "tokens":
        logprobs = tuple(
            TokenLogprob(item.token_id, item.logprob, tuple((top.token_id, top.logprob) for top in item.top))
            for item in message.tokens.logprobs
        )
        return Tokens(tuple(message.tokens.token_ids), message.tokens.text, logprobs, tuple(message.tokens.drafted))
    if kind == "history_truncated":
        return HistoryTruncated(message.history_truncated.dropped)
    return _done(message.done)


def _done(message: pb.Done) -> Done:
    stop = message.WhichOneof("matched_stop")
    stats = message.speculation
    return Done(
        finish_reason=_FINISH_OF_REASON[message.finish_reason],
        matched_stop=getattr(message, stop) if stop else None,
        usage=Usage(message.usage.prompt_tokens, message.usage.completion_tokens, message.usage.cached_tokens),
        speculation=SpeculationStats(
            stats.steps, stats.drafted, stats.accepted, list(stats.accepted_per_position), list(stats.drafted_per_position)
        ),
        drafter_versions=tuple(message.drafter_versions),
        history_length=message.history_length,
    )
