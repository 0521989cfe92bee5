"""Errors of training backends: one small tree. Each message names the key, the value, the rule and the cure.

TrainError
├── CheckpointUnavailable   the model to start from cannot be loaded
├── TrainStateUnreadable    a saved training state is missing, incomplete or of another model
├── UnsupportedModel        the model's output cannot be reproduced from its parts
├── InvalidSequence         a sequence contradicts itself or the model
├── BackendMisuse           calls in an order that has no meaning
└── TrainConfigInvalid      options that do not fit together
"""

from __future__ import annotations


class TrainError(RuntimeError):
    """Base of all errors of `models.train`."""


class CheckpointUnavailable(TrainError):
    """No Hugging Face checkpoint could be loaded from the given path or hub id."""


class TrainStateUnreadable(TrainError):
    """A directory does not hold a training state of this model."""


class UnsupportedModel(TrainError):
    """The model needs something that this backend does not do."""


class InvalidSequence(TrainError):
    """A sequence handed over for training is inconsistent."""


class BackendMisuse(TrainError):
    """The backend's methods were called in an order that has no meaning."""


class TrainConfigInvalid(TrainError):
    """Options of the trainer contradict one another."""


def first_line(error: BaseException) -> str:
    """Of what an error says: the rest is often advice for another caller."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
