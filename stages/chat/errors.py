"""Errors of conversations and tokenizers.

ChatError
├── ChatFormatError   a conversation cannot be written in a model's format
└── TokenizerError    the checkpoint has no usable tokenizer or chat template
"""

from __future__ import annotations


class ChatError(Exception):
    """Base of everything that `stages.chat` raises on purpose."""


class ChatFormatError(ChatError):
    """A conversation cannot be written in this format, or the format cannot be used for several turns at all."""


class TokenizerError(ChatError):
    """The checkpoint has no usable tokenizer or chat template."""
