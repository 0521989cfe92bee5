"""What a sampler tells of its requests: figures for its stage, how often engines retracted, and which engine the
engines stage should look at."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from models.engines.errors import EngineProtocolError
from stages.engine_entries import ASKED, RETRACTED, SLOW
from stages.messages import Complaint
from stages.ports import Topic
from stages.sampling.attempt import Attempt
from stages.sampling.engine_directory import EngineDirectory
from stages.sampling.routes import Route, Routes

log = logging.getLogger("sluice.sampler")

REPORT_INTERVAL_S: Final = 1.0


class Reports:
    """Of one sampler. `extra`: where its stage counts."""

    def __init__(self, replica: str, directory: EngineDirectory, routes: Routes, extra: dict[str, float]) -> None:
        self.replica, self.directory, self.routes, self.extra = replica, directory, routes, extra
        self.retractions = 0
        self._complaints: dict[str, Complaint] = {}  # of engines whose answers are refused or crawl, by topic key

    def add(self, name: str, n: float) -> None:
        self.extra[name] = self.extra.get(name, 0.0) + n

    def note(self, route: Route) -> None:
        """How many requests engines may have and have, as this one is about to be sent."""
        router = self.directory.router
        targets = [router] if self.routes.routed and router is not None else self.directory.serving()
        self.extra["in_flight_limit"] = float(sum(target.slots.limit for target in targets))
        self.extra["in_flight_samples"] = float(sum(target.slots.taken for target in targets))

    def judge(self, route: Route, attempt: Attempt) -> None:
        """Whether what the engine answered made sense. Next to nothing for the whole time of a request makes none,
        unless the engine had to stand still for the trainer, or the caller waits no longer."""
        crawled = attempt.crawled and not attempt.out_of_time and self.directory.turn_s < route.flight.began_s
        if crawled and not route.target.crawled:
            route.target.crawled = True  # said once of an incarnation
            why = (
                f"{attempt.reused} new tokens came of a request in --request-timeout-secs {self.directory.timeout_s:g}"
            )
            self._complaints[f"{SLOW}{route.target.name}"] = Complaint(route.target.name, route.target.incarnation, why)
        nonsense = crawled or isinstance(attempt.error, EngineProtocolError)
        refused = attempt.error if nonsense else attempt.refused
        if refused is None and attempt.error is not None:
            return  # it did not answer
        if refused is not None:
            self.add("refused_answers", 1)
            log.warning("an answer of %s is refused: %s", route.target.name, refused)
        complaint = self.routes.answered(route.target, refused)
        if complaint is not None:
            self._complaints[f"complaint/{complaint.engine}"] = complaint

    async def run(self, topic: Topic) -> None:
        """Waits for the clock. Only answers tell of retractions, and the engines' limit follows them."""
        told = 0
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            for key in [key for key in self.extra if key.endswith(ASKED)]:
                del self.extra[key]
            self.extra |= {f"{name}{ASKED}": seconds for name, seconds in self.directory.asked_s().items()}
            if self.retractions != told:
                told = self.retractions
                await topic.publish(f"{RETRACTED}{self.replica}", str(told).encode())
            while self._complaints:
                key, complaint = self._complaints.popitem()
                await topic.publish(key, msgspec.msgpack.encode(complaint))
