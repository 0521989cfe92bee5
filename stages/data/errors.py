"""What can be wrong with the prompt data, as one tree.

    DataError
    ├── SourceError      a path, a slice or a file format cannot be used
    ├── RowError         one row cannot become a prompt (also the error of strict_data)
    └── EmptyDataError   no usable prompt is left

All of them carry one sentence, so that they survive a process boundary.
"""

from __future__ import annotations


class DataError(Exception):
    """Base of everything that `stages.data` raises on purpose."""


class SourceError(DataError):
    """A path, a slice or a file format cannot be used."""


class RowError(DataError):
    """One row cannot become a prompt."""


class EmptyDataError(DataError):
    """No usable prompt is left after slicing and checking."""
