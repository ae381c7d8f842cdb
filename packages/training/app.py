"""The training program: from a configuration to a finished run. Signals, threads and priority live here.

<state_dir>/training/<run_id>/{config.yaml, provenance.json, metrics.jsonl, checkpoints/, progress.png}
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import numpy as np
import torch
from rich.console import Console
from rich.logging import RichHandler
from safetensors import SafetensorError

from runtime.config import require
from runtime.configuration import provenance
from runtime.errors import ConfigError, SlipstreamError
from runtime.features.leases import Leases, LiveRows
from runtime.features.ledger import Ledger
from runtime.features.store import FeatureStore
from runtime.files import remove_leftovers
from runtime.models import Tokenizer, absolute, home
from training.assembly import Workshop, make_trainer, prepare
from training.config import Mode, TrainingConfig
from training.data import shards
from training.data.conversations import files_of
from training.data.corpus import load_corpus
from training.data.offline import OfflineStream
from training.data.plane import open_plane, plane_root
from training.data.stream import OnlineStream
from training.data.tokens import heldout_fraction
from training.interleaved.loop import build_online_eagle3_runtime
from training.learning import checkpoint
from training.learning.distributed import World, joined
from training.reporting import origins, plot
from training.reporting.metrics import TrainMetrics
from training.reporting.progress import Ends, Progress
from training.reporting.trackers import Sink
from training.run_directory import only_one

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Command = Callable[[TrainingConfig, Path, Console, threading.Event], int]
"""(settings, state directory, where to show progress, asks for an early end) -> exit status."""

COMMANDS: Mapping[Mode, str] = {
    Mode.CAPTURE: "training.capture.run:capture",
    Mode.EVALUATE: "training.judging.evaluation:evaluate_drafter",
    Mode.EXPORT: "training.interchange.commands:export_drafter",
    Mode.IMPORT: "training.interchange.commands:import_drafter",
}
"""Modes that are no training runs, by module and Command: no run directory, lock or checkpoint is made for them here. They are
imported when asked for: a trainer that starts again after its death does not wait for what it never uses."""


def run(config: TrainingConfig, stop: threading.Event | None = None) -> int:
    """Do what the mode says until its own end or a signal; 0 then. stop: set by such a signal, for who wants to know."""
    console = Console(stderr=True)
    _log_to(console)
    state_dir = state_directory(config)
    stop = stop or threading.Event()
    try:
        with _stopping(STOP_SIGNALS, stop):
            do = _run if config.mode.is_training else _command
            return do(config, state_dir, console, stop)
    except (OSError, SafetensorError) as error:  # files are read elsewhere with their own words: this is about writing
        raise SlipstreamError(
            f"state_dir {state_dir} cannot be used ({error}); give a directory that can be written and has room. What a "
            "checkpoint holds is safe: started again, the run goes on from there."
        ) from error


def state_directory(config: TrainingConfig) -> Path:
    return home() / "state" if config.state_dir is None else absolute("state_dir", config.state_dir)


def _command(config: TrainingConfig, state_dir: Path, console: Console, stop: threading.Event) -> int:
    there = ", ".join(mode.value for mode in Mode if mode.is_training or mode in COMMANDS)
    require(config.mode in COMMANDS, "mode", config.mode.value, f"one of {there}")
    torch.set_num_threads(config.trainer.num_threads or os.cpu_count() or 1)
    module, _, name = COMMANDS[config.mode].partition(":")
    command: Command = getattr(import_module(module), name)
    return command(config, state_dir, console, stop)


def _run(config: TrainingConfig, state_dir: Path, console: Console, stop: threading.Event) -> int:
    run_dir = state_dir / "training" / config.trainer.name
    trainer = config.trainer
    with joined(trainer.parallel, config.model.device, trainer.rank_timeout_s) as world:
        _take_a_modest_share(config, world)
        if world.is_first:
            _lead(config, state_dir, run_dir, console, stop, world)
        else:
            _follow(config, state_dir, run_dir, stop, world)
    return 0


def _follow(config: TrainingConfig, state_dir: Path, run_dir: Path, stop: threading.Event, world: World) -> None:
    """A rank but the first: it writes nothing that stays, and is heard only if something is wrong."""
    logging.getLogger().setLevel(logging.WARNING)
    with TemporaryDirectory() as nowhere, Progress(Path(nowhere), Console(quiet=True)) as progress:
        train(prepare(config, state_dir, run_dir, progress, stop, world))


def _lead(config: TrainingConfig, state_dir: Path, run_dir: Path, console: Console, stop: threading.Event, world: World) -> None:
    with only_one(run_dir, config.trainer.name):
        remove_leftovers(run_dir)  # candidates that a killed process left half-made
        provenance(run_dir, config)
        passes = config.data.passes if config.mode is Mode.OFFLINE else None
        tracker, ends = Sink(config.tracker, run_dir), Ends(config.trainer.max_steps, config.trainer.max_time_s, passes)
        try:
            with (
                TrainMetrics(config.trainer.metrics_port) as metrics,
                Progress(run_dir, console, metrics, tracker, ends) as progress,
            ):
                train(prepare(config, state_dir, run_dir, progress, stop, world))
        finally:  # also of a run that broke off
            picture = plot.draw(run_dir)
            if picture is not None:
                logger.info("picture of the run: %s", picture)


def train(shop: Workshop) -> None:
    """To the run's end, with rows from where the settings say."""
    if shop.config.mode is Mode.INTERLEAVED:
        assert shop.config.data.prompts is not None  # in this mode
        _note(shop, prompts=origins.of_files(files_of("data.prompts", shop.config.data.prompts)))
        _, _, run_interleaved = build_online_eagle3_runtime(shop)
        run_interleaved()
    elif shop.source is not None:
        with shop.source as server:
            _tell(shop, server.address)
            _note(shop, live_rows_of=server.address)
            shop.check_budget(server.rows.budget_bytes())
            make_trainer(shop, server.rows, server.rows).fit(_online(shop, server.rows, server.rows))
    elif shop.config.data.corpus is not None:
        _over_corpus(shop, shop.config.data.corpus)
    else:
        store, ledger = _open_plane(shop)
        if shop.config.mode is Mode.ONLINE:
            _note(shop, live_rows_of=str(plane_root(shop.config.features, shop.state_dir)))
            make_trainer(shop, store, ledger).fit(_online(shop, store, ledger))
        else:
            trainable = ledger.trainable()
            if not trainable:
                raise ConfigError(
                    "There are no rows with features to learn from; make some with mode=capture, or name conversations or token "
                    "rows with data.corpus=..."
                )
            _note(shop, features=origins.of_rows(trainable))
            make_trainer(shop, store, ledger).fit(_offline(shop, store, ledger))


