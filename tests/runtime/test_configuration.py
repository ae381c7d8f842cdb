"""The door: composition, one sentence for each refusal, several runs in order, nothing written, and what a run leaves behind."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from runtime import configuration
from runtime.config import (
    BackendConfig,
    CaptureConfig,
    DrafterConfig,
    DrafterKind,
    Dtype,
    FeaturesConfig,
    ModelConfig,
    RegistryConfig,
    SessionsConfig,
    SpeculationConfig,
)
from runtime.errors import ConfigError, ModelError
from serving.config import ServingConfig
from training.config import TrainingConfig

PRIMARY = """
defaults:
  - base_schema
  - door
  - model: smollm2-135m
  - backend: transformers
  - drafter: auto
  - speculation: adaptive
  - sessions: default
  - capture: all
  - features: local
  - registry: auto
  - _self_
"""


class Colour(Enum):
    RED = "red"


@dataclass
class Trial:
    model: ModelConfig = field(default_factory=ModelConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    state_dir: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    colour: Colour = Colour.RED


@dataclass
class Answer:
    code: int
    configs: list[Trial]
    stdout: str
    stderr: str


Door = Callable[..., Answer]


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Door:
    """Call the door as a program would, with these arguments, from an empty directory."""
    config_dir, cwd = tmp_path / "conf", tmp_path / "cwd"
    config_dir.mkdir()
    cwd.mkdir()
    (config_dir / "trial.yaml").write_text(PRIMARY)
    monkeypatch.chdir(cwd)

    def knock(*arguments: str, run: Callable[[Trial], int] = lambda config: 0) -> Answer:
        seen: list[Trial] = []

        def keep(config: Trial) -> int:
            seen.append(config)
            return run(config)

        monkeypatch.setattr(sys, "argv", ["trial", "--config-dir", str(config_dir), *arguments])
        with pytest.raises(SystemExit) as exit_:
            configuration.main("trial", Trial, keep)
        printed = capsys.readouterr()
        assert not list(cwd.iterdir()), "hydra left files behind"
        return Answer(int(exit_.value.code or 0), seen, printed.out, printed.err)

    return knock


def test_defaults_are_those_of_the_dataclasses(door: Door) -> None:
    answer = door()
    assert answer.configs == [Trial()]
    assert (answer.code, answer.stdout, answer.stderr) == (0, "", "")
    assert type(answer.configs[0].sessions) is SessionsConfig


def test_overrides_and_groups(door: Door) -> None:
    [config] = door("drafter=ngram", "model=tiny", "model.dtype=bfloat16", "sessions.ttl_s=5", "+labels.team=blue").configs
    assert config.drafter.kind is DrafterKind.NGRAM
    assert (config.model.name, config.model.dtype, config.sessions.ttl_s) == ("tiny", Dtype.BFLOAT16, 5.0)
    assert config.labels == {"team": "blue"}
    [by_name] = door("drafter.kind=NONE", "colour=RED").configs
    assert by_name.drafter.kind is DrafterKind.NONE


def groups() -> list[tuple[str, str]]:
    paths = sorted(configuration.CONFIG_DIR.glob("*/*.yaml"))
    known = configuration.known_settings(Trial)
    return [(path.parent.name, path.stem) for path in paths if path.parent.name in known]


@pytest.mark.parametrize(("group", "option"), groups())
def test_every_packaged_option_composes(door: Door, tmp_path: Path, group: str, option: str) -> None:
    needs = [f"drafter.path={tmp_path}"] if option == "eagle3" else []
    answer = door(f"{group}={option}", *needs)
    assert answer.code == 0, answer.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sessions.ttl=3"], "there is no setting 'sessions.ttl'; did you mean 'sessions.ttl_s'?"),
        (["regisry.poll=1"], "there is no setting 'regisry.poll'; did you mean 'registry.poll_s'?"),
        (["drafters=auto"], "there is no setting 'drafters'; did you mean 'drafter'?"),
        (["sessions.sessions=1"], "there is no setting 'sessions.sessions'; did you mean 'sessions.max_sessions' or 'sessions."),
        (["speculation.mode=tree"], "speculation.mode is 'tree'; it must be one of adaptive, fixed, or write speculation=tree."),
        (["+zzz=1"], "there is no setting 'zzz'; --help lists the settings."),
        (["+sessions.zzz=1"], "there is no setting 'sessions.zzz'; "),
        (["+sessions={zzz: 1}"], "there is no setting 'sessions.zzz'; "),
        (["drafter=foo"], "drafter=foo does not exist; drafter may be auto, eagle3, ngram, none."),
        (["model=/no/where"], "model=/no/where does not exist; model may be smollm2-135m, tiny, or write model.name=/no/where."),
        (["capture=/no/where"], "capture=/no/where does not exist; capture may be all, off."),
        (["--port", "9"], "unrecognized arguments: --port; settings are written setting=value, and --help lists them."),
        (["--cfg", "jop"], "argument --cfg/-c: invalid choice: 'jop' "),
        (["sessions.max_sessions=many"], "sessions.max_sessions is 'many'; it must be a whole number."),
        (["sessions.max_sessions=1.5"], "sessions.max_sessions is '1.5'; it must be a whole number."),
        (["sessions.max_sessions=[1]"], "sessions.max_sessions is '[1]'; it must be a whole number."),
        (["sessions.max_sessions=null"], "sessions.max_sessions is null; it must be a whole number."),
        (["backend.num_threads=two"], "backend.num_threads is 'two'; it must be a whole number or null."),
        (["capture.enabled=perhaps"], "capture.enabled is 'perhaps'; it must be true or false."),
        (["model.dtype=float8"], "model.dtype is 'float8'; it must be one of auto, float32, bfloat16."),
        (["sessions.max_sessions=0"], "sessions.max_sessions is 0; it must be at least 1."),
        (["drafter=eagle3"], "drafter.path is None; it must be an EAGLE3 checkpoint directory with drafter=eagle3."),
        (["state_dir=???"], "state_dir has no value; give one with state_dir=..."),
        (["sessions.ttl_s==3"], "cannot read 'sessions.ttl_s==3'; write setting=value"),
        (["sessions"], "cannot read 'sessions'; write setting=value"),
        (["~sessions.ttl_s"], "sessions.ttl_s cannot be removed; give it another value."),
        (["+sessions.ttl_s=3"], "sessions.ttl_s is a setting already; write it without '+'."),
        (["model=tiny,smollm2-135m"], "'model=tiny,smollm2-135m' names several values; add --multirun to run each"),
        (["state_dir=${nowhere}"], "state_dir cannot be resolved (Interpolation key 'nowhere' not found); write its value out."),
        (["--config-name", "nowhere"], "there is no configuration 'nowhere' in "),
        (["--multirun", "sessions.max_sessions=4,0"], "sessions.max_sessions is 0; it must be at least 1."),
    ],
)
def test_each_refusal_is_one_sentence(door: Door, arguments: list[str], sentence: str) -> None:
    answer = door(*arguments)
    assert answer.stderr.startswith(f"slipstream: {sentence}")
    assert answer.stderr.count("\n") == 1
    assert (answer.code, answer.stdout, answer.configs) == (2, "", [])


def test_multirun_runs_one_after_the_other_and_keeps_the_first_failure(door: Door) -> None:
    answer = door(
        "-m", "model=tiny,smollm2-135m", "speculation.max_draft_tokens=0,3", run=lambda c: c.speculation.max_draft_tokens
    )
    seen = [(config.model.name, config.speculation.max_draft_tokens) for config in answer.configs]
    assert seen == [("tiny", 0), ("tiny", 3), ("smollm2-135m", 0), ("smollm2-135m", 3)]
    assert (answer.code, answer.stdout, answer.stderr) == (3, "", "")


def test_multirun_may_stand_between_the_settings(door: Door) -> None:
    answer = door("model=tiny", "--multirun", "speculation.max_draft_tokens=0,3")
    assert answer.stderr == ""
    assert [config.speculation.max_draft_tokens for config in answer.configs] == [0, 3]
    assert sys.argv[3:] == ["model=tiny", "--multirun", "speculation.max_draft_tokens=0,3"], "provenance tells what was written"


def test_multirun_can_be_one_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trial.yaml").write_text(PRIMARY)
    swept: list[configuration.Job[Trial]] = []

    def sweep(jobs: Sequence[configuration.Job[Trial]]) -> int:
        swept.extend(jobs)
        return 7

    def knock(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["trial", "--config-dir", str(tmp_path), *arguments])
        with pytest.raises(SystemExit) as exit_:
            configuration.main("trial", Trial, lambda config: 3, sweep)
        return int(exit_.value.code or 0)

    assert knock("speculation.max_draft_tokens=2") == 3
    assert swept == []
    assert knock("-m", "model=tiny", "speculation.max_draft_tokens=0,3") == 7
    assert [(job.config.speculation.max_draft_tokens, job.overrides) for job in swept] == [
        (0, ("model=tiny", "speculation.max_draft_tokens=0")),
        (3, ("model=tiny", "speculation.max_draft_tokens=3")),
    ]


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["--info", "config"]])
def test_hydra_can_still_be_asked(tmp_path: Path, arguments: list[str]) -> None:
    """In a process of its own, as --info sets up logging for good."""
    (tmp_path / "trial.yaml").write_text("defaults: [base_schema, door, _self_]")
    program = "from runtime import config, configuration; configuration.main('trial', config.ModelConfig, lambda config: 1)"
    command = [sys.executable, "-c", program, "--config-dir", str(tmp_path), "name=tiny", *arguments]
    asked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "name: tiny" in asked.stdout
    assert asked.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["trial.yaml"]


@pytest.mark.parametrize("program", ["serving", "training"])
def test_help_lists_the_groups_that_the_program_has(program: str) -> None:
    """Those that its settings begin with, and none of the other program's, which it would refuse."""
    schema = ServingConfig if program == "serving" else TrainingConfig
    listed = dict(line.split(": ") for line in configuration._groups(schema).splitlines())
    assert ("server" in listed, "trainer" in listed) == (program == "serving", program == "training")
    for group, options in listed.items():
        assert any(name.startswith(f"{group}.") for name in configuration.known_settings(schema))
        assert all((configuration.CONFIG_DIR / group / f"{option}.yaml").is_file() for option in options.split(", "))


