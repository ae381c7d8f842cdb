"""The producing half of the interleaved loop: the target answers prompts, and what it says becomes rows that are published.

    round     every prompt once; the drafter that speculates is the trainer's newest, so answers come faster as it learns
    dialogue  a prompt, its answer, later questions and theirs; its rows go to store, ledger and channel when it is over

It runs ahead of the trainer only as far as the channel lets it. Which rows there are to make, the ledger knows: what an
earlier process of this run had made durable is not made again, everything else is. Knows no optimiser and no thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch

from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.eagle3 import Eagle3Model
from runtime.engine.base import Engine
from runtime.errors import FeatureBudgetExceeded
from runtime.features.channel import ProducerView
from runtime.features.cut import cut_turn
from runtime.features.ledger import Ledger
from runtime.features.plane import make_room
from runtime.features.refs import SampleMeta, SampleRef, unit_hash
from runtime.features.row import FeatureRow
from runtime.features.store import FeatureStore
from runtime.features.tap import CapturedTurn
from runtime.hidden_states import HiddenStates
from runtime.types import Done, SpeculationStats
from training.data.batches import supervised
from training.data.conversations import Span
from training.data.prompts import Prompt
from training.dialogues import Dialogue, Dialogues
from training.interleaved.config import ProducerConfig
from training.learning.hedge import Learning

LOOK_EVERY_S = 0.1  # how often a producer that waits for room looks whether anybody still wants its rows
KEEP_HOUSE_EVERY = 64  # answers
ROW, HELDOUT = "row", "heldout"
UNUSABLE = "unusable"  # a dialogue of answers that ended at once, or a row whose states are not finite


class TurnBox:
    """The engine's tap: keeps each finished turn until the producer fetches it."""

    def __init__(self) -> None:
        self._turns: dict[str, CapturedTurn] = {}

    def offer(self, turn: CapturedTurn) -> bool:
        self._turns[turn.session_id] = turn
        return True

    def fetch(self, session_id: str) -> CapturedTurn | None:
        return self._turns.pop(session_id, None)

    def close(self) -> None:
        self._turns.clear()


