"""The interleaved loop: one process in which the target answers prompts and the trainer learns from its hidden states.

::

    prompts -> engine -> store, ledger -> channel.producer ==> channel.consumer -> stream -> trainer.fit
                  ^------------------------- newest drafter -------------------------------------'

The producer runs on a daemon thread, `fit` on the caller's. Whoever ends first ends the other: a trainer that is done stops
the producer, at the watermark or in an answer; a producer that is done closes the channel, and what is left is trained. Of
two errors the one that came first is raised, with the other one chained to it.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable

import torch

from runtime.backends import load_target
from runtime.backends.base import TargetInfo
from runtime.config import DrafterConfig, DrafterKind, FeaturesConfig, SessionsConfig, require
from runtime.drafters.loading import load_drafter
from runtime.engine.local import LocalEngine
from runtime.errors import ProducerFailed, ProducerLeaked
from runtime.features.channel import RefChannel
from runtime.features.flow import Quantum, Watermarks
from runtime.features.ledger import Ledger
from runtime.features.memory import MemoryStore
from runtime.models import Tokenizer
from runtime.types import Switch
from training.assembly import Workshop, make_trainer
from training.data.arrivals import ChannelArrivals
from training.data.conversations import files_of
from training.data.prompts import load_prompts
from training.data.stream import OnlineStream
from training.dialogues import Dialogues, longest_row
from training.interleaved.config import ProducerConfig
from training.interleaved.producer import Handover, PromptProducer, TurnBox
from training.trainer import Trainer

logger = logging.getLogger(__name__)

ROW_DTYPE = torch.bfloat16
DriveProducer = Callable[[Callable[[], bool]], object]
"""Publishes until it has no more, or its argument says that it should stop; closes the channel in `finally`."""


def run_online_interleaved(
    trainer: Trainer, loader: OnlineStream, drive_producer: DriveProducer, channel: RefChannel, join_timeout_s: float
) -> None:
    """Produce and train until either is done.

    What drive_producer raised, if it raised first, else what the trainer raised; ProducerLeaked if the producer's thread is
    still there join_timeout_s after it was to stop (told on the log as well, and noted on an error that is raised instead).
    """
    should_stop = threading.Event()
    producer = _Producer(drive_producer, channel, should_stop)
    producer.start()
    trainer_error: BaseException | None = None
    try:
        trainer.fit(loader)
    except BaseException as error:  # raised again below, once the producer is gone
        trainer_error = error
    should_stop.set()
    channel.consumer.leave()
    producer.join(join_timeout_s)
    leak = _leak(producer, join_timeout_s)
    cause = _root_cause(producer.error, trainer_error)
    if cause is not None:
        if leak is not None:
            cause.add_note(str(leak))
        raise cause
    if leak is not None:
        raise leak


class _Producer(threading.Thread):
    def __init__(self, drive: DriveProducer, channel: RefChannel, should_stop: threading.Event) -> None:
        super().__init__(name="interleaved-producer", daemon=True)
        self.error: BaseException | None = None
        self._drive = drive
        self._channel = channel
        self._should_stop = should_stop

    def run(self) -> None:
        try:
            self._drive(self._should_stop.is_set)
        except BaseException as error:  # the caller's thread raises it
            self.error = error
            self._channel.producer.fail(f"{type(error).__name__}: {error}")
        finally:
            self._channel.producer.close()


def _leak(producer: threading.Thread, timeout_s: float) -> ProducerLeaked | None:
    if not producer.is_alive():
        return None
    leak = ProducerLeaked(timeout_s)
    logger.error("LEAK: thread %s: %s", producer.name, leak)
    return leak


def _root_cause(producer_error: BaseException | None, trainer_error: BaseException | None) -> BaseException | None:
    """The error that came first, the other one chained. A trainer that heard of the producer's failure did not fail first."""
    if producer_error is None or trainer_error is None:
        return producer_error or trainer_error
    is_trainers = not isinstance(trainer_error, ProducerFailed)
    root, other = (trainer_error, producer_error) if is_trainers else (producer_error, trainer_error)
    last = root
    while last.__cause__ is not None or (last.__context__ is not None and not last.__suppress_context__):
        last = last.__cause__ or last.__context__ or last
    if last is not other:
        last.__cause__ = other
    return root


