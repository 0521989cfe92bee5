"""What can be wrong with grading itself, as one tree. A grader that fails on one sample is no exception but a Grade.

GradingError
├── UnknownGraderError   no grader has this name, or its argument is wrong
└── PoolError            worker processes cannot be started, or the pool is not open
"""

from __future__ import annotations


class GradingError(Exception):
    """Base of everything that `stages.graders` raises on purpose."""


class UnknownGraderError(GradingError):
    """No grader has this name, its argument is wrong, or its function cannot be imported."""


class PoolError(GradingError):
    """Worker processes cannot be started, or the pool is not open."""
