"""What the jail raises."""

from __future__ import annotations


class IsolationError(Exception):
    """This machine cannot lock a process down."""
