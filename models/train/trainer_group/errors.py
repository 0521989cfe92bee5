"""What is wrong with a trainer group itself, beside what its trainers raise. No torch.

TrainerGroupError
├── TrainerGroupClosed      the backend was closed while it waited
├── RanksDisagree           ranks went different ways
├── TrainerGroupDiverged    a repeated call went another way than the first time
└── StageGone               the train stage ended without ending its trainer group
"""

from __future__ import annotations


class TrainerGroupError(RuntimeError):
    """Base of what is wrong with the trainer group itself."""


class TrainerGroupClosed(TrainerGroupError):
    """The backend was closed while it waited for its trainer group."""


class RanksDisagree(TrainerGroupError):
    """Some ranks raised an error and others did not: their states differ from now on."""


class StageGone(TrainerGroupError):
    """The stage closed the connection without ending its trainer group."""


class TrainerGroupDiverged(TrainerGroupError):
    """A call that succeeded did not succeed when it was repeated after a loss."""
