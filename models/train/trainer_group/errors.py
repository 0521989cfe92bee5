"""What is wrong with a gang itself, beside what its trainers raise. No torch.

GangError
├── GangClosed      the backend was closed while it waited
├── GangDisagrees   ranks went different ways
├── GangDiverged    a repeated call went another way than the first time
└── StageGone       the train stage ended without ending its gang
"""

from __future__ import annotations


class GangError(RuntimeError):
    """Base of what is wrong with the gang itself."""


class GangClosed(GangError):
    """The backend was closed while it waited for its gang."""


class GangDisagrees(GangError):
    """Some ranks raised an error and others did not: their states differ from now on."""


class StageGone(GangError):
    """The stage closed the connection without ending its gang."""


class GangDiverged(GangError):
    """A call that succeeded did not succeed when it was repeated after a loss."""
