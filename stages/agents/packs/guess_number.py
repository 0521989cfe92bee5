"""Pack: guess a whole number; after each guess the model reads whether the number is higher or lower.

The reward is 1 for a right first guess, `guess_cost` less for each further guess, and 0 if the number was not guessed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stages.agents.environment import Environment, Start, Step, Task, Turn
from stages.chat.messages import Message

_NUMBER = re.compile(r"-?\d+")


@dataclass
class GuessNumber(Environment):
    """One game. The texts are options, for models with a small vocabulary."""

    lowest: int = 1
    highest: int = 20
    start: str = "I think of a whole number from {lowest} to {highest}. Guess it; answer with a number only."
    higher: str = "It is higher."
    lower: str = "It is lower."
    no_number: str = "That is no number. Answer with a whole number only."
    guess_cost: float = 0.1

    number = guesses = 0

    @classmethod
    def tasks(cls, split: Literal["train", "heldout"], seed: int, **options: Any) -> Iterator[Mapping[str, Any]]:
        """Games by their seed. The splits share no seed, though games may have the same number."""
        first = 1_000_000 * seed + (500_000 if split == "heldout" else 0)
        game = cls(**options)
        for offset in range(500_000):
            yield {"seed": first + offset, **game.demonstration(first + offset)}

    def demonstration(self, seed: int) -> dict[str, Any]:
        """An example game for a supervised warm start: random guesses that respect the earlier answers, each followed
        by an end-of-sequence token (a line break). `tool_spans`: the characters that this environment wrote."""
        self._choose(seed)
        low, high = self.lowest, self.highest
        draw, text, spans = random.Random(seed + 1), "", []
        while (guess := draw.randint(low, high)) != self.number:
            text += f"{guess}\n"
            answer = self.higher if guess < self.number else self.lower
            spans.append((len(text), len(text) + len(answer)))
            text += answer
            low, high = (guess + 1, high) if guess < self.number else (low, guess - 1)
        return {"input": self._prompt(), "demonstration": f"{text}{guess}\n", "tool_spans": spans}

    async def reset(self, task: Task) -> Start:
        self._choose(int(task.metadata.get("seed", task.seed)))
        return Start((Message("user", self._prompt()),))

    async def step(self, turn: Turn) -> Step:
        self.guesses += 1
        match = _NUMBER.search(turn.message.content)
        guess = None if match is None else int(match[0][:12])
        if guess == self.number:
            reward = max(0.0, 1.0 - self.guess_cost * (self.guesses - 1))
            return Step(reward=reward, done=True, metrics={"found": 1.0, "guesses": self.guesses})
        if turn.last:
            return Step(reward=0.0, done=True, metrics={"found": 0.0, "guesses": self.guesses})
        if guess is None:
            return Step((Message("user", self.no_number),))
        return Step((Message("user", self.higher if guess < self.number else self.lower),))

    def _choose(self, seed: int) -> None:
        self.number = random.Random(seed).randint(self.lowest, self.highest)

    def _prompt(self) -> str:
        return self.start.format(lowest=self.lowest, highest=self.highest)
