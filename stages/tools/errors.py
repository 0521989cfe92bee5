"""What can be wrong with the configured tools. A tool that fails on a call is no exception but an answer.

ToolError
├── UnknownToolError   no tool has this name, or it cannot be imported or offered
└── ToolCallError      a call cannot be carried out; its text becomes the tool's answer
    └── NoAnswer       nobody knows whether it was: there was no answer in time
"""

from __future__ import annotations


class ToolError(Exception):
    """Base of everything that `stages.tools` raises on purpose."""


class UnknownToolError(ToolError):
    """No tool has this name, or it cannot be imported or offered to a model."""


class ToolCallError(ToolError):
    """A call cannot be carried out. The caller gives the text to the model as `error: ...`."""


class NoAnswer(ToolCallError):
    """There was no answer in time, so that nobody knows whether the call was carried out."""
