"""Who chooses an engine for a request: a router in front of them, or the generate stage. Owner:
`stages/sampling/dispatch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from configs.schema.debug import generates

if TYPE_CHECKING:
    from configs.schema import Config


class RouterConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    router: Annotated[
        Literal["auto", "none", "sglang", "smg"],
        Meta(
            description="router process in front of the engines: sglang (sglang-router), smg (its successor), or none "
            "(the generate stage chooses); auto = sglang with SGLang engines, else none"
        ),
    ] = "auto"
    router_policy: Annotated[
        Literal["auto", "round_robin", "random", "power_of_two", "cache_aware", "session", "least_loaded"],
        Meta(
            description="how an engine is chosen; session keeps the turns of a rollout on one engine; least_loaded is "
            "for --router none; auto = session where a loop stage sends rollouts round, else round_robin behind a "
            "router, least_loaded without one"
        ),
    ] = "auto"
    router_address: Annotated[
        str | None, Meta(description="a router that runs already, as http://host:port; none is started then")
    ] = None
    router_args: Annotated[
        dict[str, Any],
        Meta(description="options of the router by name; on the command line --router-<option> value"),
    ] = {}


def router_kind(config: Config) -> Literal["none", "sglang", "smg"]:
    """Which router stands in front of the engines that generate, with `auto` decided. Without engines there is none.

    With `--router-address` it is one that runs already; of a kind that nothing names it is taken for sglang-router.
    """
    router = config.router
    if not generates(config):
        return "none"
    if router.router != "auto":
        return router.router
    return "sglang" if config.engine.engine == "sglang" or router.router_address is not None else "none"
