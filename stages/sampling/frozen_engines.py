"""Engines whose weights never change (teachers, judges), as a stage asks them: by name, through outages.

The pipeline publishes where each one listens under the topic `frozen/<name>`; nothing here updates weights, and none of
these engines counts among those that generate.

Invariants:
- A question that an engine could not answer because it is down, comes up again or was told to abort is asked again
  until its deadline: a killed engine costs time, not samples.
- A refusal or a broken answer is never asked again: it would be the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from models.engines.client import EngineClient
from models.engines.errors import EngineAborted, EngineError, EngineTimeout, EngineUnreachable
from stages.messages import EngineAddress
from stages.ports import Topic

T = TypeVar("T")

TOPIC: Final = "frozen/"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class UnknownEngine(EngineError):
    """A name that none of the engines asked here has."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(name, tuple(known))
        self.name, self.known = name, tuple(known)

    def __str__(self) -> str:
        return f"no engine is called {self.name!r} here; the known names are {', '.join(self.known) or 'none'}"


class FrozenEngines:
    """Clients of the engines called `names`.

    Args:
        deadline_s: of one question with all its repetitions and waiting, seconds.
        vocab_size: token ids from this on are refused before they are sent, for they end a real SGLang; None: no check.
    """

    def __init__(self, names: Sequence[str], *, deadline_s: float, vocab_size: int | None = None) -> None:
        self.names, self.deadline_s, self.vocab_size = tuple(names), deadline_s, vocab_size
        self.retries = 0
        self._clients: dict[str, tuple[EngineAddress, EngineClient]] = {}
        self._changed = asyncio.Condition()
        self._draining = False

    async def follow(self, topic: Topic) -> None:
        """Waits for the topic (an address that comes, goes or changes, a drain); runs until cancelled."""
        revision = 0
        while True:
            revision = await topic.wait(revision)
            await self._update(topic.items(TOPIC), draining=topic.get("drain") is not None)

    async def close(self) -> None:
        """Close all connections; requests in flight are aborted by their servers."""
        for _, client in self._clients.values():
            await client.close()
        self._clients.clear()

    async def ask(self, name: str, question: Callable[[EngineClient], Awaitable[T]]) -> T:
        """The answer of engine `name`. Waits for it to be up.

        Raises `UnknownEngine`, what cannot be helped by asking again (`EngineRefused`, `EngineProtocolError`), or, at
        the deadline or once the run drains, what the last try failed with.
        """
        if name not in self.names:
            raise UnknownEngine(name, self.names)
        deadline, pause_s = time.monotonic() + self.deadline_s, FIRST_PAUSE_S
        while True:
            client = await self._client(name, deadline)
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    return await question(client)
            except TimeoutError:
                raise EngineTimeout(client.base_url, self.deadline_s) from None
            except (EngineUnreachable, EngineAborted):
                if self._draining or time.monotonic() + pause_s >= deadline:
                    raise
            self.retries += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _client(self, name: str, deadline: float) -> EngineClient:
        """Waits for an address of the engine; unblocked by it, by the deadline or by a drain."""
        with contextlib.suppress(TimeoutError):  # said below
            async with asyncio.timeout(deadline - time.monotonic()), self._changed:
                await self._changed.wait_for(lambda: name in self._clients or self._draining)
        if name not in self._clients:
            why = "the run drains" if self._draining else f"it was not up within {self.deadline_s:g} s"
            raise EngineUnreachable(f"{TOPIC}{name}", f"{why}; see logs/frozen-{name}.log")
        return self._clients[name][1]

    async def _update(self, values: Mapping[str, bytes], *, draining: bool) -> None:
        """Take the newest addresses. A client whose address is gone is closed, which ends what it waits for."""
        addresses = {
            key.removeprefix(TOPIC): msgspec.msgpack.decode(v, type=EngineAddress) for key, v in values.items()
        }
        for name, (address, client) in list(self._clients.items()):
            if addresses.get(name) != address:
                del self._clients[name]
                await client.close()
        for name in self.names:
            if name in addresses and name not in self._clients:
                # The deadline of a question is `ask`'s; no single request may outlive it.
                client = EngineClient(addresses[name].url, timeout_s=self.deadline_s, vocab_size=self.vocab_size)
                self._clients[name] = (addresses[name], client)
        async with self._changed:
            self._draining = draining
            self._changed.notify_all()
