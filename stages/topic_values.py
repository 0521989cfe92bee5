"""The values on the topic that stages share: the engine directory, the router, and settings changed in a live run.

Engine directory. `engine/<engine>` is the address: the supervisor publishes it when the process serves, with an
incarnation that rises at each start, and drops it when the process is lost. `directory/<engine>` is the entry: the
engines stage publishes which weights the process carries and whether it takes requests.

Settings. A change names the first batch it applies to, some batches ahead. The trainer therefore knows it before that
batch begins, and all groups of a batch are treated alike. Several changes may be pending.

Invariants:
- an entry counts only while its incarnation equals that of the newest address. Two processes write the two keys, so
  an entry may arrive after its process has died. Read by name alone it would send requests to an engine without these
  weights, and the gate would count a version that no engine carries;
- a batch uses the newest change whose `from_step` it has reached; before the first change, the configuration.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec
from msgspec import Struct

from configs.schema.rollout import RolloutConfig
from models.engines.access_token import Token
from stages.messages import PromptGroup
from stages.ports import Readable, Topic, read_value, wait_until

ADDRESS: Final = "engine/"
DIRECTORY: Final = "directory/"
RETRACTED: Final = "retracted/"  # topic `retracted/<client>`: how often its requests were retracted, as a number
ASKED: Final = "/asked_s"  # suffix of a client's figure: age of the oldest request in flight at an engine
SLOW: Final = "slow/"  # topic `slow/<engine>`: a `Complaint` for the user alone, that an answer came at a crawl
# Suffixes of figures of the engines stage: idle share of an engine, and its requests.
IDLE: Final = "/idle"
RUNNING: Final = "/running"
WAITING: Final = "/waiting"
LENGTH: Final = "length/"  # prefix of figures of generate: training rollouts that ended, by `length_place`
FAILED: Final = "failed/"  # prefix of figures of group: rollouts that failed, by their reason
DECIDED: Final = "decided/"  # topic `decided/<replica of group>`: keys of groups that are dropped before their end
LEAVE: Final = "leave/"  # topic `leave/<engine>`: it must end; clients send elsewhere, its requests move
ORDER: Final = "order/"  # topic `order/<fetcher>/<engine>`: weights for an engine of the fetcher's node
BROUGHT: Final = "brought/"  # topic `brought/<fetcher>/<engine>`: the progress of that order
KEYS: Final = (ADDRESS, DIRECTORY)  # what to wait for: an entry begins and ceases to count with its address
POLICY: Final = "policy"  # the policy that the run trains; every frozen model has its own name
EVALUATION: Final = "policy, evaluated"  # the same, by engines that serve evaluations alone; no frozen model's name
TRAINED: Final = (POLICY, EVALUATION)  # what is called by a version of the run
RELEASED: Final = "eval/released"  # the newest version whose evaluation has ended
PINNED: Final = "weights/pinned/"  # topic `weights/pinned/<version>`: the announcement of a version to evaluate


def length_place(tokens: int) -> int:
    """The bucket of a response's length: four buckets for each factor of 2."""
    return int(4 * math.log2(max(tokens, 1)))


def length_of(place: int) -> int:
    """A length in the middle of a bucket."""
    return round(2 ** ((place + 0.5) / 4))


class Server(Struct, frozen=True, kw_only=True):
    """Facts about an engine or a router."""

    token: Token | None = None  # that requests to it must carry
    fetcher: str = ""  # that brings weights to the engine's node; empty: not needed
    gpus: tuple[int, ...] = ()  # an engine's, by their place among those that the engines stage sees; empty: not known


class EngineAddress(Server, frozen=True):
    """Topic value `engine/<engine>`: where an engine listens; `incarnation` rises at each start of its process.

    `taken_over`: an earlier start of the run left it in an unknown state; its own report of its weights does not count.
    """

    engine: str
    url: str
    incarnation: int
    policy: str = "policy"  # whose weights it serves; a frozen model has its own name
    taken_over: bool = False


class PolicyDifference(Struct, frozen=True):
    """How far an engine's log-probs of the canary sequences are from the trainer's, in nats."""

    largest: float
    mean: float
    seconds: float  # for both scores