def test_errors_of_a_run_are_one_sentence_and_bugs_are_not_hidden(door: Door) -> None:
    def fail(error: Exception) -> Callable[[Trial], int]:
        def run(config: Trial) -> int:
            raise error

        return run

    unusable = door(run=fail(ModelError("No such model.")))
    assert (unusable.code, unusable.stderr) == (1, "slipstream: No such model.\n")
    assert door(run=fail(ConfigError("Ports clash."))).code == 2
    with pytest.raises(ZeroDivisionError):
        door(run=fail(ZeroDivisionError()))


def test_logging_is_left_alone(door: Door) -> None:
    before = (logging.getLogger().level, list(logging.getLogger().handlers))
    door()
    door("--multirun", "model=tiny,smollm2-135m")
    assert (logging.getLogger().level, list(logging.getLogger().handlers)) == before


def test_provenance(tmp_path: Path) -> None:
    path = configuration.provenance(tmp_path / "run", Trial(state_dir="here"))
    record = json.loads(path.read_text())
    assert record["argv"] == sys.argv
    assert record["versions"]["torch"].startswith("2.")
    assert (tmp_path / "run" / record["config"]).read_text().count("state_dir: here") == 1
    root = Path(configuration.__file__).resolve().parents[2]
    if (root / ".git").exists():
        head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
        assert record["git"].removesuffix("-dirty") == head.strip()


