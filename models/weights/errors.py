"""What can go wrong with weights by version. Each message names the slot, the value, the rule and the cure.

WeightsError
├── TornWeights          the slot was being written, or holds another version by now
├── DigestMismatch       the bytes are not those that were announced
├── LayoutMismatch       tensors offered for writing are not those that the slot was laid out for
├── SourceError          the checkpoint that the slots are modelled on cannot serve
├── GroupError           a process group with an engine could not be made, or broke
├── DeltaError           a difference cannot be applied, or the chain to a version is broken
├── RouteUnfit           an engine cannot be reached by the announced route
├── NotVerified          an engine does not carry what it was given: other label, other checksum
├── NotBrought           the fetcher of an engine's node could not bring them
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


class GroupError(WeightsError):
    """A process group with the ranks of an engine could not be made, or broke. Make a new one."""


class DeltaError(WeightsError):
    """A difference cannot be applied, or the chain of differences to a version is broken. Take the full weights."""


class RouteUnfit(WeightsError):
    """An engine cannot be reached by the announced route. Choose another."""


class NotVerified(WeightsError):
    """An engine does not carry what it was given. It gets no request until it does."""


class NotBrought(WeightsError):
    """The fetcher of an engine's node could not bring the weights, or not put them in. Order them again."""
