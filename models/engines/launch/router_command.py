"""The command line of the router in front of the engines: sglang-router, or smg, its successor.

Invariants: pure; the router repeats nothing (the generate stage does, from partial output), ends no request before the
generate stage would, knows no worker at its start (the owner of an engine adds it when it carries the published
weights), and answers on the loopback address.
"""

from __future__ import annotations

import math
from typing import Final, Literal

from configs.schema import Config, router_kind
from models.engines.errors import EnvironmentMissing, LaunchRefused
from models.engines.launch.command import LOOPBACK, Arguments, Launch, base_environment
from models.engines.launch.environment import Installed, Part

Policy = Literal["round_robin", "random", "power_of_two", "cache_aware", "session", "least_loaded"]

# Beyond the generate stage's own deadline of a request, so that it is always the generate stage that ends one.
TIMEOUT_MARGIN_S: Final = 60
BREAKER_FAILURES: Final = 3
BREAKER_OPEN_S: Final = 5

_MODULE: Final = {"router": "sglang_router.launch_router", "smg": "smg.launch_router"}
_NAMES: Final = {"session": "manual"}  # ours -> theirs, where they differ


def policy_of(config: Config) -> Policy:
    """How an engine is chosen, with `auto` decided: the turns of a rollout stay together where there are turns."""
    policy = config.router.router_policy
    if policy != "auto":
        return policy
    if config.tools.tools or any(stage.loop is not None for stage in config.stage):
        return "session"
    return "least_loaded" if router_kind(config) == "none" else "round_robin"


def router_part(config: Config) -> Part | None:
    """Which argument list the router's options are checked against; None if this run starts no router."""
    kind = router_kind(config)
    if kind == "none" or config.router.router_address is not None:
        return None
    return "smg" if kind == "smg" else "router"


def router_launch(
    config: Config, installed: Installed, *, port: int, metrics_port: int, host: str = LOOPBACK
) -> Launch:
    """The router process, on two free ports.

    Raises EnvironmentMissing if the router is not installed, LaunchRefused for a policy that no router has.
    """
    part = router_part(config)
    if part is None:
        raise LaunchRefused("--router is none, or --router-address names one that runs already: there is none to start")
    require_router(part, installed)
    policy = policy_of(config)
    if policy == "least_loaded":
        raise LaunchRefused(
            "--router-policy least_loaded is the generate stage's own; choose another one, or add --router none"
        )
    given = Arguments(installed, part)
    given.give("host", host)
    given.give("port", port)
    given.give("prometheus-host", host)
    given.give("prometheus-port", metrics_port)
    given.give("policy", _NAMES.get(policy, policy))
    if policy == "session":
        given.offer("assignment-mode", "min_load")  # a new rollout goes where fewest are
    given.give("disable-retries")
    given.give("request-timeout-secs", math.ceil(config.rollout.request_timeout_secs) + TIMEOUT_MARGIN_S)
    given.offer("worker-startup-check-interval", 1)
    given.offer("log-level", "warn")
    _health(given, config)
    _successor(given, config)
    given.pass_on(config.router.router_args)
    return Launch(
        (installed.python, "-m", _MODULE[part], *given.argv), base_environment(installed), f"http://{host}:{port}"
    )


def _health(given: Arguments, config: Config) -> None:
    """A lost engine is passed over at once by the breaker; /health is looked at only where it never generates.

    The servers that Sluice starts answer /health also while they are paused. Those of others may not, and would be
    evicted in a long pause; the owner of an engine takes out what is lost in either case.
    """
    given.offer("cb-failure-threshold", BREAKER_FAILURES)
    given.offer("cb-success-threshold", 1)
    given.offer("cb-timeout-duration-secs", BREAKER_OPEN_S)
    if config.sglang.rollout_external_engine_addrs:
        given.offer("disable-health-check")
        return
    health = config.health
    given.offer("health-check-interval-secs", max(1, math.ceil(health.rollout_health_check_interval)))
    given.offer("health-check-timeout-secs", max(1, math.ceil(health.rollout_health_check_timeout)))
    given.offer("health-failure-threshold", health.rollout_health_check_failures)
    given.offer("health-success-threshold", 1)


def _successor(given: Arguments, config: Config) -> None:
    """What smg has beyond sglang-router, and would do to a paused engine: take its silence for a stall."""
    given.offer("disable-load-monitoring")
    given.offer("disable-worker-overload-protection")
    given.offer("disable-tokenizer-autoload")  # requests come as token ids
    stall_s = math.ceil(config.rollout.request_timeout_secs) + TIMEOUT_MARGIN_S
    given.offer("stream-body-stall-timeout-secs", stall_s)


def require_router(part: Part, installed: Installed) -> None:
    """Raise EnvironmentMissing, with the cure, if that router is not in the environment."""
    if installed.options(part):
        return
    if part == "smg":
        raise EnvironmentMissing(
            f"smg is not installed in the environment of {installed.python}; install smg==1.13.0 there with pip, or "
            "choose --router sglang"
        )
    raise EnvironmentMissing(
        f"sglang-router is not installed in the environment of {installed.python}; run `make sglang-env`, or add "
        "--router none, where the generate stage chooses the engine"
    )
