"""Disks that are full or read-only, in real processes: each is an error that says what to do, and costs no row that was taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BEGIN = """
import json, os, resource, signal, sys
from pathlib import Path
import torch
from runtime.backends.base import TargetInfo
from runtime.config import CaptureConfig
from runtime.errors import FeatureError, FeatureUnavailable
from runtime.features import CapturedTurn, FeatureTap, Ledger, LocalDirectoryStore
from runtime.hidden_states import HiddenStates

torch.set_num_threads(1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
os.chdir(sys.argv[1])

def turn(name, n=400):
    hidden = HiddenStates(torch.zeros(n - 1, 24), torch.zeros(n - 1, 8))
    return CapturedTurn(session_id=name, token_ids=tuple(range(n)), generated=tuple(p >= 20 for p in range(n)), hidden=(hidden,))

def open_plane():
    store = LocalDirectoryStore(Path("features"), 1 << 24)
    return store, Ledger(Path("features/ledger.sqlite"), exists=store.exists)

def open_tap():
    return FeatureTap(store, ledger, CaptureConfig(heldout_fraction=0.0), run_id="server",
        target_info=TargetInfo("tiny", "fp", 320, 8, 6, 2048, (1, 2, 3), (257,), "float32", "cpu"))

def capture(tap, names):
    for name in names:
        tap.offer(turn(name))
    tap.close()
    return {name: count for name, count in tap.counters().items() if count}

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def say(**what):
    print(json.dumps(what), flush=True)
"""

FULL = """
store, ledger = open_plane()
before = capture(open_tap(), "ab")
tap = open_tap()
limit(4096)  # whatever grows beyond it is refused by the system, as on a full disk: rows, and the databases' journals
during = capture(tap, "cde")
try:
    ledger.lease("run", 9, 60)
    said = ""
except FeatureUnavailable as error:
    said = str(error)
limit(resource.RLIM_INFINITY)
after = capture(open_tap(), "cf")
rows = [ref.sample_id for ref in ledger.lease("run", 9, 60)]
read = [store.get(ref)[0].num_tokens for ref in ledger.leased("run")]
say(before=before, during=during, said=said, after=after, num_rows=len(rows), read=read, files=len(os.listdir("features/rows")))
"""

READ_ONLY = """
store, ledger = open_plane()
before = capture(open_tap(), "ab")
store.close()
ledger.close()
for place in ("features/rows", "features"):
    os.chmod(place, 0o555)
for file in Path("features").glob("*.sqlite*"):
    os.chmod(file, 0o444)
os.chmod(".", 0o755)
if os.getuid() == 0:
    os.setuid(65534)  # root may write anywhere
try:
    open_plane()
    said = ""
except FeatureError as error:
    said = str(error)
say(before=before, said=said)
"""


def _run(nursery: Any, code: str, directory: Path) -> dict[str, Any]:
    nursery.start(BEGIN + code, [str(directory)])
    line = nursery.line()
    assert line.startswith("{"), f"the process ended with {line}, before it said anything"
    assert nursery.end() == [0]
    told: dict[str, Any] = json.loads(line)
    return told


def test_a_full_disk_sheds_what_comes_and_costs_nothing_that_was_taken(nursery: Any, tmp_path: Path) -> None:
    told = _run(nursery, FULL, tmp_path)
    assert told["before"] == {"offered": 2, "captured": 2}
    assert told["during"] == {"offered": 3, "failed_io": 3}
    assert "Check the disk" in told["said"]
    assert told["after"] == {"offered": 2, "captured": 2}, "when there is room again, it goes on"
    assert (told["num_rows"], told["read"], told["files"]) == (4, [400] * 4, 4), "and nothing was left half-written"


def test_a_directory_that_cannot_be_written_is_one_sentence_at_start(nursery: Any, tmp_path: Path) -> None:
    told = _run(nursery, READ_ONLY, tmp_path)
    assert told["before"] == {"offered": 2, "captured": 2}
    assert "features" in told["said"]
    assert "cannot be" in told["said"], told
    assert "features.root elsewhere" in told["said"]