def _over_corpus(shop: Workshop, given: str) -> None:
    """Epochs over token rows, whose states the target computes here as they are needed."""
    from runtime.backends.transformers.packed import load_packed  # here, for the same reason
    from training.data.prefill import CorpusLedger, HeldoutRows, Prefill
    from training.data.token_stream import TokenStream

    config, name, world = shop.config, shop.config.trainer.name, shop.world
    _tell(shop, given)
    tokenizer, cache = Tokenizer.load(shop.resolved.path), shop.state_dir / "cache" / "tokens"
    longest = min(config.data.max_tokens, int(shop.target.config.get("max_position_embeddings", config.data.max_tokens)))
    with world.first_in_turn():  # what it tokenised the others find
        found = load_corpus(given, shop.resolved, tokenizer, shop.target.vocab_size, longest, cache, shop.progress.tokenising)
    shop.progress.corpus(found)
    sources = (source for source, _, _ in found.corpus.labels)
    fraction = heldout_fraction(config.data.heldout_fraction, sources, config.trainer.gate.min_heldout_rows)
    corpus = {"rows": len(found.corpus), "tokens": found.corpus.num_tokens, "sha256": found.corpus.digest}
    captures = [shards.described(each) for each in shards.directories_of("data.corpus", given)]
    made_of = {"captures": captures} if captures else {"files": origins.of_files(files_of("data.corpus", given))}
    _note(shop, corpus=corpus, heldout_fraction=fraction, **made_of)
    prefill = Prefill(load_packed(shop.resolved, shop.target.device), found.corpus, config.data.max_batch_tokens)
    is_heldout = found.corpus.is_heldout(fraction)
    heldout = HeldoutRows(prefill, np.flatnonzero(is_heldout).tolist())
    ledger = CorpusLedger(shop.run_dir / "ledger.sqlite", heldout.refs(name, shop.target))
    rows, seed = np.flatnonzero(~is_heldout).tolist(), config.trainer.seed
    stream = TokenStream(prefill, rows, name, shop.data_of_step, seed, rank=world.rank, num_ranks=world.size)
    try:
        make_trainer(shop, heldout, ledger).fit(stream)
    finally:
        ledger.close()


