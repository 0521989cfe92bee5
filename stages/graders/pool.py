"""A pool of grader processes: one grade for each request, even if graders hang or crash.

Cheap built-in graders (`Grader.in_stage`) run here at once. Every other item is one call of a worker process. If the
process hangs or dies, its item is tried again and then failed. Graders are therefore pure functions: a grader may run
twice for the same sample. A text that keeps a grader with a `Grader.wrong` busy until its deadline is wrong at once: a
second attempt would end the same way. A process that died, or had no processor to run on, is never the text's fault.

    python -m stages.graders.pool SOCKET_FD PARENT_PID     one of the processes; MEMORY_BYTES and settings on stdin

A call is the name of a grader, to import it outside of any deadline, or a GradeRequest, whose value is its Grade. Calls
run one after another, without an event loop: an async grader brings its own.

Invariants: as many grades as requests, in their order; an item is blamed at most `retries + 1` times; a grader that
raises, hangs or dies fails its own item only; no process is started before it is needed, none outlives the pool.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final, Literal

import msgspec
from msgspec import Struct

from configs.schema import Config
from models.slime_arguments import slime_arguments
from stages.graders.grade import Grade, GradeRequest, PoolError, UnknownGraderError, clean, failed
from stages.graders.registry import ARGS, find_grader, grade_request, listed_grader, refusal
from stages.graders.synthetic import IN_WORKER_VARIABLE
from stages.workers.guard import read_arguments
from stages.workers.process import LOAD_LIMIT_S, CallFailed, WorkerLost, WorkerProcess
from stages.workers.serve import become_worker, serve_in_turn

RECYCLE_AT: Final = 1000  # items of a process: libraries keep growing caches
MEMORY_BYTES: Final = 8 << 30  # limit of a process
_START_ATTEMPTS: Final = 3
_YIELD_EVERY: Final = 128
_BUSY_SHARE: Final = 0.2  # of the deadline; below, the machine was too busy to blame the text


class Fault(Struct, frozen=True):
    """Why a process gave no grade. `busy`, of a timeout: it had a processor to grade the item with."""

    kind: Literal["timeout", "crash"]
    reason: str
    busy: bool = False


class _Seat:
    """A worker process, and how many items its current incarnation has graded."""

    def __init__(self, settings: str) -> None:
        self.worker = WorkerProcess("stages.graders.pool", (MEMORY_BYTES, settings))
        self.served = 0
        self._loaded: set[str] = set()
        self._incarnation = 0

    async def ready(self) -> None:
        """Waits until a process serves. Raises PoolError after some attempts to start one."""
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                await self.worker.ready()
                break
            except WorkerLost as lost:
                if attempt == _START_ATTEMPTS:
                    raise PoolError(
                        f"a grader process ended at its start ({lost.ending or lost}); see its error output; "
                        "--reward-workers 0 grades in the stage instead"
                    ) from None
        if self.worker.incarnation != self._incarnation:
            self._incarnation, self.served, self._loaded = self.worker.incarnation, 0, set()

    async def grade(self, item: GradeRequest, deadline_s: float) -> Grade | Fault:
        """Grade an item. After a fault the process must not be used again."""
        loading = item.grader not in self._loaded
        overrun = f"importing the grader took longer than {LOAD_LIMIT_S:g} s"
        used_s = 0.0
        try:
            if loading:
                async with asyncio.timeout(LOAD_LIMIT_S):
                    await self.worker.call(clean(item.grader))
                self._loaded.add(item.grader)
            overrun = f"no grade within {deadline_s:g} s (--reward-deadline-s)"
            loading, used_s = False, self.worker.cpu_s()
            async with asyncio.timeout(deadline_s):
                value = await self._call(item)
        except TimeoutError:
            busy = not loading and self.worker.cpu_s() - used_s > _BUSY_SHARE * deadline_s
            return Fault("timeout", overrun, busy)
        except WorkerLost as lost:
            return Fault("crash", f"the grader process died ({lost.ending or lost})")
        except CallFailed as error:
            return failed(str(error))
        self.served += 1
        return msgspec.msgpack.decode(value, type=Grade)

    async def _call(self, item: GradeRequest) -> msgspec.Raw:
        """Send an item; only an item that cannot be encoded is repaired."""
        try:
            return await self.worker.call(item)
        except UnicodeEncodeError:
            texts = {
                name: clean(value) for name, value in msgspec.structs.asdict(item).items() if isinstance(value, str)
            }
            repaired = msgspec.structs.replace(item, **texts, responses=tuple(map(clean, item.responses)))
            return await self.worker.call(repaired)


class GraderPool:
    """`workers` processes with a deadline for each item; 0 refuses all but cheap built-in graders.

    Use as an async context manager. `config`: the run's, which functions of slime's signature find in `args`.
    """

    def __init__(
        self,
        workers: int,
        deadline_s: float,
        retries: int = 1,
        *,
        recycle_after: int = RECYCLE_AT,
        config: Config | None = None,
    ) -> None:
        settings = msgspec.msgpack.encode(config or Config()).hex()
        self._deadline_s, self._retries, self._recycle_after = deadline_s, retries, recycle_after
        self._slots = asyncio.Semaphore(workers)
        self._seats = [_Seat(settings) for _ in range(workers)]
        self._idle = list(self._seats)  # a stack: a process that is not needed is never started
        self._open = False

    async def __aenter__(self) -> GraderPool:
        self._open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        async with asyncio.TaskGroup() as ends:
            for seat in self._seats:
                ends.create_task(seat.worker.close())

    async def grade_many(self, items: Sequence[GradeRequest]) -> list[Grade]:
        """Grade all items, in order. Raises PoolError only if no process can be started or the pool is closed."""
        if not self._open:
            raise PoolError("the grader pool is not open; enter it with 'async with' first")
        results: list[Grade | None] = [None] * len(items)
        pending: list[int] = []  # items for processes
        for position, item in enumerate(items):
            if position % _YIELD_EVERY == _YIELD_EVERY - 1:
                await asyncio.sleep(0)
            grader = listed_grader(item.grader)
            if grader is not None and grader.in_stage:
                results[position] = grade_request(item)
            elif self._seats:
                pending.append(position)
            else:
                alone = "runs only in a grader process; set --reward-workers to 1 or more (it is 0)"
                results[position] = failed(refusal(item.grader) or f"grader {item.grader!r} {alone}")
        queue = iter(pending)

        async def grade_queue() -> None:
            for position in queue:
                results[position] = await self._grade(items[position])

        with pool_error_alone():
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(len(pending), len(self._seats))):
                    tasks.create_task(grade_queue())
        return [grade if grade is not None else failed("the grader gave no grade") for grade in results]

    async def _grade(self, item: GradeRequest) -> Grade:
        """Waits for a free process, then for its grade or its end, until the item is graded or failed."""
        attempts = 0
        while True:
            async with self._seat() as seat:
                outcome = await seat.grade(item, self._deadline_s)
                if isinstance(outcome, Fault) or (outcome.error or "").startswith("MemoryError"):
                    seat.served = self._recycle_after  # leftovers of this grader would fail the next items
            if isinstance(outcome, Grade):
                return outcome
            attempts += 1
            verdict = self._blame(outcome, attempts, item)
            if verdict is not None:
                return verdict

    def _blame(self, fault: Fault, attempts: int, item: GradeRequest) -> Grade | None:
        """The grade of an item that ended a process, or None if it is to be tried again."""
        if fault.kind == "timeout":
            grader = listed_grader(item.grader)  # None for a custom grader: its overrun is not the text's fault
            if fault.busy and grader is not None and grader.wrong is not None:
                return Grade(grader.wrong, False, status="timeout")
        if attempts <= self._retries:
            return None
        tries = "" if attempts == 1 else f", in {attempts} attempts"
        return failed(fault.reason + tries, "timeout" if fault.kind == "timeout" else "error")

    @asynccontextmanager
    async def _seat(self) -> AsyncIterator[_Seat]:
        """Waits for a free process, and starts one if none is idle. Raises PoolError."""
        async with self._slots:
            if not self._open:
                raise PoolError("the grader pool was closed while grading")
            seat, kept = self._idle.pop(), False
            try:
                await seat.ready()
                yield seat
                kept = self._open and seat.served < self._recycle_after
            finally:
                try:
                    if not kept:
                        await seat.worker.close()
                finally:
                    self._idle.append(seat)


@contextmanager
def pool_error_alone() -> Iterator[None]:
    """Raise the first PoolError of a task group alone; its message explains the others."""
    try:
        yield
    except BaseExceptionGroup as group:
        broken = group.subgroup(PoolError)
        raise group if broken is None else broken.exceptions[0] from None


def answer(call: msgspec.Raw) -> Grade | None:
    """In a process: grade a request, or prepare a grader. One that cannot be prepared fails when an item is graded."""
    request = msgspec.msgpack.decode(call, type=str | GradeRequest)
    if isinstance(request, GradeRequest):
        return grade_request(request)
    with suppress(UnknownGraderError):
        prepare = find_grader(request).prepare
        if prepare is not None:
            prepare()
    return None


def main(arguments: list[str]) -> None:
    """Serve until the socket closes. Does not return."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[IN_WORKER_VARIABLE] = "1"
    *numbers, settings = arguments
    config = msgspec.msgpack.decode(bytes.fromhex(settings), type=Config)
    vars(ARGS).update(vars(slime_arguments(config)))
    serve_in_turn(become_worker(*map(int, numbers)), lambda: (answer, None))


if __name__ == "__main__":
    main([*sys.argv[1:], *read_arguments()])
