"""Whole batches by a user's rollout function with slime's signature: `(args, rollout_id, data_source, evaluation)`.

The ledger decides which groups exist. So the function is called for admitted groups: it draws them from
`data_source.get_samples` and returns their samples. Its requests go to one address, recorded in one session.

Invariants: one call at a time; a group that was drawn and not returned fails with that reason; a group that was put
back waits for the next call; an exception of a call, or its deadline, fails the groups that it drew; a drain ends them
as aborted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from configs.schema import Config
from stages.gateway.answers import OpenSession
from stages.gateway.sessions import Session
from stages.generate.generate_functions import GenerateFunctions, NoChat, failure
from stages.messages import PromptGroup, Sample
from stages.rollouts import new_sample
from stages.slime import types as slime
from stages.slime.convert import ReturnedError, finite_numbers, given_sample, returned_rollout
from stages.slime.hooks import rollout_function

log = logging.getLogger("sluice.generate")

LINGER_S: Final = 0.5  # maximal gap between groups that are admitted together


@dataclass(eq=False)
class _Drawn:
    """A group in the hands of the function."""

    group: PromptGroup
    samples: Sequence[Sample]
    ended: Callable[..., None]
    done: asyncio.Event = field(default_factory=asyncio.Event)


class AdmittedGroups:
    """The `data_source` of one call, which gives the waiting groups. The function calls it in its own thread."""

    def __init__(self, config: Config, waiting: deque[_Drawn], changed: threading.Condition) -> None:
        """`waiting` is shared by all calls, and `changed` guards it."""
        self._config, self._waiting, self._changed = config, waiting, changed
        self._drawn: list[_Drawn] = []
        self._over = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._waiting)

    def end(self) -> list[_Drawn]:
        """End the call: the groups that were drawn and not put back. A function that still runs gets no more groups."""
        with self._changed:
            self._over = True
            return self._drawn

    def get_samples(self, num_samples: int) -> list[list[slime.Sample]]:
        """At most `num_samples` groups. Raises RuntimeError if no group can come before the drawn ones have ended."""
        with self._changed:
            while len(self._waiting) < num_samples and self._changed.wait(LINGER_S):
                pass
            if self._over:
                raise RuntimeError("this call of the rollout function has ended; draw groups in the newest one")
            given = [self._waiting.popleft() for _ in range(min(num_samples, len(self._waiting)))]
            self._drawn += given
        if not given and num_samples > 0:
            raise RuntimeError(
                f"get_samples({num_samples}): no group waits beside the {len(self._drawn)} that this call has drawn, "
                "and the run admits no more before these have ended; return the samples so far: the rest of the "
                "batch comes with the next call, or raise --max-staleness"
            )
        return [[given_sample(entry.group, sample) for sample in entry.samples] for entry in given]

    def add_samples(self, samples: list[list[slime.Sample]]) -> None:
        """Put groups back; they are drawn again later, from their beginning."""
        back = {_index(sample) // self._config.rollout.n_samples_per_prompt for sample in _flat(samples)}
        with self._changed:
            again = [entry for entry in self._drawn if entry.group.group_id in back]
            self._drawn = [entry for entry in self._drawn if entry.group.group_id not in back]
            self._waiting.extendleft(reversed(again))


class RolloutFunction:
    """The rollout function of a run, in its only replica of the generate stage."""

    def __init__(self, config: Config, functions: GenerateFunctions, path: str) -> None:
        self.config, self.name = config, f"--rollout-function-path {path}"
        self._functions, self._function = functions, rollout_function(path)
        self._waiting: deque[_Drawn] = deque()
        self._changed = threading.Condition()
        self._came = asyncio.Event()
        self._next_id = -1

    async def take(self, group: PromptGroup, samples: Sequence[Sample], ended: Callable[..., None]) -> None:
        """Give a group to the function; `ended` gets its rollouts. Returns after the last rollout."""
        drawn = _Drawn(group, samples, ended)
        with self._changed:
            self._waiting.append(drawn)
            self._changed.notify_all()
        self._came.set()
        await drawn.done.wait()

    async def run(self) -> None:
        """Call the function for waiting groups; runs until cancelled."""
        while True:
            await self._came.wait()
            self._came.clear()
            while waiting := len(self._waiting):
                await asyncio.sleep(LINGER_S if waiting < self.config.rollout.rollout_batch_size else 0)
                await self._call()

    async def _call(self) -> None:
        source, session = AdmittedGroups(self.config, self._waiting, self._changed), Session(NoChat())
        first = self._waiting[0]
        wanted = min(len(self._waiting), self.config.rollout.rollout_batch_size)
        if self._next_id < 0:
            self._next_id = first.group.group_id // self.config.rollout.rollout_batch_size
        rollout_id, self._next_id = self._next_id, self._next_id + 1
        gateway = await self._functions.open_gateway()
        place = OpenSession(first.group, new_sample((), 0), session, whole_batch=True)
        with gateway.session(place) as key:
            args = self._functions.args.with_router(gateway.url, key)
            args.rollout_batch_size = args.over_sampling_batch_size = wanted
            call = self._functions.start(self._function, args, rollout_id, source, evaluation=False)
            returned, ending = await self._functions.outcome(self.name, call)
        drawn = source.end()
        if not drawn:  # otherwise it would be called for ever
            drawn = [self._waiting.popleft() for _ in range(len(self._waiting))]
            returned, ending = None, ending or failure(f"{self.name} drew nothing from data_source.get_samples")
        groups = getattr(returned, "samples", returned)
        metrics = finite_numbers(getattr(returned, "metrics", None), "rollout_function/")
        try:
            by_rollout = _by_rollout(groups)
        except ReturnedError as error:
            by_rollout, ending = {}, failure(f"{self.name}: {error}")
        ending, recorded = ending or failure(f"{self.name} drew it, and did not return it"), session.recorded
        for entry in drawn:
            for sample in entry.samples:
                parts = by_rollout.get(entry.group.group_id * entry.group.n_samples + sample.index)
                ended: tuple[Sample, ...]
                if parts is None:
                    ended = (msgspec.structs.replace(sample, **ending),)
                else:
                    row = entry.group.row_metadata
                    ended = await asyncio.to_thread(self._ended, parts, recorded, sample, metrics, row)
                self._functions.activity.failures += ended[-1].status == "failed"
                entry.ended(*ended)
            entry.done.set()

    def _ended(
        self, parts: list[Any], recorded: Sequence[Sample], sample: Sample, metrics: dict[str, float], row: Any
    ) -> tuple[Sample, ...]:
        replace, key = msgspec.structs.replace, self.config.reward.reward_key
        try:
            rollout = returned_rollout(parts, recorded, sample, key, row)
        except ReturnedError as error:
            return (replace(sample, status="failed", error=f"{self.name}: {error}"),)
        return (*rollout[:-1], replace(rollout[-1], metrics={**rollout[-1].metrics, **metrics}))


def _flat(groups: Any) -> Iterator[Any]:
    """The samples of groups, of groups of segments, or of a flat list."""
    for item in groups:
        if isinstance(item, list | tuple):
            yield from _flat(item)
        else:
            yield item


def _index(sample: Any) -> int:
    index = getattr(sample, "index", None)
    if not isinstance(index, int):
        raise ReturnedError(
            f"it gave back {type(sample).__name__} with the index {index}; give back the samples of "
            "data_source.get_samples, or copies of them"
        )
    return index


def _by_rollout(groups: Any) -> dict[int, list[Any]]:
    """The returned samples by index: samples of equal index are the sequences of one rollout."""
    if groups is not None and not isinstance(groups, list | tuple):
        raise ReturnedError(f"it returned {type(groups).__name__}; return RolloutFnTrainOutput(samples=groups)")
    by_index: dict[int, list[Any]] = {}
    for sample in _flat(groups or ()):
        by_index.setdefault(_index(sample), []).append(sample)
    return by_index
