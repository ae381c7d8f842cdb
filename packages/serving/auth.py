"""Who may call: the server's keys, for both surfaces. Knows no transport.

A keys file (YAML or JSON, `auth.keys_file`) is a list of keys, each as it is or as the SHA-256 of it:

    - {name: ann, key: "..."}                                      # may use sessions and /v1
    - {name: trainer, sha256: "...", admin: true}                  # also drafter versions and training rows
    - {name: clinic, key: "...", capture: "off"}                   # nothing of its sessions becomes a training row

Keys say who may call; they do not keep one caller's sessions from another's. Without a keys file everybody may do everything.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from runtime.errors import ConfigError, PermissionDenied, Unauthenticated
from runtime.types import SessionInfo, SessionOptions, Switch

MIN_KEY_CHARS = 16
_FIELDS = {"name": str, "key": str, "sha256": str, "admin": bool, "capture": str}


@dataclass(frozen=True)
class Key:
    """What the caller that has this key may do."""

    name: str
    sha256: bytes
    is_admin: bool = False
    may_capture: bool = True  # whether sessions of this caller may become training rows

    def consent(self, options: SessionOptions) -> SessionOptions:
        """The options of a session that this caller makes."""
        return options if self.may_capture else replace(options, capture=Switch.OFF)

    def check_may_use(self, session: SessionInfo) -> None:
        """PermissionDenied if what this caller says in the session could become a training row against its will."""
        if not self.may_capture and session.options.capture is not Switch.OFF:
            raise PermissionDenied(
                f"The key {self.name!r} has capture: off, and session {session.session_id!r} may be captured; "
                "use a session that was made with this key."
            )


EVERYBODY = Key("", b"", is_admin=True)


class Keys:
    """The keys of a server; `None` in their place means that there are none, and everybody may do everything."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @staticmethod
    def load(path: Path) -> Keys:
        """ConfigError says what is wrong with the file, and never shows a key."""
        try:
            entries = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"auth.keys_file {path} cannot be read ({error.strerror}); give a file, or null.") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"auth.keys_file {path} is neither YAML nor JSON; write a list of keys.") from error
        if not isinstance(entries, list) or not entries:
            raise ConfigError(f"auth.keys_file {path} must hold a list of at least one key, such as [{{name: ann, key: ...}}].")
        keys = [_key(entry, f"auth.keys_file {path}: entry {number}") for number, entry in enumerate(entries, 1)]
        for what, values in (("name", [key.name for key in keys]), ("key", [key.sha256 for key in keys])):
            if max(Counter(values).values()) > 1:
                raise ConfigError(f"auth.keys_file {path} has the same {what} twice; each must be unique.")
        return Keys(keys)

    def find(self, authorization: str | None) -> Key:
        """The key of a header `Bearer KEY`; Unauthenticated without one, or with one that is not ours.

        Every key is compared, each in constant time: how long it takes tells nothing about them.
        """
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise Unauthenticated("This server wants a key; send it as `authorization: Bearer KEY`.")
        digest = hashlib.sha256(given.strip().encode()).digest()
        found = [key for key in self._keys if hmac.compare_digest(key.sha256, digest)]
        if not found:
            raise Unauthenticated("This key is not one of the server's; ask its operator for one.")
        return found[0]


def authorize(keys: Keys | None, authorization: str | None, *, needs_admin: bool) -> Key:
    """The caller, or Unauthenticated or PermissionDenied."""
    key = EVERYBODY if keys is None else keys.find(authorization)
    if needs_admin and not key.is_admin:
        raise PermissionDenied(f"The key {key.name!r} is not marked `admin`, which this call needs.")
    return key


def _key(entry: Any, where: str) -> Key:
    if not isinstance(entry, dict) or not entry.keys() <= _FIELDS.keys():
        raise ConfigError(f"{where} must have name, key or sha256, and perhaps admin and capture; nothing else.")
    for name, value in entry.items():
        if not isinstance(value, _FIELDS[name]):
            raise ConfigError(f"{where}: {name} must be {'true or false' if _FIELDS[name] is bool else 'text, in quotes'}.")
    if not entry.get("name"):
        raise ConfigError(f"{where} has no name; give one, for the log.")
    if ("key" in entry) == ("sha256" in entry):
        raise ConfigError(f"{where} must have either key or sha256.")
    if entry.get("capture", "inherit") not in ("inherit", "off"):
        raise ConfigError(f'{where}: capture is {entry["capture"]!r}; it must be "inherit" or "off".')
    return Key(entry["name"], _digest(entry, where), entry.get("admin", False), entry.get("capture") != "off")


def _digest(entry: dict[str, str], where: str) -> bytes:
    if "key" in entry:
        if len(entry["key"]) < MIN_KEY_CHARS or entry["key"] != entry["key"].strip():
            raise ConfigError(f"{where}: a key has at least {MIN_KEY_CHARS} characters, and no blanks around them.")
        return hashlib.sha256(entry["key"].encode()).digest()
    if not re.fullmatch(r"[0-9a-fA-F]{64}", entry["sha256"]):
        raise ConfigError(f"{where}: sha256 must be 64 hexadecimal digits, as `printf %s KEY | sha256sum` prints them.")
    return bytes.fromhex(entry["sha256"])