def _online(shop: Workshop, store: LiveRows, ledger: Leases) -> OnlineStream:
    trainer, world = shop.config.trainer, shop.world
    shop.check_watermarks(ledger.watermarks())
    with world.first_in_turn():  # which gives back what the run, and all who trained it, leased before
        return OnlineStream(
            store,
            ledger,
            trainer.name,
            shop.data_of_step,
            shop.check,
            trainer.seed,
            rank=world.rank,
            num_ranks=world.size,
        )


def _offline(shop: Workshop, store: FeatureStore, ledger: Ledger) -> OfflineStream:
    world = shop.world
    seed = shop.config.trainer.seed
    return OfflineStream(store, ledger, shop.data_of_step, shop.check, seed, rank=world.rank, num_ranks=world.size)


def _open_plane(shop: Workshop) -> tuple[FeatureStore, Ledger]:
    config = shop.config.features
    _tell(shop, str(plane_root(config, shop.state_dir)))
    shop.check_budget(config.budget_mib << 20)
    return open_plane(config, shop.state_dir)


def _tell(shop: Workshop, rows_from: str) -> None:
    places = (shop.target.name, rows_from, shop.run_dir, shop.registry.root)
    logger.info("%s: rows from %s, run in %s, versions to %s", *places)


def _note(shop: Workshop, **data: object) -> None:
    """What the run is made from, once for all ranks."""
    if shop.world.is_first:
        version, directory = shop.start.version, shop.start.directory
        made = checkpoint.finished(shop.run_dir / "checkpoints")
        if made:  # the registry's active version may be another one by now
            version, directory = checkpoint.load_state(made[-1])["start"]
        start = origins.SCRATCH if directory is None else version
        target = {"name": shop.target.name, "fingerprint": shop.target.fingerprint}
        origins.note(shop.run_dir, target=target, start=start, data=data)


def _log_to(console: Console) -> None:
    """Above the live panel on a terminal, plain lines elsewhere."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # its first start here tells of fonts
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False, show_level=False, log_time_format="%H:%M:%S")
        logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    else:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")


def _take_a_modest_share(config: TrainingConfig, world: World) -> None:
    """A server on the same machine comes first: half of the cores online, and a lower priority. Ranks share what there is."""
    cores = max((os.cpu_count() or 1) // world.local_size, 1)
    torch.set_num_threads(config.trainer.num_threads or (cores if config.mode is Mode.OFFLINE else max(cores // 2, 1)))
    os.setpriority(os.PRIO_PROCESS, 0, max(config.trainer.niceness, os.getpriority(os.PRIO_PROCESS, 0)))


@contextmanager
def _stopping(signals: Sequence[signal.Signals], stop: threading.Event) -> Iterator[None]:
    """These signals set the event; a second one of them does what it usually does."""
    usual = {number: signal.getsignal(number) for number in signals}
    asked, asking = os.pipe()

    def ask(number: int, frame: FrameType | None) -> None:
        # Not more: it may have come while this very thread held the event's lock, or a logger's.
        os.write(asking, bytes([number]))
        signal.signal(number, usual[signal.Signals(number)])

    def set_when_asked() -> None:
        while number := os.read(asked, 1):
            logger.info("%s: stopping after this step", signal.Signals(number[0]).name)
            stop.set()

    listener = threading.Thread(target=set_when_asked, name="signals", daemon=True)
    listener.start()
    for number in signals:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        os.close(asking)
        listener.join()
        os.close(asked)
