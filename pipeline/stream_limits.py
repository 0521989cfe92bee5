"""How much the streams of a run hold. Pure arithmetic.

What is in flight is bounded by the gate, in groups. A hub that had a smaller bound of its own, in messages or in bytes,
would stop a run: the stages that join (group, train) hold messages until the last part has come, and the last part
would wait for room that those messages take.

Invariants: a hub takes everything that the gate admits, whatever its size; one message may hold a whole group of the
longest rollouts.
"""

from __future__ import annotations

from typing import Final

from configs.schema import Config
from stages.staleness_gate import StalenessGate
from transport import StreamSpec
from transport.spec import Routing

UNBOUNDED_BYTES: Final = 1 << 60
LEAST_MESSAGE_BYTES: Final = 64 << 20
# Of one token of a sample: id, loss mask, log-prob, a teacher's log-prob, and up to four bytes of text twice (response,
# and what a tool adds to the row's metadata).
TOKEN_BYTES: Final = 4 + 1 + 4 + 4 + 8
# Of the extras of one token: the choices of experts of 64 layers with 8 each, int32.
TOKEN_EXTRAS_BYTES: Final = 64 * 8 * 4
SAMPLE_BYTES: Final = 64 << 10  # of one sample beside its tokens, and its part of the prompt's row
SAMPLE_EXTRAS_BYTES: Final = 4 << 20  # of its extras that do not grow with its tokens: an image


def stream_spec(
    config: Config, gate: StalenessGate, name: str, address: str, routing: Routing = "least_loaded"
) -> StreamSpec:
    """The stream `name`, of which every message that the gate lets out may be in one hub."""
    members = config.rollout.n_samples_per_prompt
    return StreamSpec(
        name=name,
        address=address,
        routing=routing,
        # Twice, since a lost replica's work may come a second time before the first is released.
        capacity_items=gate.most_open * members * 2 + 10_000,
        capacity_bytes=UNBOUNDED_BYTES,
        max_message_bytes=message_bytes(members, config.rollout.rollout_max_context_len),
    )


def message_bytes(members: int, context: int | None) -> int:
    """Bytes of a slice that holds a whole group of rollouts as long as the context, extras included; 64 MiB at least,
    and without a context."""
    tokens = (context or 0) * (TOKEN_BYTES + TOKEN_EXTRAS_BYTES)
    return max(LEAST_MESSAGE_BYTES, members * (tokens + SAMPLE_BYTES + SAMPLE_EXTRAS_BYTES))
