"""Between the messages of runtime.proto that are about generations and the nouns of `runtime.types`, in both directions."""

from __future__ import annotations

from types import MappingProxyType

from runtime.errors import InvalidRequest
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.types import (
    Done,
    FinishReason,
    Grammar,
    HistoryTruncated,
    SamplingParams,
    SpeculationStats,
    Started,
    TokenLogprob,
    Tokens,
    Usage,
)

_REASON_OF_FINISH: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
}
_FINISH_OF_REASON = {reason: finish for finish, reason in _REASON_OF_FINISH.items()}

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
    "detokenize",
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