class EngineEntry(EngineAddress, frozen=True):
    """Topic value `directory/<engine>`: the engines stage's entry of one engine; clients read nothing else.

    It belongs to one incarnation: an entry whose incarnation is not that of the newest `engine/<engine>` address is
    older than the process that listens there, and counts for nothing.
    """

    # Clients send while it is serving or updating. A `leaving` engine returns its requests; then it has `left`.
    state: Literal["loading", "serving", "updating", "away", "leaving", "left"] = "loading"
    run_generation: int = -1  # of the weights it carries; -1 with version -1: none of this run
    version: int = -1  # rollout batches that they were trained on
    fetching: int = -1  # version that is being read from its slot just now
    limit: int = 0  # samples that may be in flight at it, all clients together; 0 = not known yet
    update_s: float = 0.0
    stall_s: float = 0.0
    checksum: str = ""  # over the engine's tensors, if they are compared
    proof: PolicyDifference | None = None  # of its weights; None: not proven
    detail: str = ""  # why it is away, or lacks the newest weights; for people

    @property
    def label(self) -> str | None:
        """What the engine calls its weights, None while it has none of this run."""
        return None if self.version < 0 else f"{self.run_generation}.{self.version}"

    @property
    def key(self) -> str:
        """Its key on the topic."""
        return DIRECTORY + self.engine


class RouterAddress(Server, frozen=True):
    """Topic value `router`: where the router in front of the engines listens; `incarnation` as for an engine."""

    kind: str  # sglang or smg
    url: str
    incarnation: int


class RouterState(RouterAddress, frozen=True):
    """Topic value `router_state`: the engines stage's entry of one incarnation of the router."""

    up: bool = False  # it has a healthy worker: requests may be sent through it
    split: bool = False  # prefill and decode are apart: no engine can serve a request alone


class Complaint(Struct, frozen=True):
    """Topic value `complaint/<engine>`: why the supervisor should restart this incarnation of an engine."""

    engine: str
    incarnation: int
    reason: str


def addresses(topic: Readable, policy: str | None = None) -> dict[str, EngineAddress]:
    """Where engines listen just now, by the engine's name; of one policy, or of all."""
    decoder = msgspec.msgpack.Decoder(EngineAddress)
    found = {key.removeprefix(ADDRESS): decoder.decode(value) for key, value in topic.items(ADDRESS).items()}
    return {name: address for name, address in sorted(found.items()) if policy in (None, address.policy)}


def entries(topic: Readable, policy: str | None = None) -> dict[str, EngineEntry]:
    """Entries of the engines that have an address, by the engine's name; of one policy, or of all."""
    decoder = msgspec.msgpack.Decoder(EngineEntry)
    current = addresses(topic, policy)
    found = {key.removeprefix(DIRECTORY): value for key, value in topic.items(DIRECTORY).items()}
    decoded = {name: decoder.decode(found[name]) for name in current if name in found}
    return {name: entry for name, entry in decoded.items() if entry.incarnation == current[name].incarnation}


def carrying(topic: Readable, policy: str = POLICY) -> dict[str, EngineEntry]:
    """Entries of the engines that carry weights of this run. An engine without weights delays no other."""
    return {name: entry for name, entry in entries(topic, policy).items() if entry.version >= 0}


def released(topic: Readable) -> int:
    """The newest version whose evaluation has ended, -1 before any."""
    return int(topic.get(RELEASED) or b"-1")


async def updates_ended(topic: Topic, limit_s: float) -> None:
    """Wait until no engine reads a slot, at most `limit_s`. Unblocked by the engines' entries.

    For the end of a run, in which serving engines begin no update. A server that loads from a slot when the slot is
    removed can end: SGLang loads the same files once more after an error.
    """

    def ended() -> bool:
        return all(entry.fetching < 0 for entry in entries(topic).values())

    await wait_until(topic, ended, *KEYS, limit_s=limit_s)


SETTINGS: Final = "settings"
MOST_KEPT: Final = 16  # changes on the topic; older changes are in force already


class Settings(Struct, frozen=True):
    """All settings, changed or not, from batch `from_step` (the first is 1) on."""

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


def settings_at(topic: Readable, step: float) -> Settings | None:
    """The settings of a batch; None before the first change."""
    history = read_value(topic, SETTINGS, tuple[Settings, ...]) or ()
    return next((settings for settings in reversed(history) if settings.from_step <= step), None)


def newest_settings(topic: Readable) -> Settings | None:
    """The newest change, in force or not."""
    return settings_at(topic, math.inf)
