"""A process with hubs of the run's streams. Started as `python -m pipeline.hosts.hub_process RUN_ID TOPIC NAME [KEYS]`.

Invariants: it may be killed at any moment, since senders keep what its hubs have (`transport.core.keeping`); what it
hands to the controller is with the controller before its sender is told; it ends when it is ended, after all replicas.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from typing import Final

import msgspec

from pipeline.errors import exit_code, leaf
from pipeline.hosts.rendezvous import Entry, from_command, read
from pipeline.hosts.stream_hub import (
    UP,
    Handed,
    HubCommands,
    HubFacts,
    HubProcessSpec,
    ProcessFacts,
    command_key,
    facts_key,
    stream_key,
)
from transport import DeadLetter, Held, Hub, Outlet, StreamSpec, TopicClient
from transport.links import address

RESUME_S: Final = 3.0  # a link tries again each second at the most
FACTS_INTERVAL_S: Final = 0.25
ENDING_INTERVAL_S: Final = 0.02  # while the run waits for the end of a stream
ALIVE_INTERVAL_S: Final = 5.0  # also without news: a process that tells nothing hangs
HELD_TOLD: Final = 100  # messages of a hub, without being asked for all
ACCOUNT_S: Final = 10.0  # for which all are told, once that was asked for: a value may be missed


async def serve(entry: Entry, name: str) -> None:
    async with entry.serving_node(name, lambda: topic) as node:
        topic = await node.topic(entry.topic)
        spec, _ = await read(topic, name, HubProcessSpec)
        up = await node.outlet(spec.up, UP, Handed)
        async with asyncio.TaskGroup() as tasks:
            hand = _hander(up, tasks)
            hubs: dict[str, Hub] = {}
            for stream in spec.streams:
                hubs[stream.name] = await node.hub(
                    stream,
                    lambda letter: hand(_dead(letter)),
                    on_unkept=_unkept(stream, hand),
                    resume_s=RESUME_S if spec.incarnation else 0.0,
                )
            for stream_name, hub in hubs.items():
                await topic.publish(stream_key(stream_name), hub.address.encode())
                logging.info("%s is at %s", stream_name, address.parse(hub.address))
            asked = tasks.create_task(_obey(topic, name, hubs))
            await _tell(topic, name, hubs)
            asked.cancel()


def _hander(up: Outlet[Handed], tasks: asyncio.TaskGroup) -> Callable[[Handed], asyncio.Future[None]]:
    """Hands messages to the controller; the future is done when it has them."""
    count = 0

    def hand(handed: Handed) -> asyncio.Future[None]:
        nonlocal count
        count += 1
        return tasks.create_task(up.send(handed, f"{count}"))

    return hand


def _dead(letter: DeadLetter) -> Handed:
    return Handed("dead", letter.stream, letter.key, (letter.body,), letter.header, letter.reason)


def _unkept(stream: StreamSpec, hand: Callable[[Handed], object]) -> Callable[[str, tuple[object, ...]], None]:
    def give(key: str, frames: tuple[object, ...]) -> None:
        hand(Handed("unkept", stream.name, key, tuple(bytes(frame) for frame in frames)))  # type: ignore[call-overload]

    return give


async def _obey(topic: TopicClient, name: str, hubs: dict[str, Hub]) -> None:
    """Waits for what the controller asks; runs until cancelled. Losses of before this incarnation are none of its."""
    key = command_key(name)
    commands = _commands(topic, name)
    done = max((loss.number for loss in commands.losses), default=0)
    revision = 0
    while True:
        commands = _commands(topic, name)
        for stream in commands.finishing:
            if stream in hubs and not hubs[stream].core.finishing:
                hubs[stream].finish()
        for loss in commands.losses:
            if loss.number > done and loss.stream in hubs:
                hubs[loss.stream].peer_lost(loss.replica, blame=loss.blame)
        done = max((loss.number for loss in commands.losses), default=done)
        revision = await topic.wait(revision, key)


def _commands(topic: TopicClient, name: str) -> HubCommands:
    value = topic.get(command_key(name))
    return HubCommands() if value is None else msgspec.msgpack.decode(value, type=HubCommands)


async def _tell(topic: TopicClient, name: str, hubs: dict[str, Hub]) -> None:
    """Waits for the clock; runs until cancelled, or the topic is gone."""
    told, told_at, asked, all_until = b"", 0.0, 0, 0.0
    while True:
        commands, now = _commands(topic, name), asyncio.get_running_loop().time()
        if commands.asked > asked:
            asked, all_until = commands.asked, now + ACCOUNT_S
        most = None if now < all_until else HELD_TOLD
        facts = tuple(_facts(stream, hub, most) for stream, hub in hubs.items())
        value = msgspec.msgpack.encode(ProcessFacts(facts, asked))
        if value != told or now > told_at + ALIVE_INTERVAL_S:
            await topic.publish(facts_key(name), value)
            told, told_at = value, now
        await asyncio.sleep(ENDING_INTERVAL_S if commands.finishing else FACTS_INTERVAL_S)


def _facts(stream: str, hub: Hub, most: int | None) -> HubFacts:
    core = hub.core
    held = [*hub.held(), *(Held(key, holder, 0.0) for key, holder in core.keeping.claimed())]
    complete = (most is None or len(held) <= most) and not core.keeping.waits
    return HubFacts(stream, core.epoch, hub.stats(), tuple(held[:most]), complete, core.ended)


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    entry, name = from_command(argv)
    try:
        import uvloop

        uvloop.run(serve(entry, name))
    except BaseException as error:
        cause = leaf(error)
        logging.exception("%s failed", name)
        logging.error("%s: %s", type(cause).__name__, cause)
        return exit_code(cause)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
