"""What can go wrong with weights by version. Each message names the slot, the value, the rule and the cure.

WeightsError
├── TornWeights          the slot was being written, or holds another version by now
├── DigestMismatch       the bytes are not those that were announced
├── LayoutMismatch       tensors offered for writing are not those that the slot was laid out for
├── SourceError          the checkpoint that the slots are modelled on cannot serve
└── SlotDirectoryError   the slot directory cannot be made, or belongs to a live run
    └── SlotSpaceError   no room for two slots
"""

from __future__ import annotations


class WeightsError(RuntimeError):
    """Base of all errors of this package."""


class TornWeights(WeightsError):
    """The slot was being written, or holds another version by now. Fetch the newest announcement."""


class DigestMismatch(WeightsError):
    """The bytes are not those that were announced. Keep the old weights and fetch again."""


class LayoutMismatch(WeightsError):
    """The tensors offered are not those that the slot was laid out for."""


class SourceError(WeightsError):
    """The checkpoint that the slots are modelled on cannot serve."""


class SlotDirectoryError(WeightsError):
    """The slot directory cannot be made, or belongs to a live run."""


class SlotSpaceError(SlotDirectoryError):
    """No room for two slots."""
