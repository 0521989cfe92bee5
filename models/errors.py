"""Errors of algorithms, training backends and weights. Each message names the key, the value, the rule and the cure.

TrainError
├── CheckpointUnavailable   the model to start from cannot be loaded
├── TrainStateUnreadable    a saved training state is missing, incomplete or of another model
├── UnsupportedModel        the model's output cannot be reproduced from its parts
├── InvalidSequence         a sequence contradicts itself or the model
├── BackendMisuse           calls in an order that has no meaning
└── TrainConfigInvalid      options that do not fit together

AlgorithmError
├── InsufficientMembers     a group too small for its estimator
├── InconsistentGroup       rewards of one group that contradict one another
├── MissingColumn           a term of the loss is on and its input was not given
└── UnknownAlgorithm        a name or import path that leads nowhere

WeightsError
├── TornWeights             the slot was being written, or holds another version by now
├── DigestMismatch          the bytes are not those that were announced
├── LayoutMismatch          tensors offered for writing are not those that the slot was laid out for
├── SourceError             the checkpoint that the slots are modelled on cannot serve
├── GroupError              a process group with an engine could not be made, or broke
├── DeltaError              a difference cannot be applied, or the chain to a version is broken
├── RouteUnfit              an engine cannot be reached by the announced route
├── NotVerified             an engine does not carry what it was given: wrong label or checksum
├── NotBrought              the fetcher of an engine's node could not bring them
└── SlotDirectoryError      the slot directory cannot be made, or belongs to a live run
    └── SlotSpaceError      no room for two slots
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


class AlgorithmError(ValueError):
    """Base of all errors of `models.algorithms`."""


class InsufficientMembers(AlgorithmError):
    """A group-relative estimator was given fewer than two rollouts: there is nothing to compare."""


class InconsistentGroup(AlgorithmError):
    """Lengths or rewards of one group contradict one another, or a reward is not finite."""


class MissingColumn(AlgorithmError):
    """A term of the loss is on, and the log-probs or entropies that it reads were not given."""


class UnknownAlgorithm(AlgorithmError):
    """A name is in no table and in no file, or an import path does not lead to a function."""


class WeightsError(RuntimeError):
    """Base of all errors of this package."""


class TornWeights(WeightsError):
    """The slot was being written, or holds another version by now. Fetch the newest announcement."""


class DigestMismatch(WeightsError):
    """The bytes are not those that were announced. Keep the old weights and fetch again."""


class LayoutMismatch(WeightsError):
    """The tensors offered are not those that the slot was laid out for."""


class SourceError(WeightsError):
    """The checkpoint that the slots are modelled on cannot serve."""


class SlotDirectoryError(WeightsError):
    """The slot directory cannot be made, or belongs to a live run."""


class SlotSpaceError(SlotDirectoryError):
    """No room for two slots."""


class GroupError(WeightsError):
    """A process group with the ranks of an engine could not be made, or broke. Make a new one."""


class DeltaError(WeightsError):
    """A difference cannot be applied, or the chain of differences to a version is broken. Take the full weights."""


class RouteUnfit(WeightsError):
    """An engine cannot be reached by the announced route. Choose another."""


class NotVerified(WeightsError):
    """An engine does not carry what it was given. It gets no request until it does."""


class NotBrought(WeightsError):
    """The fetcher of an engine's node could not bring the weights, or not put them in. Order them again."""
