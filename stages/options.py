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
    first_step: int | None = None  # with which this start of the run began; None: `start_step`
    # Of a trainer that was restarted while the run goes on:
    incarnation: int = 0  # number of restarts before it
    begun: bool = False  # an earlier incarnation reported its first weights
    trained: int = 0  # steps in the ledger: those after `start_step` are trained again
    admitted: int = 0  # groups in the ledger, of which those that are not `open` have ended
    open: frozenset[int] = frozenset()


class GenerateOptions(Struct, frozen=True, tag="generate"):
    """What a replica has to know of the model before it asks for anything."""

    max_context: int = 1 << 30
    vocab_size: int | None = None  # a real SGLang server ends with all its requests when it is sent another token id
    lives: tuple[int, ...] = ()  # steps from which this run was started, each time; the last one is this time


StageOptions = TrainOptions | GenerateOptions
