"""Pack: a solver and a verifier, two roles of one policy, which are both trained.

    [[environment]]
    name = "multi_agent"
    options = { grader = "gsm8k_flex", rounds = 2 }

The solver answers the row's question; then the model is asked, as the verifier, whether the answer is right. After a
"no" the solver tries again, up to `rounds` answers. Both roles are turns of one conversation: a verifier sees what was
said before it.

What is right is known from the row's label, by a grader of this project. Each verdict is worth `verdict_share` if it
was true; the last answer is worth 1 if it is right. So an answer that is wrong on purpose, to be judged easily, never
pays: `verdict_share * rounds` must be below 1.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from stages.agents.environment import Start, Step, Task, Turn
from stages.chat.messages import Message
from stages.graders.grade import GradeRequest
from stages.graders.registry import grade_request, listed_grader

_HELDOUT = 10  # one in so many sums is never trained


class MultiAgent:
    """Texts are options, so that a model with a small vocabulary can be shown its own: `ask` before the verdict,
    `again` before another answer, `right` and `wrong` as verdicts (the last one in the verifier's turn counts). `below`
    is for `tasks`."""

    def __init__(
        self,
        *,
        grader: str = "gsm8k_flex",
        rounds: int = 1,
        verdict_share: float = 0.5,
        instructions: str = "",
        ask: str = "You are a verifier now. Is the last answer right? Think, and end with yes or no.",
        again: str = "You are the solver again. Your answer is doubted: give another, or the same if you are sure.",
        right: str = "yes",
        wrong: str = "no",
        below: int = 100,
    ) -> None:
        entry = listed_grader(grader)
        if entry is None or not entry.in_stage:
            raise ValueError(f"grader is {grader!r}, but must be a built-in one that needs no process of its own")
        if rounds < 1 or not 0 <= verdict_share * rounds < 1:
            raise ValueError(
                f"rounds is {rounds} and verdict_share {verdict_share}; there must be a round at least, and the "
                "verdicts of all rounds must be worth less than 1, which is what a right answer is worth"
            )
        self._grader, self._rounds, self._share = grader, rounds, verdict_share
        self._instructions, self._ask, self._again = instructions, ask, again
        self._right = right
        self._verdict = re.compile(f"{_word(right)}|{_word(wrong)}", re.IGNORECASE)
        self._answers = self._true_verdicts = 0
        self._correct = False

    @classmethod
    def tasks(
        cls,
        split: Literal["train", "heldout"],
        seed: int,
        below: int = 100,
        ask: str = ":",
        right: str = "+",
        wrong: str = "-",
    ) -> Iterator[Mapping[str, Any]]:
        """Sums of two numbers below `below`, with demonstrations of one round for a model without a chat template: half
        of the answers are wrong, and those are not learnt, but that they are is. The splits share no sum."""
        pairs = list(range(below * below))
        random.Random("held out").shuffle(pairs)
        heldout = max(1, len(pairs) // _HELDOUT)
        pairs = pairs[:heldout] if split == "heldout" else pairs[heldout:]
        chosen = random.Random(f"sums {split} {seed}")
        while True:
            first, second = divmod(chosen.choice(pairs), below)
            label, is_right = str(first + second), chosen.random() < 0.5
            answer = label if is_right else str(max(0, first + second + chosen.choice((-10, -1, 1, 10))))
            is_right = answer == label
            text = f"{answer}\n{ask}"
            spans = [[len(answer) + 1, len(text)] if is_right else [0, len(text)]]
            demonstration = f"{text}{right if is_right else wrong}\n"
            yield {"input": f"{first}+{second}=", "label": label, "demonstration": demonstration, "tool_spans": spans}

    async def reset(self, task: Task) -> Start:
        if task.label is None:
            raise ValueError("the row has no label, so nobody can say who is right; set --label-key")
        self._label, self._metadata = task.label, json.dumps(dict(task.metadata), default=str)
        system = (Message("system", self._instructions),) if self._instructions else ()
        return Start((*system, *task.messages))

    async def step(self, turn: Turn) -> Step:
        if turn.number % 2 == 0:
            return self._answered(turn)
        return self._judged(turn)

    async def close(self) -> None:
        """Nothing to end."""

    def _answered(self, turn: Turn) -> Step:
        """The solver's turn."""
        self._answers += 1
        request = GradeRequest(self._grader, turn.message.content, self._label, self._metadata)
        self._correct = bool(grade_request(request).is_correct)
        if turn.truncated or turn.last:
            return self._ended()
        return Step((Message("user", self._ask),))

    def _judged(self, turn: Turn) -> Step:
        """The verifier's turn."""
        verdicts = [found.lower() for found in self._verdict.findall(turn.message.content)]
        said = verdicts[-1] == self._right.lower() if verdicts else None
        worth = self._share if said == self._correct else 0.0
        self._true_verdicts += said == self._correct
        if said is False and self._answers < self._rounds and not (turn.truncated or turn.last):
            return Step((Message("user", self._again),), reward=worth)
        return self._ended(worth)

    def _ended(self, worth: float = 0.0) -> Step:
        """`worth` is that of the last verdict; those before it were given with their turns."""
        metrics = {
            "correct": float(self._correct),
            "answers": float(self._answers),
            "true_verdicts": self._true_verdicts / self._answers,
        }
        return Step(reward=float(self._correct) + worth, done=True, metrics=metrics)


def _word(text: str) -> str:
    """A pattern for a text that is no part of a longer word."""
    return rf"(?<!\w){re.escape(text)}(?!\w)"
