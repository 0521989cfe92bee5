"""What can be wrong with environments and agents.

AgentsError
├── ChatFormatError     of chat_formats: a conversation cannot be written in a model's format
└── EnvironmentFailed   an episode cannot go on, or an environment cannot be hosted; the text is the rollout's reason
"""

from __future__ import annotations


class AgentsError(Exception):
    """Base of everything that `stages.agents` raises on purpose."""


class EnvironmentFailed(AgentsError):
    """An episode cannot go on, or an environment cannot be hosted."""
