"""The engine directory on the topic, as everybody reads it: gate, evaluation, trainer, clients of engines, recorder.

Two keys tell of one engine. `engine/<engine>` is its address: the supervisor publishes it when the process serves, with
an incarnation that rises at each start, and drops it when the process is lost. `directory/<engine>` is its entry: the
engines stage publishes what that process carries and whether it takes requests.

Invariant: an entry counts only while its incarnation is the one of the newest address. The two come from different
processes, so an entry may arrive after the process that it speaks of has died; read by its name alone it would have
requests sent to an engine that no longer has these weights, and the gate would count a version that nobody carries.
"""

from __future__ import annotations

from typing import Final

import msgspec

from stages.messages import EngineAddress, EngineEntry
from stages.ports import Readable

ADDRESS: Final = "engine/"
DIRECTORY: Final = "directory/"
RETRACTED: Final = "retracted/"  # topic `retracted/<client>`: how often its requests were retracted, as a number
ASKED: Final = "/asked_s"  # end of the figure in which a client tells how long an engine's oldest request is under way
SLOW: Final = "slow/"  # topic `slow/<engine>`: a `Complaint` for the user alone, that an answer came at a crawl
# Ends of the figures in which the engines stage tells an engine's idle share, and its requests.
IDLE: Final = "/idle"
RUNNING: Final = "/running"
WAITING: Final = "/waiting"
LEAVE: Final = "leave/"  # topic `leave/<engine>`: it is to end; nothing is sent there, and what it holds goes elsewhere
ORDER: Final = "order/"  # topic `order/<fetcher>/<engine>`: weights that an engine of its node is to get
BROUGHT: Final = "brought/"  # topic `brought/<fetcher>/<engine>`: what has become of that order
KEYS: Final = (ADDRESS, DIRECTORY)  # what to wait for: an entry begins and ceases to count with its address
POLICY: Final = "policy"  # the policy that the run trains; every frozen model has its own name


def addresses(topic: Readable, policy: str | None = None) -> dict[str, EngineAddress]:
    """Where engines listen just now, by the engine's name; of one policy, or of all."""
    decoder = msgspec.msgpack.Decoder(EngineAddress)
    found = {key.removeprefix(ADDRESS): decoder.decode(value) for key, value in topic.items(ADDRESS).items()}
    return {name: address for name, address in sorted(found.items()) if policy in (None, address.policy)}


def entries(topic: Readable, policy: str | None = None) -> dict[str, EngineEntry]:
    """What is known of the engines that have an address, by the engine's name; of one policy, or of all."""
    decoder = msgspec.msgpack.Decoder(EngineEntry)
    current = addresses(topic, policy)
    found = {key.removeprefix(DIRECTORY): value for key, value in topic.items(DIRECTORY).items()}
    decoded = {name: decoder.decode(found[name]) for name in current if name in found}
    return {name: entry for name, entry in decoded.items() if entry.incarnation == current[name].incarnation}


def carrying(topic: Readable) -> dict[str, EngineEntry]:
    """The entries of engines that carry weights of this run. One that has none yet holds nobody up."""
    return {name: entry for name, entry in entries(topic, POLICY).items() if entry.version >= 0}
