"""What the command lines of benchmarks share: defaults in the help, values refused in one sentence, directories of runs."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool | list) or action.default is argparse.SUPPRESS:
            return action.help
        return f"{action.help or ''} (%(default)s)".lstrip()


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """One whose help is a module's text, as it stands there, and tells the default of each option."""
    return argparse.ArgumentParser(description=text, formatter_class=_Help)


def positive(text: str) -> int:
    """The type of an option that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of things; give a whole number from 1 on")
    return int(text)


def seconds(text: str) -> float:
    """The type of an option that is a time, in any unit."""
    try:
        if 0 < (value := float(text)) < float("inf"):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no time; give a number above 0")


def fresh_directory(path: Path, mark: str) -> None:
    """Makes `path` an empty directory; what an earlier run left there, which is known by its file `mark`, goes.

    SystemExit, and nothing is touched, if something else is there.
    """
    if path.is_dir() and any(path.iterdir()):
        if not (path / mark).is_file():
            raise SystemExit(f"--out is '{path}', which holds other things than a run; name an empty directory, or a new one.")
        shutil.rmtree(path)
    elif path.exists() and not path.is_dir():
        raise SystemExit(f"--out is '{path}', which is a file; name an empty directory, or a new one.")
    path.mkdir(parents=True, exist_ok=True)
