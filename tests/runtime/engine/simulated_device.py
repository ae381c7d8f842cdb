"""A device that takes whole steps, simulated: honest but slow. Real forwards of the real target on a CPU, made when a step is
launched and told when it is collected, as a device would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.backends.base import Segment, SegmentOutput, Target
from runtime.backends.whole_steps import Emitted
from runtime.drafters.base import Draft
from runtime.eagle3 import Eagle3Model
from runtime.hidden_states import HiddenStates
from runtime.speculation import Processor, verify
from runtime.speculation.sampling import Sampled
from runtime.types import SamplingParams

CAPACITY_BYTES = 2**30  # less than the budget of the settings


@dataclass
class _Step:
    caches: list[int]
    known: list[list[int]]  # histories as they were known, the same lists while they are
    tokens: list[list[int]]
    sizes: list[list[int]]  # of each step
    depth: int


class States:
    """Of all committed rows of a target's caches, as a device has them beside their K/V."""

    def __init__(self, target: Any) -> None:
        self._seen: dict[int, HiddenStates] = {}  # by the last forward
        self._kept: dict[int, list[HiddenStates]] = {}
        self._dropped, self._forward, self._commit = target.dropped, target.forward, target.commit
        self._truncate, self._fork, self._drop = target.truncate, target.fork, target.drop
        self.num_reads = 0
        for name in ("forward", "commit", "truncate", "fork", "drop"):
            setattr(target, name, getattr(self, name))
        target.states_of = self.states_of

    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        outputs = self._forward(segments)
        self._seen |= {segment.cache: output.hidden for segment, output in zip(segments, outputs, strict=True)}
        return outputs

    def commit(self, cache: int, rows: Sequence[int]) -> None:
        self._commit(cache, rows)
        self._kept.setdefault(cache, []).extend(self._seen[cache][row : row + 1] for row in rows)

    def truncate(self, cache: int, length: int) -> None:
        self._truncate(cache, length)
        del self._kept[cache][length:]

    def fork(self, cache: int, length: int | None = None) -> int:
        copy = self._fork(cache, length)
        self._kept[copy] = self._kept[cache][:length]
        return copy

    def drop(self, cache: int) -> None:
        self._drop(cache)
        self._kept.pop(cache, None)

    def states_of(self, cache: int, first: int, end: int) -> HiddenStates:
        self.num_reads += 1
        assert self._dropped(cache) <= first < end <= len(self._kept[cache])
        return HiddenStates.concat(self._kept[cache][first:end])


