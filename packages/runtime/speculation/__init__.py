"""Speculation as pure mathematics: processed distributions, the accept test, log-probabilities, stop strings.

verdict = verify_chain(logits, draft, processor, generator)   # logits [m + 1, V], moves nothing
for token_id in verdict.token_ids:
    processor.advance(token_id)                               # each token that is kept
"""

from runtime.speculation.accept import Verdict, verify_chain
from runtime.speculation.sampling import Processor, TokenCounts, new_generator, pick, process_logits, token_logprobs
from runtime.speculation.stops import StopMatcher

__all__ = [
    "Processor",
    "StopMatcher",
    "TokenCounts",
    "Verdict",
    "new_generator",
    "pick",
    "process_logits",
    "token_logprobs",
    "verify_chain",
]