# --- the parts ---


def build_online_eagle3_runtime(shop: Workshop) -> tuple[Trainer, OnlineStream, Callable[[], None]]:
    """(trainer, loader, run): producer and consumer over one ledger, one consume-once store and one channel. `run` trains.

    ConfigError if the prompts cannot be used, or if the watermarks are below what one step takes.
    """
    config, run_id = shop.config, shop.config.trainer.name
    assert config.data.prompts is not None  # checked by TrainingConfig
    target = load_target(config.backend, config.model, shop.resolved)
    tokenizer = Tokenizer.load(shop.resolved.path)
    limit = min(target.info.max_positions, config.data.max_batch_tokens)
    files = files_of("data.prompts", config.data.prompts)
    vocab_size, report = target.info.vocab_size, shop.progress.tokenising
    prompts, left_out = load_prompts(files, tokenizer, vocab_size, limit - config.producer.max_tokens, report=report)
    longest = min(max(longest_row(prompt, tokenizer, config.producer.max_tokens) for prompt in prompts), limit)
    channel = _channel(config.producer, config.features, shop.data_of_step.batch_rows, longest, target.info)

    store = MemoryStore(config.features.budget_mib << 20, dtype=ROW_DTYPE)
    ledger = Ledger(shop.run_dir / "ledger.sqlite", exists=store.exists)
    _begin_anew(ledger, run_id)
    arrivals = ChannelArrivals(channel.consumer, ledger, run_id, config.data.lease_timeout_s)
    loader = OnlineStream(store, ledger, run_id, shop.data_of_step, shop.check, config.trainer.seed, arrivals)
    handover, turns = Handover(), TurnBox()
    trainer = make_trainer(shop, store, ledger, after_step=handover.after_step)

    sessions = SessionsConfig(max_sessions=2 * config.producer.concurrency, max_batch_sessions=config.producer.concurrency)
    start = shop.start.directory
    first = DrafterConfig(kind=DrafterKind.NGRAM) if start is None else DrafterConfig(DrafterKind.EAGLE3, str(start))
    engine = LocalEngine(target, load_drafter(first, target), tokenizer, config.speculation, sessions, turns)
    dialogues = Dialogues(
        engine,
        tokenizer,
        seed=config.trainer.seed,
        concurrency=config.producer.concurrency,
        max_answer_tokens=config.producer.max_tokens,
        max_tokens=limit,
        capture=Switch.ON,
    )
    producer = PromptProducer(
        engine,
        dialogues,
        turns,
        prompts,
        store,
        ledger,
        channel.producer,
        config.producer,
        run_id=run_id,
        max_heldout_rows=config.trainer.gate.max_heldout_rows,
        max_trained_rows=config.data.replay_rows,
        handover=handover,
        show=shop.progress.producing,
        tell=shop.progress.produced,
    )

    def drive(should_stop: Callable[[], bool]) -> None:
        if producer.drive(should_stop):
            shop.progress.all_rounds_made(config.producer.max_rounds)

    def run() -> None:
        shop.progress.prompts(len(prompts), left_out)
        engine.start()
        try:
            run_online_interleaved(trainer, loader, drive, channel, config.producer.join_timeout_s)
        finally:
            engine.stop()
            ledger.close()

    return trainer, loader, run


def _channel(config: ProducerConfig, features: FeaturesConfig, batch_rows: int, longest_row: int, info: TargetInfo) -> RefChannel:
    fits = config.high_mib <= features.budget_mib
    require(fits, "producer.high_mib", config.high_mib, f"at most features.budget_mib, {features.budget_mib}")
    row_bytes = longest_row * (4 * info.hidden_size * ROW_DTYPE.itemsize + 9)  # three auxiliary states and the last; id, mark
    marks = Watermarks(config.high_rows, config.low_rows, config.high_mib << 20, config.low_mib << 20)
    return RefChannel(marks, Quantum.of_step(1, batch_rows, 1, row_bytes))


def _begin_anew(ledger: Ledger, run_id: str) -> None:
    """The memory of an earlier process is gone. What it had made durable stays counted; all other rows are made again."""
    ledger.recover(run_id)
    ledger.shed_durable(sys.maxsize)
    ledger.forget([sample_id for sample_id, _ in ledger.needed()])
