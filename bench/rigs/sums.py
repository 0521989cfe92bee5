"""Two-digit sums for benchmarks: a warm-started tiny model, the engine for whole batches, graded batches."""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from configs.rules.validate import checked_flags
from configs.schema import Config, EngineConfig
from models.algorithms.advantages import advantages
from models.arithmetic import write_arithmetic
from models.engines.core import Completion
from models.engines.embedded.engine import EmbeddedEngine
from models.engines.noise import sample_seed
from models.engines.protocol import SamplingParams
from models.engines.text import TextCodec
from models.tiny import TinyRecipe, make_tiny_checkpoint
from models.train.build import build_backend
from models.train.interface import TrainBackend, TrainSequence

GROUPS, MEMBERS, LENGTH = 32, 8, 8
HELD_OUT = 256


@dataclass(frozen=True)
class Row:
    """A prompt and its answer."""

    ids: npt.NDArray[np.int32]
    answer: tuple[int, ...]


def rows_of(file: Path, codec: TextCodec) -> list[Row]:
    """The sums of a file of prompts; each answer ends with the end of the sequence."""
    assert codec.eos_id is not None
    lines = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
    ids, end = codec.encode, codec.eos_id
    return [Row(np.array(ids(line["input"]), np.int32), (*ids(str(line["label"])), end)) for line in lines]


class Task:
    """Two-digit sums as token ids, and a policy that was shown some of them."""

    def __init__(self, home: Path, seed: int) -> None:
        torch.set_num_threads(1)
        random = make_tiny_checkpoint(home / "random", TinyRecipe(tokenizer="arithmetic", seed=seed))
        codec = TextCodec.load(random)
        files = write_arithmetic(home / "data", kind="add", train=8000, heldout=HELD_OUT, seed=0)
        self.train, self.held_out = rows_of(files.train, codec), rows_of(files.heldout, codec)
        self.model = self._warm_start(random, home / "warm", seed)

    def _warm_start(self, start: Path, target: Path, seed: int, loss: float = 0.45) -> Path:
        """Supervised training until the mean loss of ten steps is below `loss` (every third sum right)."""
        flags = ["--mode", "sync", "--loss-type", "sft_loss", "--lr", "5e-4", "--seed", str(seed)]
        backend = build_backend(configured(start, flags), 2000)
        backend.setup()
        random, recent = np.random.default_rng(seed), deque([10.0], maxlen=10)
        while np.mean(recent) > loss:
            rows = [self.train[int(i)] for i in random.integers(0, len(self.train), 128)]
            backend.begin_batch(rollouts=len(rows), steps=1)
            backend.accumulate(
                [sequence(i, i, row, list(row.answer), [0.0] * len(row.answer), 1.0, 0) for i, row in enumerate(rows)]
            )
            recent.append(backend.step()["train/loss"])
        backend.save(target)
        return target / "hf"


def configured(model: Path, flags: Sequence[str]) -> Config:
    """The resolved configuration of these flags."""
    return checked_flags([
        "--hf-checkpoint", str(model), "--prompt-data", "arithmetic", "--label-key", "label", "--num-rollout", "100000",
        "--rollout-batch-size", str(GROUPS), "--n-samples-per-prompt", str(MEMBERS), "--rollout-max-response-len",
        str(LENGTH), *flags,
    ])  # fmt: skip


def sequence(
    group: int, rollout: int, row: Row, ids: list[int], log_probs: list[float], advantage: float, version: int
) -> TrainSequence:
    mask = np.repeat([0, 1], [len(row.ids), len(ids)])
    return TrainSequence(
        group_id=group,
        rollout_id=rollout,
        tokens=np.concatenate([row.ids, np.array(ids, dtype=np.int32)]),
        prompt_length=len(row.ids),
        loss_mask=mask.astype(np.uint8),
        rollout_log_probs=np.array([0.0] * len(row.ids) + log_probs, dtype=np.float32),
        advantages=(advantage * mask).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
    )


class Sampler:
    """The engine, for whole batches, and the weights that a trainer gives it. Use `async with`."""

    def __init__(self, config: EngineConfig, model: Path, max_context: int = 32) -> None:
        self._engine = EmbeddedEngine(config, str(model), max_context_len=max_context)
        self._model = model
        self._slots = tempfile.TemporaryDirectory(prefix="sluice-bench-")
        self._finished: asyncio.Queue[int] = asyncio.Queue()  # numbers of responses that ended

    async def __aenter__(self) -> Sampler:
        loop = asyncio.get_running_loop()

        def deliver(completions: Sequence[Completion]) -> None:
            loop.call_soon_threadsafe(self._finished.put_nowait, sum(c.finish is not None for c in completions))

        self._engine.start(deliver, lambda error: None)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.stop()
        self._slots.cleanup()

    async def sample(
        self, rows: Sequence[Row], seeds: Sequence[int], n: int, temperature: float, *, exactly: int | None = None
    ) -> list[Completion]:
        """n responses to each row, row by row, to the end of the sequence or of `exactly` so many tokens."""
        rule = SamplingParams(temperature=temperature, no_stop_trim=True, min_new_tokens=exactly or 0)
        completions = [
            Completion(
                rid=f"{number}_{index}", group=number, sample=index, prompt=row.ids, prompt_key=row.ids.tobytes(),
                rule=rule, seed=sample_seed(seed, index), max_new=exactly or LENGTH, stop_ids=row.answer[-1:],
                stop_strings=(), stream=False, extra_key="", score_from=-1,
            )
            for number, (row, seed) in enumerate(zip(rows, seeds, strict=True))
            for index in range(n)
        ]  # fmt: skip
        self._engine.submit(completions)
        running = len(completions)
        while running:
            running -= await self._finished.get()
        return completions

    async def train(self, backend: TrainBackend, sequences: Sequence[TrainSequence], version: int, steps: int) -> None:
        """Train one batch with the weights of this version; the engine then has those of the next one."""
        backend.begin_batch(rollouts=len(sequences), steps=steps, version=version)
        backend.accumulate(sequences)
        for _ in range(steps):
            backend.step()
        manifest = backend.write_slot(Path(self._slots.name), self._model, version + 1, 0)
        await self._engine.update_weights(manifest.path, str(version + 1), abort_all=False)


def graded(
    config: Config, rows: Sequence[Row], answers: Sequence[Completion], first: int, version: int
) -> tuple[list[TrainSequence], float]:
    """The batch with its advantages, and its mean reward."""
    sequences, rewards = [], []
    for index, row in enumerate(rows):
        number, group = first + index, answers[index * MEMBERS : (index + 1) * MEMBERS]
        scores = [float(tuple(c.output_ids) == row.answer) for c in group]
        rewards += scores
        values = advantages(config.algorithm.advantage_estimator, scores, range(MEMBERS))
        for rollout, (c, value) in enumerate(zip(group, values, strict=True), start=number * MEMBERS):
            sequences.append(sequence(number, rollout, row, c.output_ids, c.log_probs, float(value), version))
    return sequences, float(np.mean(rewards))
