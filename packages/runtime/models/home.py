"""Where this program keeps what it makes for itself: converted models, fingerprints, default state.

The only place that reads SLIPSTREAM_HOME. Knows no file inside that directory.
"""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """SLIPSTREAM_HOME, or ~/.cache/slipstream. Not created here."""
    configured = os.environ.get("SLIPSTREAM_HOME", "").strip()
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".cache" / "slipstream"
