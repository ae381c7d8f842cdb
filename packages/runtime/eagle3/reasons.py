"""Why a drafter is refused: the codes that travel in gRPC and HTTP errors, in the registry and in the log."""

from __future__ import annotations

from enum import StrEnum

from runtime.errors import DrafterRejected


class RejectReason(StrEnum):
    UNREADABLE = "UNREADABLE"
    PICKLE = "PICKLE"
    OUTSIDE = "OUTSIDE"  # a link that leads out of the checkpoint's directory
    CONFIG = "CONFIG"
    MISSING_TENSOR = "MISSING_TENSOR"
    UNKNOWN_TENSOR = "UNKNOWN_TENSOR"
    SHAPE = "SHAPE"
    DTYPE = "DTYPE"
    NON_FINITE = "NON_FINITE"
    VOCABULARY = "VOCABULARY"
    TARGET_FINGERPRINT = "TARGET_FINGERPRINT"
    LAYER_IDS = "LAYER_IDS"
    MAX_POSITIONS = "MAX_POSITIONS"
    ROPE = "ROPE"
    MANIFEST = "MANIFEST"
    HASH = "HASH"
    UNKNOWN_VERSION = "UNKNOWN_VERSION"


def rejected(reason: RejectReason, sentence: str) -> DrafterRejected:
    return DrafterRejected(reason.value, sentence)
