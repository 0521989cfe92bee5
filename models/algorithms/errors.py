"""Errors of the algorithms: one small tree. Each message names the value, the rule and the cure.

AlgorithmError
├── InsufficientMembers   a group too small for its estimator
├── InconsistentGroup     rewards of one group that contradict one another
├── MissingColumn         a term of the loss is on and its input was not given
└── UnknownAlgorithm      a name or import path that leads nowhere
"""

from __future__ import annotations


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