class Handover:
    """The trainer's newest drafter, from its thread to the producer's. Copied only when it was asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_wanted = False
        self._newest: tuple[Eagle3Model, int] | None = None

    def ask(self) -> None:
        with self._lock:
            self._is_wanted = True

    def after_step(self, learner: Learning) -> None:
        """Between two steps of the trainer."""
        if self._is_wanted:
            newest = learner.served(), learner.num_steps
            with self._lock:
                self._is_wanted, self._newest = False, newest

    def fetch(self) -> tuple[Eagle3Model, int] | None:
        """(drafter, its step), once."""
        with self._lock:
            newest, self._newest = self._newest, None
            return newest


@dataclass
class Round:
    """What became of one round, so far or in all."""

    number: int  # from 1
    num_asked: int  # questions
    num_answers: int = 0
    kept: Counter[str] = field(default_factory=Counter)  # rows by what became of them: ROW, HELDOUT, UNUSABLE
    num_not_asked: int = 0  # questions that the template, or the length of a row, left no place for
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    num_tokens: int = 0  # generated
    seconds: float = 0.0
    drafter_version: str = ""  # the last one
    began_at: float = field(default_factory=time.monotonic)

    def add(self, done: Done, drafter_version: str) -> None:
        self.num_answers += 1
        self.speculation.add(done.speculation)
        self.num_tokens += done.usage.completion_tokens
        self.seconds = time.monotonic() - self.began_at
        self.drafter_version = drafter_version

    @property
    def is_whole(self) -> bool:
        return self.num_answers + self.num_not_asked == self.num_asked

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)

    @property
    def figures(self) -> dict[str, float | str]:
        return {
            "round": self.number,
            "answers": self.num_answers,
            "not_asked": self.num_not_asked,
            "rows": self.kept[ROW],
            "heldout_rows": self.kept[HELDOUT],
            "unusable": self.kept[UNUSABLE],
            "generated_tokens": self.num_tokens,
            "tokens_per_s": self.tokens_per_s,
            "acceptance_length": self.speculation.mean_acceptance_length,
            "drafter": self.drafter_version,
        }


class PromptProducer:
    """`drive` is the producing side of `run_online_interleaved`."""

    def __init__(
        self,
        engine: Engine,
        dialogues: Dialogues,  # with that engine, whose tap is `turns`
        turns: TurnBox,
        prompts: Sequence[Prompt],
        store: FeatureStore,
        ledger: Ledger,
        channel: ProducerView,
        config: ProducerConfig,
        *,
        run_id: str,
        max_heldout_rows: int,
        max_trained_rows: int,  # durable rows whose features are kept, for replay
        handover: Handover,
        show: Callable[[Mapping[str, str]], None],  # figures of now
        tell: Callable[[Round], None],  # a round is over
    ) -> None:
        self._engine = engine
        self._dialogues = dialogues
        self._turns = turns
        self._prompts = prompts
        self._store = store
        self._ledger = ledger
        self._channel = channel
        self._config = config
        self._run_id = run_id
        self._max_trained_rows = max_trained_rows
        self._handover = handover
        self._show = show
        self._tell = tell
        self._heldout = _some(prompts, run_id, min(round(config.heldout_fraction * len(prompts)), max_heldout_rows))
        self._known = set(ledger.consumption(run_id)) | set(ledger.failures())
        self._recent: deque[SpeculationStats] = deque(maxlen=4 * config.concurrency)
        self._asked_at = 0.0

    def drive(self, should_stop: Callable[[], bool]) -> bool:
        """Rounds until there were enough or it is to stop; whether all rounds were made. The channel hears how it ended."""
        try:
            number = 0
            while not should_stop() and (self._config.max_rounds is None or number < self._config.max_rounds):
                number += 1
                self._round(number, should_stop)
            return not should_stop()
        except BaseException as error:  # whatever broke off the rows, the consumer must hear of it; it is raised on
            self._channel.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._turns.close()
            self._channel.close()

    # --- one round ---

    def _round(self, number: int, should_stop: Callable[[], bool]) -> None:
        dialogues = (self._dialogue(number, index, prompt) for index, prompt in enumerate(self._prompts))
        waiting = deque(dialogue for dialogue in dialogues if not self._is_known(dialogue))
        made = Round(number, sum(1 + len(dialogue.later) for dialogue in waiting))
        self._ask_for_drafter()
        self._take_newest_drafter()
        with closing(self._dialogues.turns(waiting, should_stop)) as turns:
            for turn in turns:
                made.add(turn.done, self._engine.drafter_version)
                if turn.is_over:
                    self._keep(turn.dialogue, made)
                self._say_how_it_goes(made, turn.done)
                if made.num_answers % KEEP_HOUSE_EVERY == 0:
                    self._store.delete(self._ledger.keep_newest_durable(self._max_trained_rows))
                self._take_newest_drafter()
        if made.is_whole:
            self._tell(made)

    def _dialogue(self, number: int, index: int, prompt: Prompt) -> Dialogue:
        """A prompt that is held out has the same one, number 0, in all rounds."""
        return Dialogue(prompt, 0 if index in self._heldout else number, self._config.temperature)

    def _is_known(self, dialogue: Dialogue) -> bool:
        """Whether all its rows are, however many they turned out to be."""
        return any(self._known.issuperset(self._names(dialogue, num)) for num in range(1, len(dialogue.later) + 2))

    def _names(self, dialogue: Dialogue, num_rows: int) -> list[str]:
        """The sample ids of so many rows. Each says how many there are, so that those of some do not pass for all."""
        key = f"{self._run_id}\0{dialogue.number}\0{dialogue.prompt.id}\0{num_rows}"
        return [hashlib.sha256(f"{key}\0{row}".encode()).hexdigest()[:32] for row in range(num_rows)]

    # --- a dialogue becomes rows ---

    def _keep(self, dialogue: Dialogue, made: Round) -> None:
        made.num_not_asked += len(dialogue.prompt.later) + 1 - dialogue.num_turns
        rows = list(self._rows(dialogue))
        made.kept[UNUSABLE] += max(len(dialogue.rows), 1) - len(rows)
        for sample_id, (turn, row) in zip(self._names(dialogue, len(rows)), rows, strict=True):
            if sample_id not in self._known:
                made.kept[self._keep_row(dialogue, sample_id, turn, row)] += 1

    def _rows(self, dialogue: Dialogue) -> Iterator[tuple[CapturedTurn, FeatureRow]]:
        """Those that a drafter can learn from."""
        for session_id, tokens in dialogue.sessions.items():
            turn = self._turns.fetch(session_id)
            if turn is not None and tokens is not None:
                generated = marks(tokens.spans, len(turn.token_ids))
                row = row_of(dataclasses.replace(turn, generated=generated))
                if row is not None:
                    yield turn, row

    def _keep_row(self, dialogue: Dialogue, sample_id: str, turn: CapturedTurn, row: FeatureRow) -> str:
        """What became of it."""
        meta = SampleMeta(
            sample_id=sample_id,
            run_id=self._run_id,
            source=f"prompt/{dialogue.prompt.id}",
            target_fingerprint=self._engine.info.fingerprint,
            aux_layer_ids=self._engine.info.aux_layer_ids,
            drafter_version=turn.drafter_version,
        )
        ref = self._put(meta, row)
        if ref is None:
            return UNUSABLE
        is_heldout = dialogue.number == 0
        self._ledger.commit(ref, "heldout" if is_heldout else "train")
        if is_heldout:
            self._known.add(sample_id)
            return HELDOUT
        self._channel.publish(ref)
        return ROW

    def _put(self, meta: SampleMeta, row: FeatureRow) -> SampleRef | None:
        """Store the row, waiting for rows that were trained to become durable and give up their room; None if nobody will
        take it any more."""
        num_bytes = sum(tensor.nbytes for tensor in row.tensors(self._store.dtype).values())
        while True:
            make_room(self._store, self._ledger, num_bytes)
            try:
                return self._store.put(meta, row)
            except FeatureBudgetExceeded:
                status = self._ledger.status()
                if not status["pending"] and not status["leased"]:
                    raise  # nothing that is there will ever give up room
            if not self._channel.wait(LOOK_EVERY_S):
                return None

    # --- the drafter, and what is told ---

    def _ask_for_drafter(self) -> None:
        self._asked_at = time.monotonic()
        self._handover.ask()

    def _take_newest_drafter(self) -> None:
        newest = self._handover.fetch()
        if newest is not None:
            model, step = newest
            info = self._engine.info
            served = model.to(device=info.device, dtype=getattr(torch, info.dtype))
            self._engine.swap_drafter(Eagle3Drafter(served, f"{self._run_id}@{step}"))
        if time.monotonic() - self._asked_at >= self._config.swap_every_s:
            self._ask_for_drafter()

    def _say_how_it_goes(self, made: Round, done: Done) -> None:
        self._recent.append(done.speculation)
        rounds = "" if self._config.max_rounds is None else f" of {self._config.max_rounds}"
        flow = self._channel.figures()
        self._show(
            {
                "round": f"{made.number}{rounds}",
                "answers": f"{made.num_answers} of {made.num_asked}",
                "tokens/s": f"{made.tokens_per_s:.0f}",
                "acceptance length": f"{SpeculationStats.total(self._recent).mean_acceptance_length:.2f}",
                "drafter": made.drafter_version,
                "ahead of the trainer": f"{flow.num_outstanding} rows{'' if flow.is_open else ', waiting'}",
            }
        )


def _some(prompts: Sequence[Prompt], run_id: str, count: int) -> frozenset[int]:
    """The indices of so many prompts: by chance, but the same ones in every process of the run."""
    chances = [unit_hash("heldout", f"{run_id}:{index}:{prompt.id}") for index, prompt in enumerate(prompts)]
    return frozenset(sorted(range(len(prompts)), key=chances.__getitem__)[:count])


def marks(spans: Sequence[Span], length: int) -> tuple[bool, ...]:
    """Per token: whether it lies in one of the spans."""
    marked = [False] * length
    for first, stop in spans:
        marked[first:stop] = [True] * (stop - first)
    return tuple(marked)


def row_of(turn: CapturedTurn) -> FeatureRow | None:
    """The whole history as one row, up to its last generated token; None if no drafter can learn from it."""
    cuts = cut_turn(turn.generated, len(turn.token_ids))
    if not cuts:
        return None
    [cut] = cuts
    hidden = HiddenStates(
        torch.cat([part.aux for part in turn.hidden])[: cut.stop - 1],
        torch.cat([part.last for part in turn.hidden])[: cut.stop - 1],
    )
    generated = torch.tensor(turn.generated[: cut.stop])
    if not len(supervised(generated)[0]) or not (hidden.aux.isfinite().all() and hidden.last.isfinite().all()):
        return None
    return FeatureRow(torch.tensor(turn.token_ids[: cut.stop]), generated, hidden, turn.labels)
