"""pass@k, best@k and mean@n of a set of groups, without bias: the numbers that k more rollouts would have given.

With n rollouts of a prompt, c of them correct, the chance that k of them drawn without replacement hold a correct one
is 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv:2107.03374). For rewards that are no verdict the same draw gives the
expected maximum. k runs over the powers of two up to n; a prompt with fewer than k rollouts is left out of that k.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from stages.messages import Sample
from stages.rollouts import closing, raw_rewards, verdicts


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n rollouts, `correct` of them right, hold a right one. Needs 1 <= k <= n."""
    _check(n, k)
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Expected maximum of k rewards drawn without replacement. Needs 1 <= k <= n.

    The i-th smallest of n is the maximum of C(i - 1, k - 1) of the C(n, k) draws.
    """
    n = len(rewards)
    _check(n, k)
    draws = math.comb(n, k)
    return sum(math.comb(i, k - 1) / draws * reward for i, reward in enumerate(sorted(rewards)))


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, but only 1 to {n} of {n} rollouts can be drawn; choose such a k")


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, ... up to n."""
    return [1 << i for i in range(n.bit_length())] if n > 0 else []


def estimates(groups: Iterable[Sequence[Sample]]) -> dict[str, float]:
    """`pass@k` and `mean@n` over the groups whose rollouts all have a verdict; `best@k` and `mean@n` if none has.

    n is the size of the largest group. Groups without rollouts are left out.
    """
    passes: list[tuple[int, int]] = []
    scores: list[Sequence[float]] = []
    for samples in groups:
        size, known = len(closing(samples)), verdicts(samples)
        if size and len(known) == size:
            passes.append((size, sum(known)))
        elif size:
            scores.append(raw_rewards(samples).tolist())
    if passes:
        largest = max(n for n, _ in passes)
        found = {f"pass@{k}": fmean([pass_at_k(n, c, k) for n, c in passes if n >= k]) for k in powers_of_two(largest)}
        return found | {f"mean@{largest}": fmean([c / n for n, c in passes])}
    largest = max(map(len, scores), default=0)
    found = {f"best@{k}": fmean([best_at_k(s, k) for s in scores if len(s) >= k]) for k in powers_of_two(largest)}
    return found | ({f"mean@{largest}": fmean([sum(s) / len(s) for s in scores])} if scores else {})
