"""The door between the command line and a program: Hydra composes, plain dataclasses come out.

A program calls `main("serving", ServingConfig, run)`. Hydra reads `configs/serving.yaml` and its groups, applies the
overrides of the command line and checks names and types against the dataclasses, whose defaults are the only defaults.
Every configuration is complete and checked before the first `run` starts. What cannot be taken is told in one sentence on
stderr, with exit code 2. Hydra itself writes no files, changes no directory and configures no logging. This module does not
know what any setting means.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException, ValidationError

from runtime.errors import ConfigError, SlipstreamError
from runtime.files import write_atomic

Config = TypeVar("Config")

CONFIG_DIR = Path(__file__).parent / "configs"
USAGE_ERROR = 2
HELP = """${hydra.help.header}
== Groups ==
Each setting that is not given has the value of its group's option (group=option).

GROUPS

== Settings ==
Override any of them (setting=value).

$CONFIG
${hydra.help.footer}
"""

EARLIER_STARTS = 32  # of a run, that its provenance keeps
_KEY_PACKAGES = ("slipstream", "torch", "transformers", "tokenizers", "safetensors", "numpy", "grpcio", "hydra-core")
_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclasses.dataclass(frozen=True)
class Job(Generic[Config]):
    """One configuration of a --multirun, and the overrides of the command line that it was composed with."""

    config: Config
    overrides: tuple[str, ...]


def main(
    config_name: str,
    schema: type[Config],
    run: Callable[[Config], int],
    sweep: Callable[[Sequence[Job[Config]]], int] | None = None,
) -> None:
    """Compose `configs/<config_name>.yaml` with the command line and exit with what `run` returns for the result.

    With --multirun, `sweep` is given all of them; without one, `run` is called for one after the other and the first exit
    code that is not 0 is kept. Both should import torch, not their modules: idle OpenMP threads are told to sleep before torch
    starts them. Spinning, they take a core each from the other program on the machine: two such processes on two cores slow
    each other tenfold and more.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    composed: list[tuple[DictConfig, tuple[str, ...], bool]] = []

    def take(config: DictConfig) -> None:
        job = HydraConfig.get()
        given = typing.cast(list[str], OmegaConf.to_container(job.overrides.task, resolve=False))  # as they were written
        composed.append((config, tuple(given), job.mode is RunMode.MULTIRUN))

    try:
        with _quiet_hydra(config_name, schema), _short_usage(), _multirun_anywhere():
            hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=config_name)(take)()
        jobs = [Job(_checked(one, schema), overrides) for one, overrides, _ in composed]
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        print(f"slipstream: {explain(error, schema)}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    if sweep is not None and any(is_multirun for _, _, is_multirun in composed):
        sys.exit(sweep(jobs))
    codes = [told(run, job.config) for job in jobs]
    sys.exit(next((code for code in codes if code), 0))


def _checked(composed: DictConfig, schema: type[Config]) -> Config:
    """The dataclasses of a composed configuration. Hydra lets `+setting=value` add what no dataclass knows; we do not."""
    settings = known_settings(schema)
    for name in _names(composed, settings):
        if name not in settings:
            raise ConfigError(_no_such_setting(name, settings))
    return typing.cast(Config, OmegaConf.to_object(composed))


def _names(node: DictConfig, settings: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key in node:
        name = prefix + str(key)
        yield name
        child = node._get_node(key)
        if isinstance(child, DictConfig) and dataclasses.is_dataclass(settings.get(name)):
            yield from _names(child, settings, prefix=f"{name}.")


def told(run: Callable[[Config], int], configuration: Config) -> int:
    """The exit status of a run; what it refuses is told on stderr."""
    try:
        return run(configuration)
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError) else 1


@contextmanager
def _quiet_hydra(config_name: str, schema: type) -> Iterator[None]:
    """Register the schema and hydra's own settings; let its exceptions through instead of printing them."""
    store = ConfigStore.instance()
    store.store(name="base_schema", node=schema, provider="slipstream")
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    with tempfile.TemporaryDirectory(prefix="slipstream-sweep-") as scratch:  # hydra insists on a multirun.yaml
        store.store(name="door", node=_hydra_settings(config_name, schema, scratch), package="hydra", provider="slipstream")
        os.environ["HYDRA_FULL_ERROR"] = "1"
        try:
            yield
        finally:
            if full_error is None:
                del os.environ["HYDRA_FULL_ERROR"]
            else:
                os.environ["HYDRA_FULL_ERROR"] = full_error


@contextmanager
def _multirun_anywhere() -> Iterator[None]:
    """argparse takes a flag before all settings or behind them, not between them."""
    given = sys.argv
    flags = [each for each in given[1:] if each in ("--multirun", "-m")]
    sys.argv = [given[0], *flags, *(each for each in given[1:] if each not in flags)]
    try:
        yield
    finally:
        sys.argv = given


@contextmanager
def _short_usage() -> Iterator[None]:
    """argparse answers a flag that it does not know with hydra's whole usage; its last line is enough."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            yield
    except SystemExit as refusal:
        if refusal.code == USAGE_ERROR:
            why = said.getvalue().rstrip().rpartition("error: ")[2]
            said = io.StringIO(f"slipstream: {why}; settings are written setting=value, and --help lists them.\n")
        raise
    finally:
        sys.stderr.write(said.getvalue())


def _hydra_settings(config_name: str, schema: type, scratch: str) -> dict[str, Any]:
    silent = {"root": None, "disable_existing_loggers": False}
    return {
        "output_subdir": None,
        "run": {"dir": "."},
        "sweep": {"dir": scratch, "subdir": "."},
        "job": {"name": config_name, "chdir": False},
        "job_logging": silent,
        "hydra_logging": silent,
        "help": {
            "app_name": f"python -m {config_name}",
            "header": f"python -m {config_name} [group=option ...] [setting=value ...]\n",
            "template": HELP.replace("GROUPS", _groups(schema)),
            "footer": "Flags: --help, --cfg job, --info, --multirun (a=1,2 runs both); --hydra-help lists all of them.",
        },
    }


def _groups(schema: type) -> str:
    """The groups of this program with their options; the directory has those of the other one too."""
    lines = []
    for group in sorted(field.name for field in dataclasses.fields(schema)):
        if options := sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml")):
            lines.append(f"{group}: {', '.join(options)}")
    return "\n".join(lines)


# --- one sentence for each way in which a configuration can be wrong ---


def explain(error: Exception, schema: type) -> str:
    """What was wrong, the value, and what to do, for any error that Hydra, OmegaConf or a range check raised."""
    if isinstance(error, SlipstreamError):
        return str(error)
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}; write setting=value, and quote values with special characters."
    if isinstance(error, MissingConfigException):
        return _missing_option(error, known_settings(schema))
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    settings = known_settings(schema)
    if isinstance(cause, InterpolationResolutionError):
        return f"{cause.full_key} cannot be resolved ({str(cause).splitlines()[0]}); write its value out."
    if isinstance(cause, MissingMandatoryValue):
        return f"{cause.full_key} has no value; give one with {cause.full_key}=..."
    if isinstance(cause, ValidationError) and cause.full_key in settings:
        return _wrong_type(cause, str(error), settings[cause.full_key])
    text = " ".join(str(error).split())
    if text.startswith("Ambiguous value"):
        return f"{_quoted(text)!r} names several values; add --multirun to run each, or write a list as [a,b]."
    if text.startswith("Could not append"):
        return f"{_quoted(text)} is a setting already; write it without '+'."
    unknown = _unknown_key(error, cause)
    if unknown in settings and text.startswith("Error merging override ~"):
        return f"{unknown} cannot be removed; give it another value."
    if unknown in settings:
        unknown = getattr(cause, "full_key", None)
    if unknown is not None and unknown not in settings:
        return _no_such_setting(unknown, settings)
    return f"the configuration cannot be composed: {text.rstrip('.')}; --help lists groups and settings."


def _no_such_setting(name: str, settings: dict[str, Any]) -> str:
    group, _, last = name.rpartition(".")
    beside = [known for known in settings if group and known.rpartition(".")[0] == group]
    near = [known for known in beside if last in known.removeprefix(f"{group}.").split("_")]  # one word of its name
    near = near or difflib.get_close_matches(name, settings, n=1, cutoff=0.6)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "--help lists the settings."
    return f"there is no setting {name!r}; {hint}"


def _missing_option(error: MissingConfigException, settings: dict[str, Any]) -> str:
    wanted = error.missing_cfg_file or ""
    group, _, option = wanted.partition("/")  # an option that is a path has more of them
    if not option:
        return f"there is no configuration {wanted!r} in {CONFIG_DIR}."
    sentence = f"{group}={option} does not exist; {group} may be {', '.join(error.options or ['nothing yet'])}"
    places = [name for name in (f"{group}.name", f"{group}.path") if "/" in option and name in settings]
    return f"{sentence}, or write {places[0]}={option}." if places else f"{sentence}."


def _wrong_type(cause: ValidationError, text: str, hint: Any) -> str:
    found = re.search(r"[Vv]alue '(.*?)'", str(cause)) or re.search(r"=(.*)", text)
    value = repr(found.group(1)) if found else "not usable"
    if "not Optional" in str(cause) or "is not optional" in str(cause):
        value = "null"
    group = str(cause.full_key).partition(".")[0]
    is_option = found is not None and (CONFIG_DIR / group / f"{found.group(1).lower()}.yaml").is_file()
    option = f", or write {group}={found.group(1).lower()}" if found is not None and is_option else ""
    return f"{cause.full_key} is {value}; it must be {_words(hint)}{option}."


def _unknown_key(error: Exception, cause: BaseException) -> str | None:
    """The dotted name that nothing matched, as the user wrote it where hydra tells it."""
    if isinstance(cause, ValidationError):
        return None
    for pattern in (
        r"Could not override '([^'@]+)",
        r"Error merging override [+~]*([^=\s]+)",
        r"Could not delete from config. '(\S+)'",
    ):
        found = re.search(pattern, str(error))
        if found:
            return found.group(1)
    full_key = getattr(cause, "full_key", None)
    return str(full_key) if full_key else None


def _quoted(text: str) -> str:
    found = re.search(r"'(.*?)'", text)
    return found.group(1) if found else text


def _words(hint: Any) -> str:
    """A type hint in words."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [_words(part) for part in typing.get_args(hint) if part is not type(None)]
        return " or ".join([*parts, "null"] if type(None) in typing.get_args(hint) else parts)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(str(member.value) for member in hint)}"
    if dataclasses.is_dataclass(hint):
        return "a group of settings"
    return _TYPE_WORDS.get(hint, "a list" if typing.get_origin(hint) in (list, tuple) else str(hint))


def known_settings(schema: type, prefix: str = "") -> dict[str, Any]:
    """Every dotted name of a nested dataclass with its type hint, groups included."""
    hints = typing.get_type_hints(schema)
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(schema):
        name, hint = prefix + field.name, hints[field.name]
        settings[name] = hint
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            settings |= known_settings(hint, prefix=f"{name}.")
    return settings


# --- what a run leaves behind about itself ---


def provenance(run_dir: Path, config: Any) -> Path:
    """Write `provenance.json` (versions, argv, commit, machine) and `config.yaml` (every setting, resolved) into `run_dir`.

    What earlier starts of the same run wrote there is kept, under `earlier`.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    record: dict[str, Any] = {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "git": _checkout_commit(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in _KEY_PACKAGES},
        "config": "config.yaml",
    }
    path = run_dir / "provenance.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        record["earlier"] = [*before.pop("earlier", []), before][-EARLIER_STARTS:]
    write_atomic(path, (json.dumps(record, indent=2) + "\n").encode())
    return path


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _checkout_commit(root: Path) -> str | None:
    """The commit of the checkout we run from, with "-dirty" if files differ from it; None when installed from a wheel."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
