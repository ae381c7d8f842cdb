"""A session on disk: a directory with session.json and one safetensors file of K/V and kept features.

session.json says everything but the tensors, and names their file and its hash; it is written last and replaced at once, so a
directory holds the old session or the new one, never a mixture. Of several saves into one directory each waits for the one
before it, and the last one stays, whole. Knows no target: what its tensors mean is the target's to say.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from runtime.errors import InvalidRequest, SavedSessionRejected
from runtime.files import dump_json, locked, write_atomic
from runtime.hidden_states import HiddenStates
from runtime.tensors import to_bytes
from runtime.types import CachePolicy, DrafterPolicy, SessionOptions, Switch, check_token_ids

FORMAT = 1
RECORD = "session.json"
LOCK = ".lock"  # held while a session is written here
KV_PREFIX = "kv."
AUX, LAST = "features.aux", "features.last"


@dataclass(frozen=True)
class SavedSession:
    history: list[int]
    options: SessionOptions
    target_fingerprint: str
    tokenizer_hash: str
    cached: int = 0  # tokens that `kv` covers
    kv: Mapping[str, torch.Tensor] = field(default_factory=dict)  # as Target.save gave it; empty: nothing is cached
    features: HiddenStates | None = None  # the last rows of history[:cached]


def write(directory: Path, saved: SavedSession) -> None:
    """Make this directory hold the session, after those that are being written there. OSError if it cannot be written; what
    it held before is then unharmed."""
    tensors = {KV_PREFIX + name: tensor for name, tensor in saved.kv.items()}
    if saved.features is not None:
        tensors |= {AUX: saved.features.aux.cpu().contiguous(), LAST: saved.features.last.cpu().contiguous()}
    data = to_bytes(tensors)
    digest = hashlib.sha256(data).hexdigest()
    name = f"tensors-{digest[:16]}.safetensors"
    record = {
        "format": FORMAT,
        "history": saved.history,
        "options": _options_record(saved.options),
        "target_fingerprint": saved.target_fingerprint,
        "tokenizer_hash": saved.tokenizer_hash,
        "cached": saved.cached,
        "tensors": name,
        "tensors_sha256": digest,
    }
    with locked(directory / LOCK):
        write_atomic(directory / name, data)
        write_atomic(directory / RECORD, dump_json(record))
        for old in directory.glob("tensors-*.safetensors"):
            if old.name != name:
                old.unlink()


def read(directory: Path, *, target_fingerprint: str, tokenizer_hash: str, vocab_size: int) -> SavedSession:
    """The session that `write` put there. SavedSessionRejected if there is none, if it is damaged, or another model's."""
    while True:
        record = _read_record(directory)
        try:
            return _read(directory, record, target_fingerprint, tokenizer_hash, vocab_size)
        except SavedSessionRejected:
            if _read_record(directory) == record:
                raise  # else another one was saved here meanwhile, and took the tensors of this one away


def _read(
    directory: Path, record: Mapping[str, Any], target_fingerprint: str, tokenizer_hash: str, vocab_size: int
) -> SavedSession:
    try:
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']} is not {FORMAT}, the one known here")
        saved_tokenizer, saved_target = _text(record["tokenizer_hash"]), _text(record["target_fingerprint"])
        history, cached = _ids(record["history"]), record["cached"]
        check_token_ids(history, vocab_size, param="history")
        if type(cached) is not int or not 0 <= cached <= len(history):
            raise ValueError(f"cached is {cached!r} with a history of {len(history)} tokens")
        name, digest = _text(record["tensors"]), _text(record["tensors_sha256"])
        if Path(name).name != name:
            raise ValueError(f"the tensors are said to lie in {name!r}")
        options = _options(record["options"])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, SavedSessionRejected):
            raise
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise _unreadable(directory, what) from error
    if saved_tokenizer != tokenizer_hash:
        raise SavedSessionRejected(
            "SAVED_OTHER_TOKENIZER", f"The session in {directory.name} speaks another tokenizer's ids; append its text anew."
        )
    if saved_target != target_fingerprint:
        raise SavedSessionRejected(
            "SAVED_OTHER_TARGET",
            f"The session in {directory.name} belongs to target {saved_target}, this one is {target_fingerprint}; "
            "serve that model, or append the history to a new session.",
        )
    kv, features = _read_tensors(directory, directory / name, digest)
    return SavedSession(history, options, saved_target, saved_tokenizer, cached if kv else 0, kv, features)


