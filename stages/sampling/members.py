"""The members of a request, handed over one by one."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from stages.sampling.results import Chunk, SampleResult

T = TypeVar("T", SampleResult, SampleResult | Chunk)


class Members(Generic[T]):
    """The members of a request, in the order in which they end; with chunks, what comes of them before that too."""

    def __init__(self, n: int) -> None:
        self.left = n
        self._queue: asyncio.Queue[tuple[int, T]] = asyncio.Queue()

    def put(self, index: int, item: T) -> None:
        self._queue.put_nowait((index, item))

    def __aiter__(self) -> Members[T]:
        return self

    async def __anext__(self) -> tuple[int, T]:
        if not self.left:
            raise StopAsyncIteration
        index, item = await self._queue.get()
        self.left -= isinstance(item, SampleResult)
        return index, item
