"""How a row's tokens were picked, as far as it decides what a drafter would have gained on them: the label `sampling`.

A turn that was sampled without a seed has it, since its drafts were sampled as well. Without it drafts were certain: the turn
was greedy, had a seed, or is older than the label. Penalties, biases and grammars are not told, so such turns have none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from runtime.types import SamplingParams

SAMPLING_LABEL = "sampling"
_OFF = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def labelled(labels: Mapping[str, str], params: SamplingParams) -> Mapping[str, str]:
    """A turn's labels, with how it was sampled; what its client said of that does not count."""
    others = {name: label for name, label in labels.items() if name != SAMPLING_LABEL}
    if params.is_greedy or params.seed is not None or not _depends_on_logits_alone(params):
        return others
    said = {name: getattr(params, name) for name, off in _OFF.items() if getattr(params, name) != off}
    return others | {SAMPLING_LABEL: json.dumps(said, separators=(",", ":"))}


def sampling_of(labels: Mapping[str, str]) -> SamplingParams | None:
    """How drafts for a row with these labels were sampled; None: they were certain, or the label is none of ours."""
    try:
        said = json.loads(labels.get(SAMPLING_LABEL, "null"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not said.keys() <= _OFF.keys():
        return None
    values = {**_OFF, **said}
    is_sound = all(isinstance(value, int | float) and math.isfinite(value) for value in values.values())
    if not is_sound or not (0 < values["temperature"] <= 2 and 0 < values["top_p"] <= 1 and 0 <= values["min_p"] <= 1):
        return None
    return SamplingParams(
        temperature=float(values["temperature"]),
        top_p=float(values["top_p"]),
        top_k=max(int(values["top_k"]), 0),
        min_p=float(values["min_p"]),
    )


def _depends_on_logits_alone(params: SamplingParams) -> bool:
    has_penalty = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    return not (has_penalty or params.logit_bias or params.grammar is not None)
