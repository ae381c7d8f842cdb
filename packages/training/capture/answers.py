"""What mode=capture has the target answer: every prompt once for each temperature, and what is left of that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from training.data.encoding import NOTHING_TO_LEARN
from training.data.prompts import Prompt
from training.data.tokens import TokenRow, name_of
from training.dialogues import Dialogue, Dialogues


class Answers:
    def __init__(self, dialogues: Dialogues, prompts: Sequence[Prompt], temperatures: Sequence[float]) -> None:
        """Dialogues without a row are counted beside the questions that were not asked."""
        self._dialogues = dialogues
        self._waiting = deque(
            Dialogue(prompt, number, temperature) for prompt in prompts for number, temperature in enumerate(temperatures)
        )
        self.num_dialogues = len(self._waiting)
        self.num_done = 0
        self.num_generated = 0  # tokens

    def skip(self, known: Callable[[str], bool]) -> None:
        """Leave out dialogues whose first row has a name that is known already."""
        self._waiting = deque(each for each in self._waiting if not known(name_of(each.prompt.id, each.part)))
        self.num_done = self.num_dialogues - len(self._waiting)

    def rows(self, should_stop: Callable[[], bool]) -> Iterator[list[TokenRow]]:
        """The rows of each dialogue as it ends, in any order, until all have or it is to stop. What runs then is given up."""
        with closing(self._dialogues.turns(self._waiting, should_stop)) as turns:
            for turn in turns:
                self.num_generated += turn.num_tokens
                if turn.is_over:
                    self.num_done += 1
                    if turn.dialogue.rows:
                        yield turn.dialogue.rows
                    else:
                        self._dialogues.left_out[NOTHING_TO_LEARN] += 1
