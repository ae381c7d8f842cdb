"""What all clients of a soak saw: how each operation ended, and what was not as it should be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MAX_KEPT_FAULTS = 50  # told in full; all are counted


@dataclass
class Notes:
    """What all clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)  # "operation: how it ended"
    faults: list[str] = field(default_factory=list)
    num_faults: int = 0
    num_given_up: int = 0  # turns after which the K/V was gone already
    cancel_s: list[float] = field(default_factory=list)  # from cancelling to an idle session

    def saw(self, operation: str, outcome: object) -> None:
        self.outcomes[f"{operation}: {outcome}"] += 1

    def hold(self, is_so: bool, what: str) -> None:
        if not is_so:
            self.num_faults += 1
            if len(self.faults) < MAX_KEPT_FAULTS:
                self.faults.append(what)
