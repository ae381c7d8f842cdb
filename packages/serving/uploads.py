"""A drafter version that comes in pieces: bytes to a checkpoint directory, counted and hashed on the way."""

from __future__ import annotations

import hashlib
from pathlib import Path

from runtime.eagle3.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from runtime.errors import InvalidRequest

MAX_CONFIG_BYTES = 2**20


class Upload:
    """Takes all bytes of config.json and then of the weights. Blocking: for a thread."""

    def __init__(self, directory: Path, *, config_bytes: int, weights_bytes: int, sha256: str, max_bytes: int) -> None:
        for field, num_bytes, most in (
            ("config_bytes", config_bytes, MAX_CONFIG_BYTES),
            ("weights_bytes", weights_bytes, max_bytes),
        ):
            if not 0 < num_bytes <= most:
                raise InvalidRequest(f"upload.{field}", f"{field} must lie in 1..{most}, got {num_bytes}.")
        self.directory = directory
        self._config_bytes = config_bytes
        self._num_bytes = config_bytes + weights_bytes
        self._sha256 = sha256.lower()
        self._hash = hashlib.sha256()
        self._taken = 0

    def write(self, chunk: bytes) -> None:
        if self._taken + len(chunk) > self._num_bytes:
            raise InvalidRequest("chunk", f"More bytes came than the {self._num_bytes} that upload announced.")
        in_config = max(0, min(len(chunk), self._config_bytes - self._taken))
        for name, part in ((CONFIG_FILE, chunk[:in_config]), (WEIGHTS_FILE, chunk[in_config:])):
            if part:
                with (self.directory / name).open("ab") as file:
                    file.write(part)
        self._hash.update(chunk)
        self._taken += len(chunk)

    def finish(self) -> None:
        """InvalidRequest unless everything came, and came whole."""
        if self._taken < self._num_bytes:
            raise InvalidRequest("chunk", f"The stream ended after {self._taken} of {self._num_bytes} bytes; send it again.")
        if self._hash.hexdigest() != self._sha256:
            raise InvalidRequest("upload.sha256", f"The bytes that came hash to {self._hash.hexdigest()}; send them again.")
