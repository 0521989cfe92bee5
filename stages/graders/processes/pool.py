"""A pool of grader processes: many requests in, as many grades out, whatever the graders do.

Requests travel in chunks, sized so that a chunk takes some ten milliseconds. When a process hangs or dies, the item it
was working on is blamed, tried again alone and then failed; the others of its chunk are graded again elsewhere. Graders
are therefore pure functions: one may run twice for the same sample. A text that keeps a grader busy until its deadline
is wrong at once, where the grader says so (`Grader.wrong`): it would do it again. A process that died, or had no
processor to run on, is never the text's fault.

Invariants: as many grades as requests, in their order; an item is blamed at most `retries + 1` times; a grader that
raises, hangs or dies fails its own item only; no process is started before it is needed, none outlives the pool.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from stages.graders.errors import PoolError
from stages.graders.grade import Grade, GradeRequest, failed
from stages.graders.processes.process import ChunkResult, Fault, GraderProcess
from stages.graders.registry import grade_request, is_import_path, listed_grader, refusal

CHUNK = 32
RECYCLE_AFTER = 1000  # items of graders that are not cheap built-in ones: libraries keep growing caches
MEMORY_BYTES = 8 << 30
_CHUNK_S = 0.02
_START_ATTEMPTS = 3
_YIELD_EVERY = 128


class GraderPool:
    """`workers` processes that grade with a deadline for each item; 0 grades cheap built-in graders in this process.

    Use as an async context manager. `memory_bytes` limits the address space of a process (0 = no limit).
    """

    def __init__(
        self,
        workers: int,
        deadline_s: float,
        retries: int = 1,
        *,
        chunk: int = CHUNK,
        recycle_after: int = RECYCLE_AFTER,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._workers = workers
        self._deadline_s = deadline_s
        self._retries = retries
        self._chunk = chunk
        self._recycle_after = recycle_after
        self._memory_bytes = memory_bytes
        self._slots = asyncio.Semaphore(max(1, workers))
        self._idle: list[GraderProcess] = []  # a stack: what is not needed is never started
        self._busy: set[GraderProcess] = set()
        self._seconds: dict[str, float] = {}  # per item and grader, running mean
        self._open = False

    async def __aenter__(self) -> GraderPool:
        self._open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        ending = [*self._idle, *self._busy]
        self._idle.clear()
        for worker in ending:
            await worker.kill()

    async def grade_many(self, items: Sequence[GradeRequest]) -> list[Grade]:
        """Grade all items, in order. Raises PoolError only if no process can be started or the pool is closed."""
        if not self._open:
            raise PoolError("the grader pool is not open; enter it with 'async with' first")
        results: list[Grade | None] = [None] * len(items)
        if not self._workers:
            await self._grade_here(items, results)
        else:
            size = self._chunk_size(items)
            starts = range(0, len(items), size)
            if len(starts) == 1:
                await self._grade_chunk(items, range(len(items)), results)
            else:
                chunks = [range(start, min(start + size, len(items))) for start in starts]
                await self._grade_chunks(items, chunks, results)
        return [grade if grade is not None else failed("the grader gave no grade") for grade in results]

    async def _grade_chunks(
        self, items: Sequence[GradeRequest], chunks: Sequence[range], results: list[Grade | None]
    ) -> None:
        """All chunks at once. Ends when the last one is graded."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for positions in chunks:
                    tasks.create_task(self._grade_chunk(items, positions, results))
        except BaseExceptionGroup as group:
            broken, other = group.split(PoolError)
            if broken is None or other is not None:
                raise
            raise broken.exceptions[0] from None  # one reason is enough: no process can be started

    async def _grade_here(self, items: Sequence[GradeRequest], results: list[Grade | None]) -> None:
        for position, item in enumerate(items):
            if position % _YIELD_EVERY == _YIELD_EVERY - 1:
                await asyncio.sleep(0)
            results[position] = _grade_in_stage(item)

    def _chunk_size(self, items: Sequence[GradeRequest]) -> int:
        """Items per round trip: an even share while the cost is unknown, then as many as fit the chunk's time."""
        if not items:
            return 1
        share = -(-len(items) // self._workers)
        known = [self._seconds.get(name) for name in {item.grader for item in items}]
        slowest = max((seconds for seconds in known if seconds is not None), default=0.0)
        if None in known:
            return max(1, min(self._chunk, share))
        if slowest * len(items) < _CHUNK_S / 10:
            return self._chunk  # cheaper than a second round trip
        return max(1, min(self._chunk, share, int(_CHUNK_S / slowest)))

    async def _grade_chunk(
        self, items: Sequence[GradeRequest], positions: Sequence[int], results: list[Grade | None]
    ) -> None:
        """Waits for a free process, then for its grades or its end; each round settles or blames at least one item."""
        pending = deque([list(positions)])
        attempts: dict[int, int] = {}
        while pending:
            batch = pending.popleft()
            chunk = [items[position] for position in batch]
            async with self._worker() as worker:
                result = await worker.grade(chunk, self._deadline_s)
                worker.served += _wear(chunk[: len(result.grades)])
            for position, grade in zip(batch, result.grades, strict=False):
                results[position] = grade
            self._learn(chunk, result)
            rest = batch[len(result.grades) :]
            if result.fault is not None:
                culprit = batch[result.fault.position]
                rest.remove(culprit)
                attempts[culprit] = attempts.get(culprit, 0) + 1
                verdict = self._blame(result.fault, attempts[culprit], items[culprit])
                if verdict is None:
                    pending.append([culprit])
                else:
                    results[culprit] = verdict
            if rest:
                pending.appendleft(rest)

    def _blame(self, fault: Fault, attempts: int, item: GradeRequest) -> Grade | None:
        """The grade of an item that ended a process, or None if it is to be tried again."""
        if fault.kind == "timeout":
            grader = listed_grader(item.grader)  # an overrun of the user's own is not the text's fault
            if fault.busy and grader is not None and grader.wrong is not None:
                return Grade(grader.wrong, False, status="timeout")
        if attempts <= self._retries:
            return None
        tries = "" if attempts == 1 else f", in {attempts} attempts"
        return failed(fault.reason + tries, "timeout" if fault.kind == "timeout" else "error")

    def _learn(self, chunk: list[GradeRequest], result: ChunkResult) -> None:
        if not result.grades or result.fault is not None:
            return
        name = chunk[0].grader
        seconds = result.seconds / len(result.grades)
        self._seconds[name] = 0.8 * self._seconds.get(name, seconds) + 0.2 * seconds

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[GraderProcess]:
        """Waits for a slot (freed by another chunk), and starts a process if none is idle."""
        async with self._slots:
            worker = self._take_idle() or await self._start()
            self._busy.add(worker)
            clean = False
            try:
                yield worker
                clean = True
            finally:
                self._busy.discard(worker)
                if clean and self._open and worker.usable and worker.served < self._recycle_after:
                    self._idle.append(worker)
                else:
                    await worker.kill()

    def _take_idle(self) -> GraderProcess | None:
        while self._idle:
            worker = self._idle.pop()
            if worker.usable:
                return worker
        return None

    async def _start(self) -> GraderProcess:
        for attempt in range(1, _START_ATTEMPTS + 1):
            if not self._open:
                raise PoolError("the grader pool was closed while grading")
            try:
                return await GraderProcess.start(self._memory_bytes)
            except PoolError:
                if attempt == _START_ATTEMPTS:
                    raise
        raise PoolError("no grader process could be started")


def _wear(graded: list[GradeRequest]) -> int:
    """How many of the items count towards recycling: cheap built-in graders leave nothing behind."""
    return sum(_leaves_traces(item.grader) for item in graded)


def _leaves_traces(grader: str) -> bool:
    found = listed_grader(grader)
    return is_import_path(grader) if found is None else not found.in_stage


def _grade_in_stage(item: GradeRequest) -> Grade:
    grader = listed_grader(item.grader)
    if grader is not None and grader.in_stage:
        return grade_request(item)
    return failed(refusal(item.grader) or _needs_process(item.grader))


def _needs_process(grader: str) -> str:
    return f"grader {grader!r} runs only in a grader process; set --reward-workers to 1 or more (it is 0)"
