"""When an engine counts as lost, and what is saved of its work. Owner: `pipeline/supervise/engine_servers` and
`stages/generate/stage`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class HealthConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    rollout_health_check_interval: Annotated[
        float, Meta(gt=0, description="seconds between two looks at an engine's /health")
    ] = 5.0
    rollout_health_check_timeout: Annotated[
        float, Meta(gt=0, description="seconds after which a look at /health counts as failed")
    ] = 10.0
    rollout_health_check_failures: Annotated[
        int, Meta(ge=1, description="failed looks in a row after which an engine is ended and started again")
    ] = 3
    rollout_health_check_first_wait: Annotated[
        float, Meta(gt=0, description="most seconds that an engine may take to come up")
    ] = 600.0
    stream_interval: Annotated[
        int,
        Meta(
            ge=0,
            description="tokens between two parts of a streamed response, of which a lost engine leaves what has "
            "arrived; 0 = do not stream: its partial output is lost with it",
        ),
    ] = 32
