"""docs/errors.md says what the code does: every class, every reason, both statuses, and each .proto names its own."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime import errors
from runtime.eagle3.reasons import RejectReason
from runtime.rpc.status import code_of
from serving.http.errors import status_of

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "errors.md").read_text()
PROTOS = {"R": "runtime", "D": "drafters", "F": "features"}
VARYING = {errors.SessionNotFound, errors.SavedSessionRejected, errors.DrafterRejected}  # classes whose errors bring their reason


@dataclass(frozen=True)
class Row:
    reason: str
    kind: type[errors.SlipstreamError]
    grpc: str
    http: str
    where: str
    meaning: str

    def error(self) -> errors.SlipstreamError:
        """An error of this row, as far as statuses look at it."""
        error = self.kind.__new__(self.kind)
        errors.SlipstreamError.__init__(error, "message")
        if self.kind in VARYING:
            error.reason = self.reason
        return error


def rows() -> list[Row]:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in DOCUMENT.splitlines() if re.match(r"\| [A-Z]", line)
    ]
    return [Row(reason, getattr(errors, kind), *rest) for reason, kind, *rest in cells]


ROWS = rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.reason)
def test_a_row_says_what_the_code_does(row: Row) -> None:
    error = row.error()
    assert error.reason == row.reason
    assert code_of(error).name == row.grpc
    assert row.http == "-" or status_of(error) == int(row.http)
    assert (row.http == "-") == ("H" not in row.where)
    assert row.meaning


def test_every_class_has_its_place() -> None:
    kinds = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.SlipstreamError)}
    hidden = re.findall(r"\w+", DOCUMENT.rpartition("one sentence: ")[2])
    assert {row.kind for row in ROWS} | {getattr(errors, name) for name in hidden} == kinds
    assert {row.kind.__name__ for row in ROWS}.isdisjoint(hidden)


def test_every_reason_has_its_row() -> None:
    reasons = [row.reason for row in ROWS]
    assert len(set(reasons)) == len(reasons)
    assert {row.reason for row in ROWS if row.kind is errors.DrafterRejected} == {reason.value for reason in RejectReason}
    said = {
        errors.SessionNotFound: r"reason`: (UNKNOWN, CLOSED, EVICTED_TTL, EVICTED_LRU)",
        errors.SavedSessionRejected: r"`reason`: (SAVED_[A-Z_, \sor]+)\.",
    }
    for kind, pattern in said.items():
        found = re.search(pattern, inspect.getsource(errors))
        assert found
        assert {row.reason for row in ROWS if row.kind is kind} == set(re.findall(r"[A-Z_]{3,}", found.group(1)))


@pytest.mark.parametrize("letter", PROTOS)
def test_each_proto_names_the_reasons_of_its_service(letter: str) -> None:
    text = (ROOT / "proto" / "runtime" / "rpc" / "v1" / f"{PROTOS[letter]}.proto").read_text().partition("syntax =")[0]
    table = text[text.index("  code ") :]
    codes = {row.grpc for row in ROWS}
    named: set[str] = set()
    for line in table.splitlines():
        cells = re.split(r"\s{2,}", line.strip("/ "))
        upper = re.findall(r"\b[A-Z][A-Z_]{3,}\b", " ".join(cells[1:] if cells[0] in codes else cells))
        named |= set(upper)
    known = {row.reason for row in ROWS}
    assert named & known == {row.reason for row in ROWS if letter in row.where}
