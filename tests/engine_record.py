"""What engines note themselves: each request at its end, as they were given it and as they answered.

In one process: `recording`. In the engine processes of a run: `NOTING` in their environment, which has them import
recorded_engines/sitecustomize.py at their start; `noted` reads what they wrote.

An engine that is killed notes nothing of what it was still at.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from models.engines.core import Completion
from models.engines.protocol import FinishReason

DIRECTORY = "SLUICE_TEST_ENGINE_RECORD"


class Made(Struct, frozen=True):
    """What an engine was given, and made of it."""

    prompt: list[int]
    ids: list[int]
    log_probs: list[float]
    labels: list[str]  # of the weights, token by token
    finish: str  # stop, length, abort; "" of one that was lost

    @property
    def versions(self) -> list[int]:
        return [int(label.rpartition(".")[2]) for label in self.labels]

    @property
    def whole(self) -> bool:
        """Whether it came to its end, so that all of it is used, or nothing."""
        return self.finish in ("stop", "length")


def made_by(completion: Completion, reason: FinishReason) -> Made:
    spans = completion.spans_over(len(completion.output_ids))
    labels = [span.version for span in spans for _ in range(span.start, span.end)]
    return Made(
        completion.prompt.tolist(), list(completion.output_ids), list(completion.log_probs), labels, reason.type
    )


def recording(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """All that engines of this process make from now on."""
    made: list[Made] = []
    original = Completion.close

    def close(completion: Completion, reason: FinishReason) -> None:
        made.append(made_by(completion, reason))
        original(completion, reason)

    monkeypatch.setattr(Completion, "close", close)
    return made


def noting(directory: Path) -> dict[str, str]:
    """The environment of a run whose engines note what they make."""
    directory.mkdir(parents=True, exist_ok=True)
    places = [Path(__file__).parent / "recorded_engines", Path(__file__).parents[1]]
    return {DIRECTORY: str(directory), "PYTHONPATH": os.pathsep.join(map(str, places))}


def note() -> None:
    """In an engine process. A step takes 5 ms more, so that the weights change within turns on any machine."""
    from models.engines.embedded.stepper import Stepper

    original, quick = Completion.close, Stepper.step
    file = Path(os.environ[DIRECTORY], f"{os.getpid()}.jsonl").open("ab", buffering=0)  # noqa: SIM115 - as long as it

    def close(completion: Completion, reason: FinishReason) -> None:
        file.write(msgspec.json.encode(made_by(completion, reason)) + b"\n")
        original(completion, reason)

    def step(stepper: Stepper) -> None:
        quick(stepper)
        time.sleep(0.005)

    Completion.close = close  # type: ignore[method-assign]
    Stepper.step = step  # type: ignore[method-assign]


def noted(directory: Path) -> list[Made]:
    """What the engine processes of a run wrote down; a last line may be torn by a kill."""
    lines = [line for file in sorted(directory.iterdir()) for line in file.read_bytes().split(b"\n")]
    return [msgspec.json.decode(line, type=Made) for line in lines if line.endswith(b"}")]
