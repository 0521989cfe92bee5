"""Graders without judgement, for load and fault tests: length, random, constant, sleep, crash.

Invariant: a draw depends on the request's seed alone, so that a repeated run draws the same. `sleep` and
`crash` score like `random`, so that a load test passes group filters.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial

import msgspec

from models.engines.noise import GOLDEN, mix
from stages.graders.grade import Grade, Grader, GradeRequest

_CALL = re.compile(r"(?P<name>[a-z]+)\((?P<arguments>[^()]*)\)")
IN_WORKER_VARIABLE = "SLUICE_GRADER_WORKER"
SLEEP_FORM = "sleep:SECONDS, sleep:uniform(a,b), sleep:exponential(mean) or sleep:lognormal(median,sigma)"

Draw = Callable[[float, float], float]


def uniform(seed: int, stream: int) -> float:
    """A number in [0, 1) that is a fixed function of (seed, stream)."""
    return (mix(mix(seed + GOLDEN * (stream + 1))) >> 11) * 2.0**-53


def length_grader(argument: str | None) -> Grader:
    """`length:N`: minus the relative distance of the response's length (tokens) from N, clipped to [-1, 0].

    Raises ValueError.
    """
    target = int(argument or "")
    if target < 1:
        raise ValueError("the target must be at least 1 token")
    return Grader(lambda request: Grade(max(-1.0, -abs(request.n_tokens - target) / target)))


def random_grader(argument: str | None) -> Grader:
    """`random` or `random:P`. Raises ValueError."""
    return Grader(partial(grade_random, _probability(argument, 0.5)))


def constant_grader(argument: str | None) -> Grader:
    """`constant:X`: the same score for everything. Raises ValueError."""
    score = float(argument or "")
    if not math.isfinite(score):
        raise ValueError("the score must be finite")
    return Grader(lambda _: Grade(score))


def sleep_grader(argument: str | None) -> Grader:
    """`sleep:DISTRIBUTION`. Raises ValueError."""
    return Grader(partial(grade_sleep, parse_durations(argument or "")), in_stage=False)


def crash_grader(argument: str | None) -> Grader:
    """`crash` or `crash:P`. Raises ValueError."""
    return Grader(partial(grade_crash, _probability(argument, 1.0)), in_stage=False)


def _probability(argument: str | None, default: float) -> float:
    value = default if argument is None else float(argument)
    if not 0.0 <= value <= 1.0:
        raise ValueError("a probability lies between 0 and 1")
    return value


def grade_random(probability: float, request: GradeRequest) -> Grade:
    """1 with the given probability, else 0."""
    won = uniform(request.seed, 0) < probability
    return Grade(float(won), won)


def grade_sleep(draw: Draw, request: GradeRequest) -> Grade:
    """Sleep for a drawn time, then score at random."""
    seconds = draw(uniform(request.seed, 1), uniform(request.seed, 2))
    time.sleep(seconds)
    return msgspec.structs.replace(grade_random(0.5, request), parts={"slept_s": seconds})


def grade_crash(probability: float, request: GradeRequest) -> Grade:
    """Die of a segmentation fault with the given probability (of the seed), else score at random."""
    if uniform(request.seed, 3) < probability:
        if IN_WORKER_VARIABLE not in os.environ:
            raise RuntimeError("crash: kills grader processes only, and this process is none")
        os.kill(os.getpid(), signal.SIGSEGV)
    return grade_random(0.5, request)


def parse_durations(text: str) -> Draw:
    """A function of two uniform numbers that gives seconds. Raises ValueError.

    `0.2` (always), `uniform(a,b)`, `exponential(mean)`, `lognormal(median,sigma)`; all in seconds.
    """
    matched = _CALL.fullmatch(text.replace(" ", ""))
    if matched is None:
        seconds = _seconds(text)
        return lambda _u, _v: seconds
    match matched["name"], [_seconds(part) for part in matched["arguments"].split(",")]:
        case "uniform", [low, high] if low <= high:
            return lambda u, _: low + (high - low) * u
        case "exponential", [mean]:
            return lambda u, _: -mean * math.log(1.0 - u)
        case "lognormal", [median, sigma]:
            return lambda u, v: median * math.exp(sigma * math.sqrt(-2 * math.log(1.0 - u)) * math.cos(2 * math.pi * v))
    raise ValueError(f"{text!r} is no distribution of seconds")


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{text!r} is no number of seconds")
    return value
