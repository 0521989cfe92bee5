"""Command lines of SGLang's servers and of the router in front of them, with the environment of each process.

This project never imports either. Both live in an environment of their own. `environment` asks it once for its
contents, so that `options` refuses an unknown option before anything starts.

Invariants: no I/O; an option is passed only if the installed version has it; of two values of one option the later
value counts; nothing of this project is on the import path of the started process.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from configs.schema import Config, router_kind
from models.engines.launch.environment import SHIMS, Installed, Part
from models.engines.launch.options import dashed, rendered
from models.errors import EnvironmentMissing, LaunchRefused

LOOPBACK: Final = "127.0.0.1"
RUNNER: Final = str(Path(__file__).with_name("inside.py"))


class Launch(Struct, frozen=True):
    """How to start one process. `env` is added to the environment of the caller."""

    argv: tuple[str, ...]
    env: dict[str, str]
    url: str


def with_token(launch: Launch, token_file: str, *, hidden: str = "-") -> Launch:
    """The same process with the token as its key, which neither its command line nor its environment shows. `hidden`: a
    module that it may not import."""
    python, flag, module, *rest = launch.argv
    assert flag == "-m"
    return msgspec.structs.replace(launch, argv=(python, RUNNER, "run", token_file, module, hidden, *rest))


class Arguments:
    """An argument list in the making that knows which options the installed version has."""

    def __init__(self, installed: Installed, part: Part) -> None:
        self.installed, self.part = installed, part
        self.argv: list[str] = []

    def give(self, name: str, *values: object) -> None:
        """Give an option that every version has."""
        self.argv += [f"--{name}", *map(str, values)]

    def offer(self, name: str, *values: object) -> bool:
        """Give an option if this version has it; return whether it has."""
        known = self.installed.option(self.part, name) is not None
        if known:
            self.give(name, *values)
        return known

    def pass_on(self, args: Mapping[str, Any]) -> None:
        """Give the user's own options. What was given before under the same name is taken out."""
        options = self.installed.options.get(self.part, ())
        for key in args:
            option = self.installed.option(self.part, dashed(key))
            for name in option.names if option is not None else ():
                self._take_out(name)
        self.argv += rendered(args, options)

    def _take_out(self, name: str) -> None:
        if f"--{name}" not in self.argv:
            return
        start = self.argv.index(f"--{name}")
        end = next((i for i in range(start + 1, len(self.argv)) if self.argv[i].startswith("--")), len(self.argv))
        del self.argv[start:end]

    def launch(self, module: str, url: str) -> Launch:
        """The process of `module` with these arguments."""
        return Launch((self.installed.python, "-m", module, *self.argv), base_environment(self.installed), url)