def _read_record(directory: Path) -> dict[str, Any]:
    try:
        record = json.loads((directory / RECORD).read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SavedSessionRejected(
            "SAVED_NOT_FOUND", f"There is no saved session {directory.name!r} here; save one under this name first."
        ) from error
    except OSError as error:
        raise _unreadable(directory, f"{RECORD}: {error.strerror}") from error
    except ValueError as error:
        raise _unreadable(directory, f"{RECORD}: {error}") from error
    if not isinstance(record, dict):
        raise _unreadable(directory, f"{RECORD} is no object")
    return record


def _read_tensors(directory: Path, path: Path, digest: str) -> tuple[dict[str, torch.Tensor], HiddenStates | None]:
    try:
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise _unreadable(directory, f"{path.name} is not what was written")
        tensors = load(data)
    except OSError as error:
        raise _unreadable(directory, f"{path.name}: {error.strerror}") from error
    except SafetensorError as error:
        raise _unreadable(directory, f"{path.name}: {error}") from error
    kv = {name.removeprefix(KV_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(KV_PREFIX)}
    features = HiddenStates(tensors[AUX], tensors[LAST]) if AUX in tensors and LAST in tensors else None
    return kv, features


def _unreadable(directory: Path, what: str) -> SavedSessionRejected:
    return SavedSessionRejected("SAVED_UNREADABLE", f"The saved session {directory.name!r} is damaged ({what}); save it again.")


# --- options as JSON ---


def _options_record(options: SessionOptions) -> dict[str, Any]:
    return {
        "client_label": options.client_label,
        "ttl_s": options.ttl_s,
        "eos_token_ids": options.eos_token_ids,
        "stop_token_ids": options.stop_token_ids,
        "capture": options.capture.value,
        "cache_policy": {"sink": options.cache_policy.sink, "window": options.cache_policy.window},
        "drafter_policy": {"kind": options.drafter_policy.kind, "version": options.drafter_policy.version},
        "labels": dict(options.labels),
    }


def _options(record: Mapping[str, Any]) -> SessionOptions:
    """KeyError, TypeError or ValueError for what `_options_record` does not write."""
    drafter_policy = DrafterPolicy(**record["drafter_policy"])
    if drafter_policy.kind not in ("follow_active", "pinned", "off"):
        raise ValueError(f"drafter_policy is {drafter_policy.kind!r}")
    drafter_policy.check()
    eos_token_ids, ttl_s, labels = record["eos_token_ids"], record["ttl_s"], record["labels"]
    if ttl_s is not None and not isinstance(ttl_s, int | float):
        raise ValueError(f"ttl_s is {ttl_s!r}")
    if not isinstance(labels, dict):
        raise ValueError(f"labels are {labels!r}")
    return SessionOptions(
        client_label=_text(record["client_label"]),
        ttl_s=ttl_s,
        eos_token_ids=None if eos_token_ids is None else tuple(_ids(eos_token_ids)),
        stop_token_ids=tuple(_ids(record["stop_token_ids"])),
        capture=Switch(record["capture"]),
        cache_policy=_cache_policy(record["cache_policy"]),
        drafter_policy=drafter_policy,
        labels=MappingProxyType({_text(name): _text(value) for name, value in labels.items()}),
    )


def _cache_policy(record: Mapping[str, Any]) -> CachePolicy:
    try:
        policy = CachePolicy(**record)
        if type(policy.sink) is not int or not (policy.window is None or type(policy.window) is int):
            raise TypeError(f"sink is {policy.sink!r} and window {policy.window!r}")
        policy.check()
    except (TypeError, InvalidRequest) as error:
        raise SavedSessionRejected(
            "SAVED_OTHER_CACHE_POLICY", f"The saved session's cache policy {record!r} is not known here ({error})."
        ) from error
    return policy


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise ValueError("token ids are not a list of whole numbers")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value
