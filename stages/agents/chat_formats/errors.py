"""What can be wrong with a chat format."""

from __future__ import annotations


class ChatFormatError(Exception):
    """A conversation cannot be written in this format, or the format cannot be used for several turns at all."""