def base_environment(installed: Installed) -> dict[str, str]:
    """Variables of the server: imports from its own environment only, a cheap /health, no proxy for the loopback."""
    env = {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "PYTHONPATH": "",
        "PYTHONDONTWRITEBYTECODE": "",  # compiling thousands of modules again would double the time of each start
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if not installed.cuda:
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SHIMS)}
    if any(os.environ.get(name) for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")):
        # SGLang sends HTTP requests to itself at its start; a proxy of this machine must not get them.
        known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        hosts = ",".join(filter(None, [known, LOOPBACK, "localhost", platform.node()]))
        env |= {"no_proxy": hosts, "NO_PROXY": hosts}
    return env


# --------------------------------------------------------------------------------------------------
# The command line of one SGLang server.
#
# Invariants: the user's own options come last and win; a server answers on the loopback address unless a caller names
# another address; /health answers without generating, so that a paused engine does not look dead.


# On a CPU the KV cache is touched page by page, so that these bounds cost memory only where they are used.
CPU_KV_TOKENS_LEAST: Final = 16_384
CPU_KV_TOKENS_MOST: Final = 262_144
CPU_CONTEXT_GUESS: Final = 4096  # where neither the user nor the data bounds the context
CPU_MEMORY_FRACTION: Final = 0.3


_PIPELINE: Final = ("pp-size", "pipeline-parallel-size")


def server_launch(
    config: Config,
    installed: Installed,
    *,
    model_path: str,
    port: int,
    max_context: int | None,
    seed: int,
    host: str = LOOPBACK,
) -> Launch:
    """The server of one engine.

    `port`: a free one, SGLang cannot choose. `seed`: a different one for each engine, or two engines draw the same
    numbers. `host`: where it listens. Raises LaunchRefused if the machine cannot run such an engine.
    """
    given = Arguments(installed, "server")
    given.give("model-path", model_path)
    given.give("host", host)
    given.give("port", port)
    given.give("random-seed", seed)
    if max_context is not None:
        given.give("context-length", max_context)
    given.give("max-running-requests", config.engine.engine_slots)
    given.offer("enable-metrics")
    given.offer("log-level", config.observe.log_level)
    given.offer("log-level-http", "warning")  # a line for each request would bury what matters
    if config.health.stream_interval > 0:
        given.offer("stream-interval", config.health.stream_interval)
        given.offer("incremental-streaming-output")
    if not config.engine.prefix_cache:
        given.offer("disable-radix-cache")
    given.give("tp-size", tensor_parallel(config, installed))
    if installed.cuda:
        _on_gpu(given, config)
    else:
        _on_cpu(given, config, max_context)
    given.pass_on(config.sglang.sglang_args)
    return given.launch("sglang.launch_server", f"http://{host}:{port}")


def tensor_parallel(config: Config, installed: Installed) -> int:
    """Ranks that share each layer: the GPUs of one engine divided by its pipeline stages. Raises LaunchRefused, and
    EnvironmentMissing where there is no GPU."""
    gpus = config.sglang.rollout_num_gpus_per_engine
    # A checked option.
    stages = next((int(value) for key, value in config.sglang.sglang_args.items() if dashed(key) in _PIPELINE), 1)
    if stages < 1 or gpus % stages:
        raise LaunchRefused(
            f"--sglang-pp-size is {stages}, but must divide --rollout-num-gpus-per-engine {gpus}; choose a divisor"
        )
    if gpus > 1 and not installed.cuda:
        raise EnvironmentMissing(
            f"--rollout-num-gpus-per-engine is {gpus}, but {installed.python} sees no GPU; set it to 1, where an "
            "engine is one process on the CPU, or start the run where there are GPUs"
        )
    return gpus // stages


def _on_gpu(given: Arguments, config: Config) -> None:
    if config.engine.engine_dtype != "auto":
        given.give("dtype", config.engine.engine_dtype)
    if config.asynchrony.colocate:
        given.offer("enable-memory-saver")
    if config.run.deterministic:
        given.offer("enable-deterministic-inference")


def _on_cpu(given: Arguments, config: Config, max_context: int | None) -> None:
    """Plain torch, one thread, and a KV cache of a bounded number of tokens."""
    given.give("device", "cpu")
    given.give("attention-backend", "torch_native")
    if given.offer("cuda-graph-backend-decode", "disabled"):
        given.offer("cuda-graph-backend-prefill", "disabled")
    else:
        given.give("disable-cuda-graph")
    given.give("dtype", "float32" if config.engine.engine_dtype == "auto" else config.engine.engine_dtype)
    wanted = config.engine.engine_slots * (max_context or CPU_CONTEXT_GUESS)
    least = max(CPU_KV_TOKENS_LEAST, max_context or 0)
    given.give("max-total-tokens", min(max(wanted, least), max(CPU_KV_TOKENS_MOST, least)))
    given.give("mem-fraction-static", CPU_MEMORY_FRACTION)
    given.offer("sleep-on-idle")  # else the scheduler takes most of a core while it waits
    if config.engine.pause_generation_mode == "in_place":
        given.offer("disable-overlap-schedule")  # else the first token after an update is still of the old weights


# --------------------------------------------------------------------------------------------------
# The command line of the router: sglang-router, or its successor smg.
#
# Invariants: the router repeats nothing (the generate stage does, from partial output) and ends no request before the
# generate stage would. It starts without workers: the owner of an engine adds it once it has the published weights.


# `sticky` is what `auto` gives to work of several turns where no router stands before the engines.
Policy = Literal["round_robin", "random", "power_of_two", "cache_aware", "session", "least_loaded", "sticky"]

# Beyond the generate stage's own deadline of a request, so that it is always the generate stage that ends one.
TIMEOUT_MARGIN_S: Final = 60
BREAKER_FAILURES: Final = 3
BREAKER_OPEN_S: Final = 5

_MODULE: Final = {"router": "sglang_router.launch_router", "smg": "smg.launch_router"}
_NAMES: Final = {"session": "manual"}  # ours -> theirs, where they differ


def policy_of(config: Config) -> Policy:
    """How an engine is chosen, with `auto` decided: all turns of a rollout go to one engine."""
    policy = config.router.router_policy
    if policy != "auto":
        return policy
    routed, rollout = router_kind(config) != "none", config.rollout
    turns = config.tools.tools or config.environment or any(stage.loop is not None for stage in config.stage)
    if turns or rollout.custom_generate_function_path or rollout.rollout_function_path:
        return "session" if routed else "sticky"
    return "round_robin" if routed else "least_loaded"


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
    timeout_s = math.ceil(config.rollout.request_timeout_secs) + TIMEOUT_MARGIN_S
    given.give("request-timeout-secs", timeout_s)
    given.offer("worker-startup-check-interval", 1)
    level = config.observe.log_level
    given.offer("log-level", level if level in ("debug", "error") else "warn")
    _health(given, config)
    # What smg has beyond sglang-router, and would do to a paused engine: take its silence for a stall.
    given.offer("disable-load-monitoring")
    given.offer("disable-worker-overload-protection")
    given.offer("disable-tokenizer-autoload")  # requests come as token ids
    given.offer("stream-body-stall-timeout-secs", timeout_s)
    given.pass_on(config.router.router_args)
    return given.launch(_MODULE[part], f"http://{host}:{port}")


def _health(given: Arguments, config: Config) -> None:
    """A lost engine is passed over at once by the breaker; /health is looked at only where it never generates.

    The servers that Sluice starts answer /health also while they are paused. Those of others may not, and would be
    evicted in a long pause; the owner of an engine removes a lost engine in either case.
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


def require_router(part: Part, installed: Installed) -> None:
    """Raise EnvironmentMissing, with the cure, if that router is not in the environment."""
    if installed.options.get(part):
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
