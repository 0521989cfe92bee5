"""Graders that the tests import by path: well-behaved and hostile ones."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

Row = Mapping[str, object]


def word_count(response: str, label: str | None, metadata: Row) -> float:
    return float(len(response.split()))


def detailed(response: str, label: str | None, metadata: Row) -> dict[str, object]:
    parts = {"format": 1, "level": metadata["level"]}
    return {"score": 0.5, "is_correct": response == label, "extracted": response, **parts}


def behave(response: str, label: str | None, metadata: Row) -> float:
    """Do what the response says; anything else scores its length."""
    match response:
        case "hang":
            time.sleep(3600)
        case "spin":
            while True:
                pass
        case "raise":
            raise ValueError("no such answer")
        case "exit":
            sys.exit(3)
        case "os._exit":
            os._exit(7)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "memory":
            return float(len(bytearray(64 << 30)))
        case "nan":
            return float("nan")
        case "surrogate":
            raise ValueError("\ud800 is not text")
        case "print":
            print("noise " * 10_000)  # noqa: T201 - what a careless grader does
            os.write(1, b"raw noise\n")
        case "recurse":
            return behave("recurse", label, metadata) + 1.0
    return float(len(response))


def note(response: str, label: str | None, metadata: Row) -> float:
    """Write down the process and the response."""
    with Path(str(metadata["log"])).open("a") as log:
        log.write(f"{os.getpid()} {response}\n")
    if response == "hang":
        time.sleep(3600)
    return 1.0


def daemon(response: str, label: str | None, metadata: Row) -> float:
    """Leave a daemon behind, as a server that a careless grader starts, write down its number, and go on as told."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.setsid()
            os.closerange(3, write)
            Path(str(metadata["log"])).write_text(str(os.getpid()))
            os.write(write, b".")
            time.sleep(3600)
        os._exit(0)
    os.read(read, 1)
    match response:
        case "hang":
            time.sleep(3600)
        case "crash":
            os._exit(7)
    return 1.0


def stop_parent_watch(response: str, label: str | None, metadata: Row) -> float:
    """Say which process this is, then hang for good, deaf to polite signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(str(metadata["log"])).write_text(str(os.getpid()))
    time.sleep(3600)
    return 0.0


async def asynchronous(response: str, label: str | None, metadata: Row, prompt: str) -> dict[str, object]:
    await asyncio.sleep(0)
    return {"score": 1.0, "extracted": prompt + response}


def with_prompt(response: str, label: str | None, metadata: Row, *, prompt: str = "") -> dict[str, object]:
    return {"score": 1.0, "extracted": prompt + response}


def any_keywords(response: str, label: str | None, metadata: Row, **more: str) -> dict[str, object]:
    return {"score": 1.0, "extracted": more["prompt"] + response}


async def async_group(responses: list[str], label: str | None, metadata: Row, prompt: str) -> list[float]:
    return [float(len(prompt + response)) for response in responses]


async def async_detailed(response: str, label: str | None, metadata: Row) -> object:
    return metadata["level"]


def two_arguments(response: str, label: str | None) -> float:
    return 0.0


def prompt_first(prompt: str, response: str, label: str | None) -> float:
    return 0.0


def two_more(response: str, label: str | None, metadata: Row, prompt: str, extra: int) -> float:
    return 0.0


not_callable = 3


def rank_by_length(responses: list[str], label: str | None, metadata: Row) -> list[object]:
    """A group grader: 0 for the shortest, 1 for the longest, evenly in between."""
    members = metadata["group_members"]
    assert isinstance(members, list)
    order = sorted(range(len(responses)), key=lambda k: len(responses[k]))
    failed = sum(member["status"] == "failed" for member in members)
    parts = {"seen": len(responses), "members": len(members), "failed": failed}
    return [{"score": order.index(k) / max(1, len(order) - 1), **parts} for k in range(len(responses))]


def too_few(responses: list[str], label: str | None, metadata: Row) -> list[float]:
    return [1.0]
