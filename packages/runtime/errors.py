"""The exception tree. Each message says what was wrong, the value, and what to do; each class is also the stdlib's nearest type.

::

    SlipstreamError
    |- InvalidRequest (ValueError)         a request that can never work; `param` names the field
    |  '- ContextLengthExceeded            prompt + max_tokens do not fit the model's context
    |- Unauthenticated (PermissionError)   no key, or one that the server does not know
    |- PermissionDenied (PermissionError)  a key that may not do this
    |- SessionNotFound (KeyError)          `reason`: UNKNOWN, CLOSED, EVICTED_TTL, EVICTED_LRU
    |- SessionBusy (RuntimeError)          one operation per session at a time
    |- HistoryMismatch (RuntimeError)      expected_history_length differs from the session's
    |- HistoryDiverged (RuntimeError)      a prompt that does not begin with the history it is to continue
    |- CapacityExhausted (RuntimeError)    come back after `retry_after_s`
    |- EngineUnavailable (RuntimeError)    the engine is stopping, or failed
    |- RankLost (RuntimeError)             another process of a run that several train together is gone
    |- ConfigError (ValueError)            a setting that cannot be taken
    |- ModelError (ValueError)             a model that cannot be found, read or used
    |- DrafterRejected (ValueError)        a drafter that must not be served; `reason` is a RejectReason value
    |- DrafterNotFound (KeyError)          a version that is not loaded, or not known
    |- SavedSessionRejected (ValueError)   a session that cannot be saved or restored; `reason` says why
    '- FeatureError (RuntimeError)         a row that cannot be stored, read or released
       |- FeatureNotFound (KeyError)       its features are gone: released, replaced by a newer generation, or shed
       |- FeatureBudgetExceeded            the store is full
       |- FeatureUnavailable               the place behind it does not answer now; nothing is known to be wrong with the row
       |- LeaseLost                        rows that this run leased are not its own any more; `sample_ids` names them
       |- RunTakenOver                     another process trains this run now
       |- ProducerFailed                   what made the rows of a run broke off; what it had published was handed out
       '- ProducerLeaked                   its thread did not end when it was asked to
"""

from __future__ import annotations


class SlipstreamError(Exception):
    """Root of the tree. `reason` is the stable machine-readable code that travels in gRPC ErrorInfo and HTTP `code`."""

    reason = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class InvalidRequest(SlipstreamError, ValueError):
    reason = "INVALID_REQUEST"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    reason = "CONTEXT_LENGTH_EXCEEDED"


class Unauthenticated(SlipstreamError, PermissionError):
    reason = "UNAUTHENTICATED"


class PermissionDenied(SlipstreamError, PermissionError):
    reason = "PERMISSION_DENIED"


class SessionNotFound(SlipstreamError, KeyError):
    def __init__(self, session_id: str, reason: str) -> None:
        super().__init__(f"Session {session_id!r} is not here ({reason}). Create a session and append its history again.")
        self.session_id = session_id
        self.reason = reason


class SessionBusy(SlipstreamError, RuntimeError):
    reason = "SESSION_BUSY"

    def __init__(self, session_id: str) -> None:
        super().__init__(f"Session {session_id!r} is generating; wait for it to finish, or cancel it.")
        self.session_id = session_id


class HistoryMismatch(SlipstreamError, RuntimeError):
    reason = "HISTORY_MISMATCH"

    def __init__(self, expected: int, actual: int) -> None:
        super().__init__(f"expected_history_length is {expected}, but the session holds {actual} tokens. Read it and retry.")
        self.expected = expected
        self.actual = actual


class HistoryDiverged(SlipstreamError, RuntimeError):
    reason = "HISTORY_DIVERGED"

    def __init__(self, session_id: str, length: int) -> None:
        super().__init__(
            f"The prompt does not begin with the {length} tokens of session {session_id!r}; send what the session said as it "
            "said it, or name no session."
        )
        self.session_id = session_id
        self.actual = length


class CapacityExhausted(SlipstreamError, RuntimeError):
    reason = "CAPACITY_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailable(SlipstreamError, RuntimeError):
    reason = "ENGINE_UNAVAILABLE"


class RankLost(SlipstreamError, RuntimeError):
    reason = "RANK_LOST"

    def __init__(self, what: str) -> None:
        super().__init__(
            f"This run is trained by several processes, and {what.rstrip('.')}. What the latest checkpoint holds is safe, and "
            "other rows go back to the queue; start all processes again, in whatever number, and the run goes on from there."
        )


class ConfigError(SlipstreamError, ValueError):
    reason = "CONFIG_ERROR"


class ModelError(SlipstreamError, ValueError):
    reason = "MODEL_ERROR"


class DrafterRejected(SlipstreamError, ValueError):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class DrafterNotFound(SlipstreamError, KeyError):
    reason = "DRAFTER_NOT_FOUND"

    def __init__(self, version: str) -> None:
        super().__init__(f"Drafter version {version!r} is not here; list the versions and name one of them.")
        self.version = version


class SavedSessionRejected(SlipstreamError, ValueError):
    """`reason`: SAVED_NOT_FOUND, SAVED_EXISTS, SAVED_STORAGE, SAVED_UNREADABLE, SAVED_OTHER_TARGET, SAVED_OTHER_TOKENIZER or
    SAVED_OTHER_CACHE_POLICY."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class FeatureError(SlipstreamError, RuntimeError):
    reason = "FEATURE_ERROR"


class FeatureNotFound(FeatureError, KeyError):
    reason = "FEATURE_NOT_FOUND"


class FeatureBudgetExceeded(FeatureError):
    reason = "FEATURE_BUDGET_EXCEEDED"

    def __init__(self, num_bytes: int, used_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"A row of {num_bytes} bytes does not fit: {used_bytes} of {budget_bytes} bytes are in use. "
            "Delete rows that were trained, or raise features.budget_mib."
        )
        self.num_bytes = num_bytes


class FeatureUnavailable(FeatureError):
    reason = "FEATURE_UNAVAILABLE"


class LeaseLost(FeatureError):
    """message: as another process told it, who named the rows there."""

    reason = "LEASE_LOST"

    def __init__(self, run_id: str, sample_ids: list[str], message: str | None = None) -> None:
        shown = ", ".join(sample_ids[:3]) + (", ..." if len(sample_ids) > 3 else "")
        super().__init__(
            message
            or f"Run {run_id!r} does not lease {len(sample_ids)} of these rows any more ({shown}). Nothing was recorded; "
            "go back to the latest checkpoint and lease again, with more frequent heartbeats or a longer time-out."
        )
        self.run_id = run_id
        self.sample_ids = sample_ids


class RunTakenOver(FeatureError):
    reason = "RUN_TAKEN_OVER"

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"Run {run_id!r} is held by another process that began after this one. Stop this one; two trainers that are to share "
            "a stream need a trainer.worker each."
        )
        self.run_id = run_id


class ProducerFailed(FeatureError):
    reason = "PRODUCER_FAILED"

    def __init__(self, why: str) -> None:
        super().__init__(
            f"The producer of training rows failed: {why.rstrip('.')}. What it published before was handed out, and the run is "
            "not finished; start it again, and it goes on from its latest checkpoint."
        )


class ProducerLeaked(FeatureError):
    reason = "PRODUCER_LEAKED"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"The producer's thread is still running {timeout_s:g} s after it was asked to stop, and keeps what it has. End this "
            "process; if the producer only needs longer, raise producer.join_timeout_s."
        )
