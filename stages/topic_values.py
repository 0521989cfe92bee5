"""The engine directory on the topic, as everybody reads it: gate, evaluation, trainer, clients of engines, recorder.

Two keys tell of one engine. `engine/<engine>` is its address: the supervisor publishes it when the process serves, with
an incarnation that rises at each start, and drops it when the process is lost. `directory/<engine>` is its entry: the
engines stage publishes what that process carries and whether it takes requests.

Invariant: an entry counts only while its incarnation is the one of the newest address. The two come from different
processes, so an entry may arrive after the process that it speaks of has died; read by its name alone it would have
requests sent to an engine that no longer has these weights, and the gate would count a version that nobody carries.

Settings that the user changes while the run goes on, as the stages read them from the topic.

A change names the batch from which on it holds, some batches ahead, so that the trainer knows of it before it begins
that batch and all its groups are treated alike. Several changes may be on their way.

Invariant: for a batch the newest change counts whose `from_step` has come; before the first, the configuration.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from configs.schema.rollout import RolloutConfig
from stages.messages import EngineAddress, EngineEntry, PromptGroup
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


SETTINGS: Final = "settings"
MOST_KEPT: Final = 16  # changes on the topic; older ones are long in force


class Settings(Struct, frozen=True):
    """All of them, changed or not, from batch `from_step` (the first is 1) on."""

    from_step: int
    max_staleness: int
    lr_scale: float  # factor of the configured learning rate
    dynamic_sampling_filter: tuple[str, ...]


class Sampling(Struct, frozen=True):
    """How the rollouts of a group are drawn, in all their turns. A group has it from its admission on, so that a change
    finds no group half-way."""

    temperature: float
    top_p: float


def sampling(group: PromptGroup, rollout: RolloutConfig) -> Sampling:
    """Of a group that is trained."""
    return Sampling(
        rollout.rollout_temperature if group.temperature is None else group.temperature,
        rollout.rollout_top_p if group.top_p is None else group.top_p,
    )


def write_settings(history: tuple[Settings, ...]) -> bytes:
    """The topic value."""
    return msgspec.msgpack.encode(history[-MOST_KEPT:])


def settings_at(topic: Readable, step: int) -> Settings | None:
    """Those of a batch; None while nothing was changed."""
    value = topic.get(SETTINGS)
    if value is None:
        return None
    history = msgspec.msgpack.decode(value, type=tuple[Settings, ...])
    return next((settings for settings in reversed(history) if settings.from_step <= step), None)


def newest_settings(topic: Readable) -> Settings | None:
    """Those that were changed last, in force or not."""
    value = topic.get(SETTINGS)
    return None if value is None else msgspec.msgpack.decode(value, type=tuple[Settings, ...])[-1]
