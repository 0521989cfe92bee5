"""Pack: tasks of reasoning-gym (Apache-2.0, the package `reasoning-gym`): one question, one answer, the task's score.

    [[environment]]
    name = "reasoning_gym"
    options = { datasets = ["chain_sum", "leg_counting"] }

`datasets` may also be a table of settings by dataset: `{ chain_sum = { max_digits = 2 } }`.

Invariants: a score is a number in [0, 1]; a scorer that raises, or computes for longer than SCORE_S, gives 0; the same
number is the same task on every machine with the same version of the package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Literal

from configs.schema.notation import did_you_mean
from stages.agents.environment import Environment, Start, Step, Task, Turn, need_package, system_message
from stages.chat.messages import Message
from stages.workers.serve import CpuLimitError, cpu_limit

SCORE_S: Final = 2.0  # processor time limit of a scorer
ANSWER_CHARS: Final = 20_000
INSTRUCTIONS: Final = "Write your answer between <answer> and </answer>."
_HELDOUT: Final = 1 << 29  # tasks with these numbers and above are held out
_ANSWER: Final = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)

Datasets = Sequence[str] | Mapping[str, Mapping[str, Any]]


@dataclass
class ReasoningGym(Environment):
    """One task: the metadata's `dataset` and `number`, else by the task's seed. `partial` keeps scores between 0 and 1.

    `prompt` replaces the question, and may contain fields of the task's metadata: "{expression} =".
    """

    datasets: Datasets = ("chain_sum",)
    partial: bool = True
    instructions: str = INSTRUCTIONS
    prompt: str = ""

    def __post_init__(self) -> None:
        self._settings = _settings(self.datasets)

    @classmethod
    def tasks(
        cls, split: Literal["train", "heldout"], seed: int, datasets: Datasets = ("chain_sum",), prompt: str = ""
    ) -> Iterator[Mapping[str, Any]]:
        """Tasks of each dataset in turn, endless, with the right answers; the splits share no number."""
        settings = _settings(datasets)
        names = list(settings)
        first = _HELDOUT if split == "heldout" else seed * 100_003 % (_HELDOUT >> 1)
        for number in count(first):
            name = names[number % len(names)]
            _, entry = _create(name, number, settings[name])
            yield {
                "dataset": name,
                "number": number,
                "input": _question(entry, prompt),
                "demonstration": f"{entry['answer']}\n",
            }

    async def reset(self, task: Task) -> Start:
        names = list(self._settings)
        number = int(task.metadata.get("number", task.seed % _HELDOUT))
        name = str(task.metadata.get("dataset", names[number % len(names)]))
        if name not in self._settings:
            raise ValueError(f"metadata.dataset is {name!r}{did_you_mean(name, self._settings)}")
        self._dataset, self._entry = _create(name, number, self._settings[name])
        self._name = name
        question = Message("user", _question(self._entry, self.prompt))
        return Start((*system_message(self.instructions), question))

    async def step(self, turn: Turn) -> Step:
        score = scored(self._dataset, self._entry, answer_of(turn.message.content))
        if not self.partial:
            score = float(score >= 1.0)
        return Step(reward=score, done=True, metrics={self._name: score})


def _create(name: str, number: int, settings: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The task, and a dataset of this task alone: some datasets make all their tasks at once."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, seed=number, size=1, **settings)
    return dataset, dataset[0]


def _question(entry: Mapping[str, Any], prompt: str) -> str:
    return prompt.format(**entry["metadata"]) if prompt else str(entry["question"])


def answer_of(text: str) -> str:
    """The text in the last <answer>, else the whole text."""
    text = text[-ANSWER_CHARS:]
    answers = _ANSWER.findall(text)
    return (answers[-1] if answers else text).strip()


def scored(dataset: Any, entry: Mapping[str, Any], answer: str) -> float:
    """The dataset's score of an answer."""
    try:
        with cpu_limit(SCORE_S):
            score = float(dataset.score_answer(answer, entry))
    except (Exception, CpuLimitError):  # several scorers raise for unreadable answers, which are wrong
        return 0.0
    return min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0


def _settings(datasets: Datasets) -> dict[str, Mapping[str, Any]]:
    """Settings by dataset. Raises ValueError."""
    need_package("reasoning_gym", "reasoning-gym")
    from reasoning_gym.factory import DATASETS

    named: dict[str, Mapping[str, Any]] = {
        name: dict(datasets[name]) if isinstance(datasets, Mapping) else {} for name in datasets
    }
    for name in named:
        if name not in DATASETS:
            raise ValueError(f"datasets has {name!r}, which is not in reasoning-gym{did_you_mean(name, DATASETS)}")
    if not named:
        raise ValueError("datasets is empty; name at least one of reasoning-gym's")
    return named
