"""The one error of a configuration: everything that is wrong with it, listed at once.

Invariant: each fault is one sentence that names the key, the value, the rule and the cure.
"""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(Exception):
    """The configuration cannot be used. `faults`: one sentence each, in the order found, without repetition."""

    def __init__(self, faults: Sequence[str] | str) -> None:
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(dict.fromkeys(faults))
        super().__init__("\n".join(self.faults))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return (ConfigError, (self.faults,))
