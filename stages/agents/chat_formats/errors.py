"""What can be wrong with a chat format."""

from __future__ import annotations

from stages.agents.errors import AgentsError


class ChatFormatError(AgentsError):
    """A conversation cannot be written in this format, or the format cannot be used for several turns at all."""
