"""Rollouts of several sequences, written down token by token, and the flat batch that trains each token once.

Every token that is made here has a number of its own, whichever sequences show it: what is expected of shared tokens
follows from the numbers, not from the code under test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from models.train.interface import TrainSequence


class Token(NamedTuple):
    number: int
    id: int
    trained: bool
    log_prob: float
    version: int


@dataclass
class Story:
    """One sequence as it is written."""

    prompt: int
    tokens: list[Token]
    advantage: float
    prefix: tuple[int, int] | None = None


@dataclass
class Writer:
    """Writes the sequences of one rollout."""

    rng: np.random.Generator
    vocabulary: int
    stories: list[Story] = field(default_factory=list)
    made: int = 0

    def write(self, n: int, *, trained: bool = True, version: int = 0) -> list[Token]:
        tokens = []
        for _ in range(n):
            token_id, log_prob = int(self.rng.integers(1, self.vocabulary)), float(self.rng.normal(-3.4, 0.4))
            tokens.append(Token(self.made, token_id, trained, log_prob if trained else 0.0, version if trained else -1))
            self.made += 1
        return tokens

    def begin(self, prompt: Sequence[int]) -> Story:
        """A sequence with a prompt of its own."""
        tokens = [Token(self.made + i, token, False, 0.0, -1) for i, token in enumerate(prompt)]
        self.made += len(prompt)
        self.stories.append(Story(len(prompt), tokens, float(self.rng.normal())))
        return self.stories[-1]

    def branch(self, place: int, length: int) -> Story:
        """A sequence that begins as another does."""
        other = self.stories[place]
        story = Story(min(other.prompt, length), other.tokens[:length], float(self.rng.normal()), (place, length))
        self.stories.append(story)
        return story

    def sequences(self, group: int, rollout: int, **fields: float) -> list[TrainSequence]:
        """What the trainer is given."""
        return [
            TrainSequence(
                group_id=group,
                rollout_id=rollout,
                tokens=np.array([t.id for t in story.tokens], dtype=np.int32),
                prompt_length=story.prompt,
                loss_mask=np.array([t.trained for t in story.tokens], dtype=np.uint8),
                rollout_log_probs=np.array([t.log_prob for t in story.tokens], dtype=np.float32),
                advantages=np.array([story.advantage * t.trained for t in story.tokens], dtype=np.float32),
                versions=np.array([t.version for t in story.tokens], dtype=np.int32),
                prefix=story.prefix,
                **fields,  # type: ignore[arg-type]
            )
            for story in self.stories
        ]

    def by_number(self) -> dict[int, list[tuple[int, int]]]:
        """Where each trained token is shown: (sequence, position), first the sequence that trains it."""
        found: dict[int, list[tuple[int, int]]] = {}
        for place, story in enumerate(self.stories):
            for position, token in enumerate(story.tokens):
                if token.trained:
                    found.setdefault(token.number, []).append((place, position))
        return found


def flat(writer: Writer, sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Sequences that share nothing: each token is trained in one, with the mean advantage of all that show it."""
    masks = [np.zeros_like(s.loss_mask) for s in sequences]
    means = [np.zeros_like(s.advantages) for s in sequences]
    for shown in writer.by_number().values():
        place, position = shown[0]
        masks[place][position] = 1
        means[place][position] = np.mean([sequences[at].advantages[position] for at, position in shown])
    return [
        dataclasses.replace(s, loss_mask=mask, advantages=mean, prefix=None)
        for s, mask, mean in zip(sequences, masks, means, strict=True)
    ]


def written(seed: int, vocabulary: int) -> list[tuple[int, int, Writer]]:
    """Groups of rollouts, by (group, rollout): a trunk, branches, a compaction and two sub-agents; and a plain one."""
    rng = np.random.default_rng(seed)
    found = []
    for group in range(2):
        prompt = rng.integers(1, vocabulary, 3).tolist()
        for member in range(3):
            writer = Writer(rng, vocabulary)
            trunk = writer.begin(prompt)
            trunk.tokens += writer.write(4) + writer.write(2, trained=False) + writer.write(3, version=1)
            if member < 2:
                writer.branch(0, 9).tokens += writer.write(1, trained=False) + writer.write(3 + member, version=1)
                writer.begin(rng.integers(1, vocabulary, 4).tolist()).tokens += writer.write(4, version=1)
                for _ in range(2):
                    writer.begin(rng.integers(1, vocabulary, 2).tolist()).tokens += writer.write(2)
                writer.branch(1, 11).tokens += writer.write(2, version=1)
                writer.branch(0, 5)  # ends within what it shares
            found.append((seed * 10 + group, seed * 100 + group * 10 + member, writer))
    return found


def branched_batch(seed: int, vocabulary: int, *, as_flat: bool = False) -> list[TrainSequence]:
    out = []
    for group, rollout, writer in written(seed, vocabulary):
        sequences = writer.sequences(group, rollout, reward=float(rollout % 3))
        out += flat(writer, sequences) if as_flat else sequences
    return out
