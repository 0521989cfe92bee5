"""Random numbers that are pure functions of (seed, position): counter-based hashing, no generator state.

A sample therefore depends on its own seed only, never on which requests share its batch, and a response that was
aborted and sent again with the same seed continues with the same noise: `position` counts from the start of the prompt.
The mixer is SplitMix64's finaliser (Steele, Lea, Flood 2014), written out here and nowhere else, not taken from a
library's generator: runs resumed under another numpy version draw the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # the processes of graders draw numbers too, and start without numpy
    import numpy as np
    import numpy.typing as npt

MASK: Final = (1 << 64) - 1
GOLDEN: Final = 0x9E3779B97F4A7C15
MIX_1: Final = 0xBF58476D1CE4E5B9
MIX_2: Final = 0x94D049BB133111EB


def mix(x: int) -> int:
    """Bijective mixing of 64 bits."""
    x &= MASK
    x = ((x ^ (x >> 30)) * MIX_1) & MASK
    x = ((x ^ (x >> 27)) * MIX_2) & MASK
    return x ^ (x >> 31)


def mix64(x: int) -> int:
    """The first output of SplitMix64 with this seed: unlike `mix`, it does not keep 0."""
    return mix(x + GOLDEN)


def mix_array(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`mix` of each element: unsigned arrays wrap as the mask does."""
    import numpy as np

    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def sample_seed(seed: int, sample: int) -> int:
    """Seed of the `sample`-th of n responses to one prompt. Sample 0 has the seed itself, so that one sample of a group
    can be continued alone by sending its own seed."""
    return seed if sample == 0 else mix(mix(seed) + sample * GOLDEN) >> 1


def uniform(seed: int, position: int) -> float:
    """Uniform in [0, 1) with 53 bits."""
    return (mix(mix(seed) + position * GOLDEN) >> 11) * 2.0**-53


def uniforms(seed: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """`uniform(seed, p)` for each p."""
    return mixed_uniforms(mix(seed), positions)


def mixed_uniforms(
    mixed_seeds: int | npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """`uniform` of each pair of a seed, `mix`ed already, and a position."""
    import numpy as np

    mixed = mix_array(positions.astype(np.uint64) * np.uint64(GOLDEN) + np.asarray(mixed_seeds, dtype=np.uint64))
    return (mixed >> 11).astype("float64") * 2.0**-53
