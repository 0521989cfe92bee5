"""No hub stops a run: what the gate lets out fits, in messages and in bytes."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Config
from pipeline.stream_limits import message_bytes, stream_spec
from stages.messages import NO_IDS, Extra, PromptGroup, RolloutSlice
from stages.rollouts import new_sample
from stages.staleness_gate import StalenessGate
from transport import Node, StreamSpec
from transport.codec import Codec, total


class Part(msgspec.Struct, frozen=True, array_like=True):
    body: bytes


def config_of(batch: int, members: int, context: int | None) -> Config:
    replace, config = msgspec.structs.replace, Config()
    rollout = replace(
        config.rollout,
        rollout_batch_size=batch,
        n_samples_per_prompt=members,
        rollout_max_context_len=context,
        num_rollout=10,
    )
    return replace(config, rollout=rollout)


@given(
    batch=st.integers(1, 4096), members=st.integers(1, 64), staleness=st.integers(0, 8), context=st.integers(1, 1 << 20)
)
def test_a_hub_holds_all_that_the_gate_lets_out(batch: int, members: int, staleness: int, context: int) -> None:
    config = config_of(batch, members, context)
    gate = StalenessGate(batch, staleness)
    spec = stream_spec(config, gate, "group", "inproc://x")
    rollouts = gate.most_open * members
    assert spec.capacity_items >= 2 * rollouts
    assert spec.capacity_bytes >= rollouts * context * 13, "ids, mask, log-probs and a teacher's of every token"
    assert spec.max_message_bytes >= members * context * 13, "a group may travel whole"


def test_a_group_with_images_and_choices_of_experts_fits_into_a_message() -> None:
    """Extras count for the limit of a message (tests/transport/conformance_streams.py)."""
    context, group = 4096, PromptGroup(0, 0, 0, "?", NO_IDS, None, n_samples=16, seed=0)
    sample = new_sample(range(context), 0)
    extras = {
        "routed_experts": np.zeros((context, 48, 8), dtype="<i4").view(Extra),
        "image": np.zeros((1024, 1024, 3), dtype="u1").view(Extra),
    }
    samples = tuple(msgspec.structs.replace(sample, index=index, extras=extras) for index in range(group.n_samples))
    frames = Codec(RolloutSlice).encode(RolloutSlice(group, samples))
    assert 64 << 20 < total(frames) < message_bytes(group.n_samples, context)


def test_without_a_context_a_message_has_the_usual_limit() -> None:
    assert message_bytes(8, None) == 64 << 20


async def held_until_all_came(spec: StreamSpec, parts: int, size: int) -> int:
    """A stage that joins: it keeps what it has until the last part is there. Returns how many parts came."""
    async with Node("limits", "controller") as node:
        hub = await node.hub(spec, lambda letter: None)
        outlet = await node.outlet(hub.address, spec.name, Part, replica="sender")
        inlet = await node.inlet(
            hub.address, spec.name, Part, window_items=10 * parts, window_bytes=1 << 40, replica="joiner"
        )
        leases = []

        async def send() -> None:
            for part in range(parts):
                await outlet.send(Part(bytes(size)), f"{part}")

        async with asyncio.TaskGroup() as tasks:
            sender = tasks.create_task(send())
            try:
                async with asyncio.timeout(3.0):
                    while len(leases) < parts:
                        lease = await inlet.receive()
                        assert lease is not None
                        leases.append(lease)
            except TimeoutError:
                sender.cancel()
        for lease in leases:
            lease.done()
        return len(leases)


async def test_a_batch_above_a_bound_in_bytes_does_not_stall() -> None:
    """A bound below a batch stops the run for good; the streams of a run have none."""
    parts, size = 40, 1000
    bounded = StreamSpec("group", "inproc://bounded", capacity_bytes=parts * size // 2)
    assert await held_until_all_came(bounded, parts, size) < parts, "what the bound would do"
    spec = stream_spec(config_of(4, 10, 64), StalenessGate(4, 0), "group", "inproc://whole")
    assert await held_until_all_came(spec, parts, size) == parts
