"""Directories of token rows: whole shards, a manifest that is true, one writer, one origin."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from training.data.shards import TokenShards, directories_of, read_manifest, read_shard, read_shards
from training.data.tokens import Corpus, TokenRow


def rows(*numbers: int) -> list[TokenRow]:
    return [TokenRow(f"p{n}", "0", [n, 1, 2, 3], ((1, 4),), 0.7, "chat") for n in numbers]


def opened(directory: Path, **settings: object) -> TokenShards:
    values = {"shard_tokens": 8, "flush_every_s": 3600.0} | settings
    return TokenShards(directory, {"seed": 0}, 100, **values)


def names(directory: Path) -> list[str]:
    parts = list(read_shards(directory))
    return [source for source, _, _ in Corpus.concat(parts).labels] if parts else []


def test_shards_are_written_when_full_or_due_and_told_in_the_manifest(tmp_path: Path) -> None:
    with opened(tmp_path, counts=lambda: {"left_out": {"odd_roles": 2}}) as shards:
        shards.add(rows(0))
        assert names(tmp_path) == []
        shards.add(rows(1, 2))  # together or not at all: one shard, though it is full before
        assert names(tmp_path) == ["p0", "p1", "p2"]
        shards.add(rows(3))
        shards.flush()
    manifest = read_manifest(tmp_path)
    assert directories_of("data.corpus", str(tmp_path)) == [tmp_path]
    assert [shard["rows"] for shard in manifest["shards"]] == [3, 1]
    assert manifest["totals"] == {"rows": 4, "tokens": 16, "generated_tokens": 12}
    assert manifest["shards"][0]["rows_by_temperature"] == {"0.7": 3}
    assert manifest["shards"][0]["rows_by_slice"] == {"chat": 3}
    assert manifest["counts"] == {"left_out": {"odd_roles": 2}}
    with opened(tmp_path / "due", flush_every_s=0.0) as shards:
        shards.add(rows(0))
        assert names(tmp_path / "due") == ["p0"]


def test_a_maker_goes_on_behind_what_is_there(tmp_path: Path) -> None:
    with opened(tmp_path) as shards:
        shards.add(rows(0, 1))
        shards.add(rows(2))  # never written
    (tmp_path / "manifest.json").write_text(json.dumps({**read_manifest(tmp_path), "shards": []}))  # killed before it
    (tmp_path / ".tmp-half").write_bytes(b"half a shard")
    with opened(tmp_path) as shards:
        assert [shards.is_known(f"p{n}#0") for n in range(3)] == [True, True, False]
        shards.add(rows(2, 3))
    assert names(tmp_path) == ["p0", "p1", "p2", "p3"]
    assert not list(tmp_path.glob(".tmp-*"))


def test_one_writer_and_one_origin(tmp_path: Path) -> None:
    with opened(tmp_path) as shards:
        shards.add(rows(0, 1))
        with pytest.raises(ConfigError, match="Another process is writing rows"):
            opened(tmp_path)
    with pytest.raises(ConfigError, match="holds rows made with seed 0, and now it is 1"):
        TokenShards(tmp_path, {"seed": 1}, 100, shard_tokens=8, flush_every_s=1.0)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"holds shards and no manifest\.json"):
        opened(tmp_path)


def test_a_directory_without_a_row_is_for_any_origin(tmp_path: Path) -> None:
    """What is there of a maker whose prompts were none holds up nobody who gives better ones."""
    with opened(tmp_path):
        pass
    with TokenShards(tmp_path, {"seed": 1}, 100, shard_tokens=8, flush_every_s=1.0) as shards:
        assert read_manifest(tmp_path)["origin"] == {"seed": 1}
        shards.add(rows(0, 1))
    [path] = tmp_path.glob("shard-*")
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="holds rows made with seed 1, and now it is 0"):  # for a while only, perhaps
        opened(tmp_path)
    assert read_manifest(tmp_path)["shards"]


def test_a_directory_without_a_row_has_no_say_beside_others(tmp_path: Path) -> None:
    with opened(tmp_path / "a"), opened(tmp_path / "b"):
        assert directories_of("data.corpus", str(tmp_path)) == [tmp_path / "a", tmp_path / "b"]
    with opened(tmp_path / "b") as shards:
        shards.add(rows(0, 1))
    assert directories_of("data.corpus", str(tmp_path)) == [tmp_path / "b"]


def test_shards_that_lost_their_manifest_are_not_taken_for_something_else(tmp_path: Path) -> None:
    with opened(tmp_path) as shards:
        shards.add(rows(0, 1))
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"which holds shards and no manifest\.json; complete it"):
        directories_of("data.corpus", str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 99}',
        '{"format": 1, "shards": []}',
        '{"format": 1, "origin": 5, "shards": []}',
        '{"format": 1, "origin": {}, "shards": 5}',
        '{"format": 1, "origin": {}, "shards": [5]}',
        '{"format": 1, "origin": {}, "shards": [{"file": "shard-00000.safetensors"}]}',
        '{"format": 1, "origin": {}, "shards": [{"file": "../shard-00000.safetensors", "sha256": ""}]}',
        "[" * 100_000,
    ],
    ids=range(10),
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_a_shard_that_is_gone_or_changed_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as shards:
        shards.add(rows(0, 1))
    [path] = tmp_path.glob("shard-*")
    data = path.read_bytes()
    path.write_bytes(data[:-2] + b"xx")
    with pytest.raises(ConfigError, match="is not what its manifest says"):
        list(read_shards(tmp_path))
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"Shard .* cannot be used"):
        read_shard(path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"shard-00000\.safetensors is missing; restore it, or have the mode=capture"):
        list(read_shards(tmp_path))


def test_rows_of_a_missing_shard_are_made_again_and_no_other_shard_is_written_over(tmp_path: Path) -> None:
    with opened(tmp_path) as shards:
        for n in range(0, 6, 2):
            shards.add(rows(n, n + 1))
    (tmp_path / "shard-00000.safetensors").unlink()
    with opened(tmp_path) as shards:
        assert [shards.is_known(f"p{n}#0") for n in range(6)] == [False, False, True, True, True, True]
        shards.add(rows(0, 1))
    assert names(tmp_path) == ["p2", "p3", "p4", "p5", "p0", "p1"]


def test_a_changed_shard_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    with opened(tmp_path) as shards:
        shards.add(rows(0, 1))
    [path] = tmp_path.glob("shard-*")
    ids = Corpus.of(rows(0, 1), 100).token_ids.numpy().tobytes()
    path.write_bytes(path.read_bytes().replace(ids, ids[::-1]))
    assert read_shard(path)  # whole, as far as one can see
    with pytest.raises(ConfigError, match="is not what its manifest says"):
        opened(tmp_path)


def test_a_full_disk_is_told_with_the_directory_and_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Rows cannot be written into .*give another answers\.directory"):
        opened(tmp_path / "file" / "rows")
    (tmp_path / "file").unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path, shard_tokens=10**6) as shards:
        shards.add(rows(*range(100)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            with pytest.raises(ConfigError, match=r"Rows cannot be written into .*What is there is safe"):
                shards.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert names(tmp_path) == []
        assert sorted(entry.name for entry in tmp_path.iterdir()) == [".lock", "manifest.json"]
        shards.flush()
    assert names(tmp_path) == [f"p{n}" for n in range(100)]
