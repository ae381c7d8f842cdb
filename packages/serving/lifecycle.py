"""The life of drafter versions in a server: watch the registry, validate, activate at a step boundary, go back.

A version that fails validation is marked rejected with its reason and never loaded; whatever fails, the drafter that serves
goes on serving. One version at a time. The registry's pointer is shared: another server, or a tool, may move it, and this
server follows. Knows no transport; everything here may take a while and belongs off the event loop.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from runtime.config import RegistryConfig
from runtime.drafters.base import Drafter
from runtime.eagle3.reasons import RejectReason, rejected
from runtime.engine.base import Engine
from runtime.errors import DrafterNotFound, DrafterRejected, EngineUnavailable
from runtime.registry import DrafterEntry, LifecycleEvent, Origin, Registry, VersionRecord, VersionState
from serving.divergence import AcceptanceWatch

log = logging.getLogger(__name__)

WORSE = (VersionState.ROLLED_BACK, VersionState.REJECTED)  # to which nobody goes back but by name
MAX_HISTORY = 256

LoadDrafter = Callable[[VersionRecord], Drafter]  # validates; DrafterRejected if it must not be served


class Lifecycle:
    def __init__(
        self,
        engine: Engine,
        registry: Registry,
        load: LoadDrafter,
        config: RegistryConfig,
        *,
        watch: AcceptanceWatch | None = None,
        may_activate: bool = True,  # False: this server was told not to draft; versions are validated only
        embedded_version: str | None = None,
        on_swap: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._load = load
        self._config = config
        self.acceptance = watch or AcceptanceWatch(config, has_chains_only=False)
        self._may_activate = may_activate
        self._embedded_version = embedded_version
        self._on_swap = on_swap
        self._pointer = registry.active()
        self._counted_version, self._promised = "", dict[str, float]()  # what the active version's manifest says
        self._history: deque[LifecycleEvent] = deque(maxlen=MAX_HISTORY)
        self._counts: Counter[str] = Counter()
        self._listeners: list[Callable[[LifecycleEvent], None]] = []
        self._noting = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="drafter-lifecycle", daemon=True)

    # --- for the surfaces ---

    @property
    def active_version(self) -> str:
        return self._engine.drafter_version

    def history(self) -> list[LifecycleEvent]:
        """The latest events, oldest first."""
        return list(self._history)

    def counts(self) -> dict[str, int]:
        """Events since start, by kind."""
        return dict(self._counts)

    def entries(self) -> list[DrafterEntry]:
        return [self._entry(record) for record in self._registry.versions()]

    def entry(self, version: str) -> DrafterEntry:
        """DrafterRejected(UNKNOWN_VERSION) if it is not here."""
        return self._entry(self._registry.get(version))

    def checkpoint(self, version: str) -> tuple[Path, Origin]:
        """A version's directory and what its publisher said of it. DrafterRejected if it is not here, or damaged."""
        record = self._registry.get(version)
        manifest = record.manifest
        if manifest is None:
            code, _, sentence = record.reason.partition(": ")
            raise DrafterRejected(code, f"Version {version} cannot be read: {sentence}")
        said = (manifest.parent, manifest.step, manifest.target_fingerprint, manifest.metrics, manifest.notes)
        return record.path, Origin(*said)

    def listen(self, listener: Callable[[LifecycleEvent], None]) -> tuple[list[LifecycleEvent], Callable[[], None]]:
        """Call `listener`, on any thread, with each event from now on; returns those before, and what ends it."""
        with self._noting:
            self._listeners.append(listener)
            return list(self._history), lambda: self._listeners.remove(listener)

    def stage(self, checkpoint_dir: Path, origin: Origin) -> DrafterEntry:
        """Copy a checkpoint into the registry. DrafterRejected if it is none."""
        version = self._registry.publish(
            checkpoint_dir,
            parent=origin.parent,
            step=origin.step,
            target_fingerprint=origin.target_fingerprint or self._engine.info.fingerprint,
            metrics=origin.metrics,
            notes=origin.notes,
        )
        return self.entry(version)

    def stage_again(self, version: str) -> DrafterEntry:
        """Have a version that is here looked at as if it were new; the active one stays as it is."""
        with self._one_at_a_time:
            if self._registry.get(version).state is not VersionState.ACTIVE:
                self._registry.set_state(version, VersionState.STAGED)
        return self.entry(version)

    def validate(self, version: str) -> DrafterEntry:
        """Check a version as activating it does, and leave it at that. DrafterRejected says why it must not serve."""
        with self._one_at_a_time:
            record = self._sound(version)
            self._validated(record)
            if record.state is VersionState.STAGED:
                self._registry.set_state(version, VersionState.VALIDATED)
                self._note(LifecycleEvent("validated", version))
        return self.entry(version)

    def load(self, version: str) -> None:
        """Let sessions be pinned to a version. DrafterNotFound, or DrafterRejected that says why it must not serve."""
        with self._one_at_a_time:
            try:
                record = self._sound(version)
            except DrafterRejected as error:
                if error.reason == RejectReason.UNKNOWN_VERSION:
                    raise DrafterNotFound(version) from error
                raise
            self._engine.add_drafter(self._validated(record))

    def activate(self, version: str) -> LifecycleEvent:
        """Make any sound version of the registry the one that serves, forward or back. Blocks until it does.

        DrafterRejected (UNKNOWN_VERSION, or why it must not serve), EngineUnavailable: on any of them nothing has changed.
        """
        with self._one_at_a_time:
            return self._activate(version)

    def rollback(self, reason: str) -> LifecycleEvent:
        """Go back to the version that served before the active one, past those that were rolled back themselves, and mark the
        active one as rolled back; returns the activation.

        DrafterRejected(UNKNOWN_VERSION) if there is none to go back to.
        """
        with self._one_at_a_time:
            worse = self._engine.drafter_version
            event = self._activate(self._version_before(worse))
            self._registry.set_state(worse, VersionState.ROLLED_BACK, f"ROLLED_BACK: {reason or 'an operator went back'}")
            self._note(LifecycleEvent("rolled_back", worse, message=reason or None))
            return event

    def _version_before(self, version: str) -> str:
        """The one that this server ran before it; after a restart, the one that it was trained from. None that did worse."""
        records = {record.version: record for record in self._registry.versions()}
        manifest = records[version].manifest if version in records else None
        served = [e.previous for e in reversed(self._history) if e.kind == "activated" and e.version == version]
        for before in (*served, manifest and manifest.parent):
            if before in records and before != version and records[before].state not in WORSE:
                return str(before)
        raise rejected(
            RejectReason.UNKNOWN_VERSION, f"No version of the registry served before {version}; activate the one that should."
        )

    def _activate(self, version: str) -> LifecycleEvent:
        if not self._engine.is_running:
            raise EngineUnavailable("The engine is not running; no drafter can be activated.")
        record = self._sound(version)
        if version == self._engine.drafter_version:
            return LifecycleEvent("activated", version, previous=version, seconds=0.0)
        return self._switch(version, self._validated(record))

    def _sound(self, version: str) -> VersionRecord:
        record = self._registry.get(version)
        if record.state is VersionState.REJECTED:
            code, _, message = record.reason.partition(": ")
            raise DrafterRejected(code, f"Drafter {version} was rejected: {message or code}")
        return record

    # --- the watcher ---

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(self._config.poll_s):
            try:
                self.poll()
                self._look_at_acceptance()
            except EngineUnavailable:
                log.info("The engine is down; the registry is not watched any more.")
                return
            except Exception:  # whatever others do to the registry, this server goes on watching it
                log.exception("The registry could not be read; trying again in %g s.", self._config.poll_s)

    def poll(self) -> None:
        """Look at the registry once: take up what is staged, and follow the pointer if somebody else moved it."""
        with self._one_at_a_time:
            for record in self._registry.versions():
                if record.state is VersionState.STAGED and not self._stopping.is_set():
                    self._take_up(record.version)
            self._follow_pointer()

    def _look_at_acceptance(self) -> None:
        stats = self._engine.stats()
        version = stats.drafter_version
        counted = stats.speculation.get(version)
        if counted is None:
            return
        if version != self._counted_version:
            records = {record.version: record.manifest for record in self._registry.versions()}
            manifest = records.get(version)
            self._counted_version, self._promised = version, dict(manifest.metrics) if manifest is not None else {}
        self.acceptance.look(version, self._promised, counted)

    def _take_up(self, version: str) -> None:
        record = self._registry.get(version)
        if record.state is not VersionState.STAGED:
            return  # since the list was made, another server has taken it up, and perhaps gone on to the next
        try:
            drafter = self._validated(record)
        except DrafterRejected:
            return
        self._registry.set_state(record.version, VersionState.VALIDATED)
        self._note(LifecycleEvent("validated", record.version))
        if self._may_activate and self._config.auto_activate:
            self._switch(record.version, drafter)

    def _follow_pointer(self) -> None:
        pointer = self._registry.active()
        if pointer == self._pointer:
            return
        self._pointer = pointer  # whatever comes of it, once is enough
        if pointer is None or not self._may_activate or pointer == self._engine.drafter_version:
            return
        record = self._registry.get(pointer)
        try:
            drafter = self._load(record)
        except DrafterRejected as error:
            self._note(LifecycleEvent("failed", pointer, reason=error.reason, message=error.message))
            return
        self._switch(pointer, drafter)

    # --- steps of both ---

    def _validated(self, record: VersionRecord) -> Drafter:
        """The drafter, loaded and probed. What fails is marked rejected, so nobody tries it again; only what a server of another
        model found sound stays as that one left it."""
        try:
            return self._load(record)
        except DrafterRejected as error:
            if error.reason == RejectReason.TARGET_FINGERPRINT and record.state is not VersionState.STAGED:
                self._note(LifecycleEvent("failed", record.version, reason=error.reason, message=error.message))
                raise
            self._registry.set_state(record.version, VersionState.REJECTED, f"{error.reason}: {error.message}")
            self._note(LifecycleEvent("rejected", record.version, reason=error.reason, message=error.message))
            raise

    def _switch(self, version: str, drafter: Drafter) -> LifecycleEvent:
        """The pointer first: where it cannot be moved (a full disk), the old drafter serves on, here and after a restart."""
        previous = self._engine.drafter_version
        self._registry.activate(version)
        self._pointer = version
        seconds = self._engine.swap_drafter(drafter)
        self._on_swap(seconds)
        event = LifecycleEvent("activated", version, previous=previous, seconds=seconds)
        self._note(event)
        return event

    def _note(self, event: LifecycleEvent) -> None:
        with self._noting:
            self._history.append(event)
            self._counts[event.kind] += 1
            listeners = list(self._listeners)
        for listener in listeners:
            listener(event)
        log.info("Drafter %s: %s%s", event.version, event.kind, f" ({event.reason}: {event.message})" if event.reason else "")

    def _entry(self, record: VersionRecord) -> DrafterEntry:
        manifest = record.manifest
        return DrafterEntry(
            version=record.version,
            state=record.state,
            reason=record.reason,
            is_active=record.version == self._engine.drafter_version,
            is_embedded=record.version == self._embedded_version,
            parent=manifest.parent if manifest else None,
            step=manifest.step if manifest else None,
            metrics=manifest.metrics if manifest else {},
            created_at=manifest.created_at if manifest else None,
        )
