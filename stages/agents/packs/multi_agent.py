"""Pack: a solver and a verifier, two roles of one policy, both trained.

    [[environment]]
    name = "multi_agent"
    options = { grader = "gsm8k_flex", rounds = 2 }

The solver answers the row's question; then the model, as the verifier, judges whether the answer is right. After a "no"
the solver tries again, up to `rounds` answers. Both roles are turns of one conversation: the verifier sees all earlier
turns.

A built-in grader decides by the row's label whether an answer is right. Each true verdict earns `verdict_share`; a
right last answer earns 1. `verdict_share * rounds` must be below 1, so a wrong answer on purpose, to be judged easily,
never pays.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stages.agents.environment import Environment, Start, Step, Task, Turn, system_message
from stages.chat.messages import Message
from stages.graders.grade import GradeRequest
from stages.graders.registry import grade_request, listed_grader

_HELDOUT = 10  # one in so many sums is held out


@dataclass
class MultiAgent(Environment):
    """The texts are options, for models with a small vocabulary: `ask` before the verdict, `again` before another
    answer, `right` and `wrong` as verdicts (the last verdict in the verifier's turn counts). `below` is for `tasks`."""

    grader: str = "gsm8k_flex"
    rounds: int = 1
    verdict_share: float = 0.5
    instructions: str = ""
    ask: str = "You are a verifier now. Is the last answer right? Think, and end with yes or no."
    again: str = "You are the solver again. Your answer is doubted: give another, or the same if you are sure."
    right: str = "yes"
    wrong: str = "no"
    below: int = 100

    _answers = _true_verdicts = 0
    _correct = False

    def __post_init__(self) -> None:
        entry = listed_grader(self.grader)
        if entry is None or not entry.in_stage:
            raise ValueError(f"grader is {self.grader!r}, but must be a built-in grader without a worker process")
        if self.rounds < 1 or not 0 <= self.verdict_share * self.rounds < 1:
            raise ValueError(
                f"rounds is {self.rounds} and verdict_share {self.verdict_share}; at least one round is needed, and "
                "the verdicts of all rounds must be worth less than 1, which is what a right answer is worth"
            )
        self._verdict = re.compile(f"{_word(self.right)}|{_word(self.wrong)}", re.IGNORECASE)

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
        """Sums of two numbers below `below`, with demonstrations of one round for a model without a chat template.

        Half of the demonstrated answers are wrong; those answers are not trained, but their verdicts are. The splits
        share no sum.
        """
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
            raise ValueError("the row has no label, which decides who is right; set --label-key")
        self._label, self._metadata = task.label, json.dumps(dict(task.metadata), default=str)
        return Start((*system_message(self.instructions), *task.messages))

    async def step(self, turn: Turn) -> Step:
        return self._judged(turn) if turn.number % 2 else self._answered(turn)

    def _answered(self, turn: Turn) -> Step:
        """The solver's turn."""
        self._answers += 1
        request = GradeRequest(self.grader, turn.message.content, self._label, self._metadata)
        self._correct = bool(grade_request(request).is_correct)
        return self._ended() if turn.truncated or turn.last else Step((Message("user", self.ask),))

    def _judged(self, turn: Turn) -> Step:
        """The verifier's turn."""
        verdicts = [found.lower() for found in self._verdict.findall(turn.message.content)]
        verdict = verdicts[-1] == self.right.lower() if verdicts else None
        worth = self.verdict_share if verdict == self._correct else 0.0
        self._true_verdicts += verdict == self._correct
        if verdict is False and self._answers < self.rounds and not (turn.truncated or turn.last):
            return Step((Message("user", self.again),), reward=worth)
        return self._ended(worth)

    def _ended(self, worth: float = 0.0) -> Step:
        """`worth`: reward of the last verdict; earlier verdicts were rewarded with their turns."""
        metrics = {
            "correct": float(self._correct),
            "answers": float(self._answers),
            "true_verdicts": self._true_verdicts / self._answers,
        }
        return Step(reward=float(self._correct) + worth, done=True, metrics=metrics)


def _word(text: str) -> str:
    """A pattern that matches a text as a whole word."""
    return rf"(?<!\w){re.escape(text)}(?!\w)"
