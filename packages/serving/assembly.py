"""From settings to a server's parts: model, engine, feature plane, registry, first drafter, lifecycle. All of it may be slow.

Nothing here listens on a port or knows a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.backends import load_target
from runtime.backends.base import Target
from runtime.config import DrafterConfig, DrafterKind
from runtime.configuration import provenance
from runtime.drafters.base import Drafter
from runtime.drafters.eagle3 import Eagle3Drafter
from runtime.drafters.embedded import path_for
from runtime.drafters.ngram import NgramDrafter
from runtime.drafters.none import NoDrafter
from runtime.eagle3.reasons import RejectReason, rejected
from runtime.engine.local import LocalEngine
from runtime.errors import ConfigError, DrafterRejected
from runtime.features.hooks import load_hook
from runtime.features.ledger import Ledger
from runtime.features.plane import open_feature_plane
from runtime.features.store import FeatureStore
from runtime.features.tap import FeatureTap
from runtime.models import ResolvedModel, Tokenizer, resolve
from runtime.registry import Registry, VersionRecord, VersionState, validate
from serving.config import ServingConfig
from serving.divergence import AcceptanceWatch
from serving.lifecycle import Lifecycle, LoadDrafter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capture:
    """The feature plane that this server writes to."""

    store: FeatureStore
    ledger: Ledger
    tap: FeatureTap

    def counters(self) -> dict[str, int]:
        return self.tap.counters()

    def queue_depth(self) -> int:
        return self.tap.queue_depth()

    def used_bytes(self) -> int:
        return self.store.used_bytes()

    def close(self) -> None:
        self.tap.close()
        self.store.close()
        self.ledger.close()


@dataclass(frozen=True)
class Parts:
    resolved: ResolvedModel
    tokenizer: Tokenizer
    engine: LocalEngine
    registry: Registry
    lifecycle: Lifecycle
    capture: Capture | None

    def start(self) -> None:
        self.engine.start()
        torch.set_num_threads(1)  # of all threads but the engine's, which has its own by now
        self.lifecycle.start()

    def stop(self) -> None:
        """Running generations end with EngineUnavailable; what the tap holds is written."""
        self.lifecycle.stop()
        self.engine.stop()
        torch.set_num_threads(self.engine.num_threads)
        if self.capture is not None:
            self.capture.close()


def assemble(config: ServingConfig, run_id: str, on_swap: Callable[[float], None]) -> Parts:
    """Load everything and leave a record of this run. ModelError, ConfigError or DrafterRejected, with one sentence, if not."""
    resolved = resolve(config.model.name)
    tokenizer = Tokenizer.load(resolved.path)
    target = load_target(config.backend, config.model, resolved)
    load = drafter_loader(target)
    try:
        provenance(config.state_path / "serving" / run_id, config)
        registry = Registry(config.registry_path)
        first, embedded_version = first_drafter(config.drafter, target, registry, load)
        capture = _capture(config, target, tokenizer, run_id) if config.capture.enabled else None
    except OSError as error:
        raise ConfigError(
            f"state_dir {config.state_path} cannot be used ({error}); give a directory that can be written."
        ) from error
    tap = capture.tap if capture else None
    engine = LocalEngine(target, first, tokenizer, config.speculation, config.sessions, tap)
    lifecycle = Lifecycle(
        engine,
        registry,
        load,
        config.registry,
        watch=AcceptanceWatch(config.registry, has_chains_only=config.speculation.has_whole_chains_only),
        may_activate=config.drafter.kind is not DrafterKind.NONE,
        embedded_version=embedded_version,
        on_swap=on_swap,
    )
    return Parts(resolved, tokenizer, engine, registry, lifecycle, capture)


def _capture(config: ServingConfig, target: Target, tokenizer: Tokenizer, run_id: str) -> Capture:
    redact = load_hook("capture.redact", config.capture.redact)
    classify = load_hook("capture.classify", config.capture.classify)
    store, ledger = open_feature_plane(config.features_path, config.features)
    tap = FeatureTap(
        store,
        ledger,
        config.capture,
        run_id=run_id,
        target_info=target.info,
        tokenizer_hash=tokenizer.hash,
        vocabulary_hash=tokenizer.vocabulary_hash,
        redact=redact,
        classify=classify,
        decode=tokenizer.decode,
    )
    return Capture(store, ledger, tap)


def drafter_loader(target: Target) -> LoadDrafter:
    """What turns a version of the registry into a drafter for this target, or refuses it."""
    dtype: torch.dtype = getattr(torch, target.info.dtype)

    def load(record: VersionRecord) -> Drafter:
        try:
            model = validate(record, target.info, target.embedding, dtype=dtype, device=target.info.device)
            return Eagle3Drafter(model, record.version)
        except DrafterRejected:
            raise
        except Exception as error:  # a version is a guest's work: what reads it may fail in a way that nobody thought of
            log.exception("Drafter %s cannot be loaded.", record.version)
            why = f"Loading it failed with {type(error).__name__}: {error}"
            raise rejected(RejectReason.UNREADABLE, f"{why}. Publish another version.") from error

    return load


def first_drafter(config: DrafterConfig, target: Target, registry: Registry, load: LoadDrafter) -> tuple[Drafter, str | None]:
    """The drafter that serves from the first token on, and the version of the embedded one if this model has one.

    The embedded drafter is published like any other version, so that going back to it is nothing special.
    """
    embedded = path_for(target.info.name)
    embedded_version = _publish(registry, embedded, target) if embedded else None
    if embedded_version and registry.get(embedded_version).state is VersionState.STAGED:
        registry.set_state(embedded_version, VersionState.VALIDATED)  # it is no news: the watcher must not take it up
    match config.kind:
        case DrafterKind.NONE:
            return NoDrafter(), embedded_version
        case DrafterKind.NGRAM:
            return NgramDrafter(), embedded_version
        case DrafterKind.EAGLE3:
            assert config.path is not None  # checked by DrafterConfig
            version = _publish(registry, Path(config.path), target)
            return _activated(registry, version, load), embedded_version
    for candidate in filter(None, (registry.active(), embedded_version)):
        try:
            return _activated(registry, candidate, load), embedded_version
        except DrafterRejected as error:
            log.warning("Drafter %s is not served: %s (%s)", candidate, error.message, error.reason)
    return NgramDrafter(), embedded_version


def _publish(registry: Registry, directory: Path, target: Target) -> str:
    return registry.publish(
        directory, parent=None, step=0, target_fingerprint=target.info.fingerprint, metrics={}, notes="given at start"
    )


def _activated(registry: Registry, version: str, load: LoadDrafter) -> Drafter:
    """Loading says whether the version is sound for this target; only then does the registry hear of it."""
    record = registry.get(version)
    drafter = load(record)
    if registry.active() != version:
        if record.state is not VersionState.VALIDATED:
            registry.set_state(version, VersionState.VALIDATED)
        registry.activate(version)
    return drafter