@dataclass
class SlowDecoder:
    """A chain of guesses, of which every third place is wrong, verified by a forward of the target."""

    target: Any
    max_depth: int
    max_sequences: int
    max_steps: int = 6
    began: list[int] = field(default_factory=list)  # tokens of each history, when it came here
    pending: dict[int, list[int]] = field(default_factory=dict)  # the whole history of each cache that it knows
    sampled: dict[int, Sampled] = field(default_factory=dict)  # and where it stands
    depths: list[int] = field(default_factory=list)
    rows_of_steps: list[int] = field(default_factory=list)
    num_discarded: int = 0
    num_sampled: int = 0  # sequences that came here to be sampled
    loaded: list[Eagle3Model] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)  # under way
    waited_s: float = 0.0  # for each step, it says; 0: the host finds it over already
    num_ahead: int = 0  # launched while another was under way

    def load_drafter(self, model: Eagle3Model) -> bool:
        self.loaded.append(model)
        return True

    def depth_of(self, num_sequences: int) -> int:
        return self.max_depth

    def leave(self, cache: int) -> None:
        self.pending.pop(cache, None)
        self.sampled.pop(cache, None)

    def abandon(self) -> None:
        self.steps.clear()
        self.pending.clear()
        self.sampled.clear()

    def warm_up(self, num_sequences: int) -> dict[tuple[int, int], float]:
        return {(num, depth): 1e-3 + 1e-4 * depth for num in (1, num_sequences) for depth in range(self.max_depth + 1)}

    def can_continue(self, cache: int, depth: int) -> bool:
        return cache in self.pending and not (depth and any(not step.depth for step in self._under_way(cache)))

    def _under_way(self, cache: int) -> list[_Step]:
        known = self.pending.get(cache)
        return [step for step in self.steps if known is not None and any(known is one for one in step.known)]

    def launch(
        self,
        caches: Sequence[int],
        histories: Sequence[Sequence[int]],
        sampled: Sequence[Sampled | None],
        depth: int,
        num_steps: int = 1,
    ) -> bool:
        assert len(self.steps) < 6
        self.num_ahead += bool(self.steps)
        assert len(caches) <= self.max_sequences
        self.depths.append(depth)
        self.rows_of_steps.append(num_steps)
        steps, sizes = [], []
        for cache, history, one in zip(caches, histories, sampled, strict=True):
            if cache not in self.pending:
                self.pending[cache] = list(history)
                self.began.append(len(history))
                if one is not None:
                    self.sampled[cache] = one
                    self.num_sampled += 1
            known = self.pending[cache]
            assert len(known) == self.target.length(cache) + 1
            assert not self._under_way(cache) or self.can_continue(cache, depth)
            ahead = [token for step in self._under_way(cache) for token in step.tokens[step.caches.index(cache)]]
            tokens: list[int] = []
            sizes.append([])
            for _ in range(num_steps):
                new = self._one(cache, known, ahead + tokens, depth)
                tokens += new
                sizes[-1].append(len(new))
            steps.append(tokens)
        self.steps.append(_Step(list(caches), [self.pending[cache] for cache in caches], steps, sizes, depth))
        return True

    def _one(self, cache: int, history: list[int], more: list[int], depth: int) -> list[int]:
        """Behind the history and the `more` tokens that came to it."""
        guesses: list[int] = []
        for place in range(depth):
            [output] = self.target.forward([Segment(cache, [history[-1], *more, *guesses])])
            best = int(output.logits[-1].argmax())
            guesses.append(best if (len(history) + place) % 3 else (best + 1) % self.target.info.vocab_size)
        [output] = self.target.forward([Segment(cache, [history[-1], *more, *guesses], num_logits=depth + 1)])
        one = self.sampled.get(cache)
        params = SamplingParams(temperature=0.0) if one is None else one.params
        uniforms = None if one is None else one.uniforms.at(one.place + len(more), depth + 1)[:, 1]
        processor = Processor(params, history, self.target.info.vocab_size)
        return verify(output.logits, Draft(guesses), processor, uniforms).token_ids

    def has_landed(self) -> bool:
        return not self.waited_s

    def collect(self, still_wanted: Sequence[bool]) -> Emitted:
        step = self.steps.pop(0)
        for index, (cache, known, is_wanted) in enumerate(zip(step.caches, step.known, still_wanted, strict=True)):
            tokens, history = step.tokens[index], self.pending.get(cache)
            if history is not known:
                step.tokens[index] = []
                continue
            if not is_wanted:
                self.num_discarded += 1
                self.leave(cache)
                continue
            self.target.forward([Segment(cache, [history[-1], *tokens[:-1]])])  # others may have been there meanwhile
            self.target.commit(cache, range(len(tokens)))
            history += tokens
            if one := self.sampled.get(cache):
                self.sampled[cache] = replace(one, place=one.place + len(tokens))
        return Emitted(step.tokens, step.sizes if step.depth and len(step.sizes[0]) > 1 else None, self.waited_s)


def make_fusing(target: Target) -> list[SlowDecoder]:
    """Give the target whole steps; the decoders that engines ask it for come to stand in the list."""
    decoders: list[SlowDecoder] = []
    target.states = States(target)  # type: ignore[attr-defined]

    def new_decoder(max_depth: int, _max_sequences: int) -> SlowDecoder:
        decoders.append(SlowDecoder(target, max_depth, max_sequences=5))
        return decoders[-1]

    target.new_decoder = new_decoder  # type: ignore[attr-defined]
    target.capacity_bytes = CAPACITY_BYTES  # type: ignore[attr-defined]
    return decoders
