"""Models: from a name to a directory on disk, its fingerprint and its tokenizer."""

from runtime.models.fingerprint import fingerprint
from runtime.models.home import absolute, home
from runtime.models.resolve import ResolvedModel, resolve
from runtime.models.tiny import make_tiny
from runtime.models.tokenizer import StreamDecoder, Tokenizer

__all__ = ["ResolvedModel", "StreamDecoder", "Tokenizer", "absolute", "fingerprint", "home", "make_tiny", "resolve"]
