"""The exceptions that stages raise for the user. Each sentence names the value, the rule and the cure.

StageError
├── BufferOrderError     a custom buffer order gave no waiting group
├── DataSourceError      a custom data source raised, or gave no prompts
├── FilterError          a filter cannot judge a group
│   └── FilterNameError  a filter that does not exist, or whose argument cannot be read
├── NoVerdicts           the curriculum waits for pass rates, and the grader gives none
├── SavedBatchError      a saved rollout batch cannot be trained
├── Starved              group after group was not trained
├── UnprovenPolicy       an engine does not sample with the published weights
└── UntrainableGroup     the rewards of a group do not become advantages; it ends the group, not the run
DataError
├── SourceError          a path, a slice or a file format cannot be used
├── RowError             one row cannot become a prompt (also the error of max_bad_rows)
└── EmptyDataError       no usable prompt is left

InfrastructureError        raised by the user's code: it is tried again

All of them carry one sentence, so that they survive a process boundary.
"""

from __future__ import annotations

from models.errors import UserFault


class StageError(UserFault):
    """Base of all errors here."""


class BufferOrderError(StageError):
    """A buffer order of the user's own raised, or gave no index of a waiting group."""


class DataSourceError(StageError):
    """A data source of the user's own raised, or gave no prompts."""


class FilterError(StageError):
    """A filter cannot judge a group, or cannot be built."""


class FilterNameError(FilterError):
    """A filter that does not exist, or whose argument cannot be read."""


class NoVerdicts(StageError):
    """The curriculum goes by pass rates, and the grader does not say which responses are correct."""


class SavedBatchError(StageError):
    """A saved rollout batch cannot be read, or not be trained with this configuration."""


class Starved(StageError):
    """Group after group was not trained."""


class UnprovenPolicy(StageError):
    """An engine does not sample with the published weights, also after a second load and after a restart."""


class UntrainableGroup(StageError):
    """A group's rewards do not become advantages: its own fault, or that of the function that should have done it."""


class DataError(UserFault):
    """Base of everything that `stages.data` raises on purpose."""


class SourceError(DataError):
    """A path, a slice or a file format cannot be used."""


class RowError(DataError):
    """One row cannot become a prompt."""


class EmptyDataError(DataError):
    """No usable prompt is left after slicing and checking."""


class InfrastructureError(Exception):
    """What an environment or a stage of the user's own needs has failed, and the model did not cause it.

    An episode is restarted on a fresh worker, up to a limit; it never gets reward 0 for such a failure. If many
    episodes fail like this, the environment is paused, and the terminal shows it. A message of a `MapStage` waits.
    """
