"""Drafters: EAGLE3, n-gram lookup, none, and a scripted one. The protocol is in base.py."""

from runtime.drafters.base import Draft, Drafter, DraftRequest, SparseProbs
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.drafters.ngram import NgramDrafter
from runtime.drafters.none import NoDrafter
from runtime.drafters.scripted import ScriptedDrafter

__all__ = [
    "Draft",
    "DraftRequest",
    "Drafter",
    "Eagle3Drafter",
    "NgramDrafter",
    "NoDrafter",
    "ScriptedDrafter",
    "SparseProbs",
]
