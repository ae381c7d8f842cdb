"""From names to directories, and one sentence for every name that leads to none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from runtime.errors import ConfigError, ModelError
from runtime.models import fingerprint, make_tiny, resolve


@pytest.fixture
def offline_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The hub library without a network and with an empty cache."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


def test_tiny_is_made_once_under_home(own_home: Path) -> None:
    first = resolve("tiny")
    made = (first.path / "model.safetensors").stat().st_mtime_ns
    assert first.path == own_home / "models" / "tiny"
    assert resolve("tiny") == first
    assert (first.path / "model.safetensors").stat().st_mtime_ns == made


def test_a_damaged_tiny_is_made_again(own_home: Path) -> None:
    first = resolve("tiny")
    file = first.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert resolve("tiny") == first


def test_a_local_directory_is_used_where_it_is(own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny(tmp_path / "mine", seed=7)
    found = resolve(str(path))
    assert (found.path, found.fingerprint) == (path, fingerprint(path))
    monkeypatch.chdir(tmp_path)
    assert resolve("mine").path == path
    assert resolve("./mine").path == path


@pytest.mark.usefixtures("own_home", "offline_hub")
class TestRefused:
    """Each in one sentence that says what to do."""

    @pytest.mark.parametrize("name", ["", "   "])
    def test_an_empty_name(self, name: str) -> None:
        with pytest.raises(ModelError, match=r"empty; use smollm2-135m, tiny"):
            resolve(name)

    @pytest.mark.parametrize("name", ["/no/such/place", "./nowhere", "~/nowhere-at-all", "/" + 5000 * "a"])
    def test_a_missing_directory(self, name: str) -> None:
        with pytest.raises(ModelError, match="There is no directory"):
            resolve(name)

    def test_the_home_of_nobody(self) -> None:
        with pytest.raises(ConfigError, match=r"model\.name is '~nobody-here/model', and there is no such home directory"):
            resolve("~nobody-here/model")

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").write_text("x")
        with pytest.raises(ModelError, match="is a file"):
            resolve(str(tmp_path / "model.gguf"))

    def test_an_empty_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"config\.json"):
            resolve(str(tmp_path))

    @pytest.mark.parametrize("architectures", [["BertModel"], ["LlamaForCausalLMEagle3"], [], None, 5, "LlamaForCausalLM"])
    def test_another_kind_of_model(self, tmp_path: Path, architectures: object) -> None:
        path = make_tiny(tmp_path / "model")
        (path / "config.json").write_text(json.dumps({"architectures": architectures}))
        with pytest.raises(ModelError, match="ForCausalLM model is needed"):
            resolve(str(path))

    def test_weights_cut_short(self, tmp_path: Path) -> None:
        path = make_tiny(tmp_path / "model")
        with (path / "model.safetensors").open("r+b") as file:
            file.truncate(5000)
        with pytest.raises(ModelError, match="damaged"):
            resolve(str(path))

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        path = make_tiny(tmp_path / "model")
        (path / "tokenizer.json").unlink()
        with pytest.raises(ModelError, match=r"no tokenizer\.json"):
            resolve(str(path))

    @pytest.mark.parametrize("name", ["smollm3", "some/model", "a/b/c", "sp ace", "-dash", "nul\0", 5000 * "a"])
    def test_what_the_hub_does_not_give(self, name: str) -> None:
        with pytest.raises(ModelError, match=r"none of ours \(smollm2-135m, tiny\)") as caught:
            resolve(name)
        assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("own_home")
def test_a_hub_id_is_found_in_the_hubs_own_cache(offline_hub: Path, tiny_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = offline_hub / "models--someone--tiny"
    shutil.copytree(tiny_path, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    found = resolve("someone/tiny")
    assert found.name == "someone/tiny"
    assert found.fingerprint == fingerprint(tiny_path)
