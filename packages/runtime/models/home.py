"""Where this program keeps what it makes for itself (converted models, fingerprints, default state); paths as users write them.

The only place that reads SLIPSTREAM_HOME. Knows no file inside that directory.
"""

from __future__ import annotations

import os
from pathlib import Path

from runtime.errors import ConfigError


def home() -> Path:
    """SLIPSTREAM_HOME, or ~/.cache/slipstream. Not created here."""
    configured = os.environ.get("SLIPSTREAM_HOME", "").strip()
    return absolute("SLIPSTREAM_HOME", configured or "~/.cache/slipstream")


def absolute(setting: str, path: str) -> Path:
    """The path that a user wrote as the value of a setting, `~` expanded, from here on the same in every directory."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # whose home?
        raise ConfigError(f"{setting} is {path!r}, and there is no such home directory; write the path out.") from error
