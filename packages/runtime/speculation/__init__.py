"""Speculation as pure mathematics: processed distributions, the accept test, log-probabilities, stop strings.

uniforms = Uniforms(seed)
verdict = verify(logits, draft, processor, uniforms.at(place, depth + 1)[:, 1])   # logits [nodes + 1, V], moves nothing
for token_id in verdict.token_ids:
    processor.advance(token_id)                               # each token that is kept
"""

from runtime.speculation.accept import Verdict, verify
from runtime.speculation.sampling import Processor, TokenCounts, Uniforms, new_generator, pick, process_logits, token_logprobs
from runtime.speculation.stops import StopMatcher

__all__ = [
    "Processor",
    "StopMatcher",
    "TokenCounts",
    "Uniforms",
    "Verdict",
    "new_generator",
    "pick",
    "process_logits",
    "token_logprobs",
    "verify",
]