def test_provenance_keeps_earlier_starts(tmp_path: Path) -> None:
    for _ in range(3):
        path = configuration.provenance(tmp_path, Trial())
    record = json.loads(path.read_text())
    assert [start["versions"] for start in record["earlier"]] == [record["versions"]] * 2
    assert all("earlier" not in start for start in record["earlier"])


def test_the_settings_of_the_runtime() -> None:
    """A new setting needs an argument: whoever adds one says so here."""
    leaves = {
        "model": "name dtype device",
        "backend": "name num_threads numerics kv_pool_mib",
        "drafter": "kind path",
        "speculation": "mode shape max_draft_tokens tree_nodes tree_width",
        "sessions": "max_sessions ttl_s max_batch_sessions prefill_chunk_tokens kv_budget_mib prefix_reuse patient",
        "capture": "enabled by_default sampling_rate min_generated_tokens max_row_tokens heldout_fraction heldout_max_rows "
        "queue_max_rows high_rows low_rows high_mib low_mib redact classify max_age_s max_trained_rows",
        "features": "store root budget_mib mooncake",
        "features.mooncake": "master metadata host protocol rdma_devices segment_mib",
        "registry": "root poll_s auto_activate max_divergence divergence_steps",
    }
    expected = {f"{group}.{name}" for group, names in leaves.items() for name in names.split()}
    assert {name for name in configuration.known_settings(Trial) if "." in name} == expected


@pytest.mark.parametrize("program", ["serving", "training"])
def test_settings_do_not_wait_for_torch(program: str) -> None:
    """So that --help and a refused setting take a moment."""
    code = f"import sys; import {program}.config; print(sorted({{'torch', 'transformers', 'grpc'}} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
