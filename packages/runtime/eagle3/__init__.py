"""EAGLE3: one definition of the draft network, its vocabulary and its checkpoint, for training and for serving."""

from runtime.eagle3.checkpoint import load, save, version_id
from runtime.eagle3.config import Eagle3Config
from runtime.eagle3.model import Attend, Eagle3Model
from runtime.eagle3.reasons import RejectReason
from runtime.eagle3.vocab import DraftVocabulary

__all__ = ["Attend", "DraftVocabulary", "Eagle3Config", "Eagle3Model", "RejectReason", "load", "save", "version_id"]
