"""What the runner tells a built-in stage beside the configuration. A custom stage gets the user's own mapping instead.

Invariant: plain values that mean the same on every host, or name what a host of the trainer has.
"""

from __future__ import annotations

from msgspec import Struct


class TrainOptions(Struct, frozen=True, tag="train"):
    """Where training starts, and where its weights are published."""

    start_step: int = 0
    run_generation: int = 0
    resume_from: str | None = None  # checkpoint directory
    restored: frozenset[int] = frozenset()  # groups that it keeps and the prompt stage leaves to the trainer
    slots: str = ""  # directory for the weight slots; none in supervised training
    # Of a process that takes the place of one that was lost, while the run goes on:
    restarts: int = 0  # how many there were before it
    first_step: int = 0  # with which this start of the run began
    admitted: int = 0  # groups by then, of which those that are not `open` have ended
    open: frozenset[int] = frozenset()
    repeat: tuple[int, ...] = ()  # groups of the step that was reported and is in no checkpoint, in their order


class GenerateOptions(Struct, frozen=True, tag="generate"):
    """What a replica has to know of the model before it asks for anything."""

    max_context: int = 1 << 30
    vocab_size: int | None = None  # a real SGLang server ends with all its requests when it is sent another token id
    lives: tuple[int, ...] = ()  # steps from which this run was started, each time; the last one is this time


StageOptions = TrainOptions | GenerateOptions
