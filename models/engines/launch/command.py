"""Command lines of SGLang's servers: which arguments, from which options, in which environment."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from configs.schema import Config
from models.engines.errors import LaunchRefused
from models.engines.launch.environment import SHIMS, Installed, Part
from models.engines.launch.options import dashed, rendered

# --------------------------------------------------------------------------------------------------
# An argument list in the making, and the environment variables that every process of SGLang's environment gets.
#
# Invariants: an option is offered only if the installed version has it; of two givings of one option the later one
# stands alone; nothing of this project is on the import path of the started process.


LOOPBACK: Final = "127.0.0.1"
RUNNER: Final = str(Path(__file__).with_name("with_token.py"))


class Launch(Struct, frozen=True):
    """How to start one process. `env` is laid over the environment of whoever starts it."""

    argv: tuple[str, ...]
    env: dict[str, str]
    url: str


def with_token(launch: Launch, token_file: str, *, hidden: str = "-") -> Launch:
    """The same process with the token as its key, which neither its command line nor its environment shows. `hidden`: a
    module that it may not import."""
    python, flag, module, *rest = launch.argv
    assert flag == "-m"
    return msgspec.structs.replace(launch, argv=(python, RUNNER, token_file, module, hidden, *rest))


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
        options = self.installed.options(self.part)
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


def base_environment(installed: Installed) -> dict[str, str]:
    """Variables of the server: imports from its own environment only, a cheap /health, no proxy for the loopback."""
    env = {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "PYTHONPATH": "",
        "PYTHONDONTWRITEBYTECODE": "",  # compiling thousands of modules anew would double the time of each start
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if not installed.cuda:
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SHIMS)}
    return env | _no_proxy()


def _no_proxy() -> dict[str, str]:
    """SGLang asks itself over HTTP while it starts; a proxy of this machine must not get those requests."""
    if not any(os.environ.get(name) for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")):
        return {}
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = ",".join(filter(None, [known, LOOPBACK, "localhost", platform.node()]))
    return {"no_proxy": hosts, "NO_PROXY": hosts}


# --------------------------------------------------------------------------------------------------
# The command line and the environment of one SGLang server, from the configuration and what is installed.
#
# Invariants: pure; an option is given only if the installed version has it; the user's own options come last and win; a
# server answers on the loopback address unless a caller names another one, and its /health answers without generating,
# for a paused engine must not look dead.


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
    return Launch(
        (installed.python, "-m", "sglang.launch_server", *given.argv),
        base_environment(installed),
        f"http://{host}:{port}",
    )


def tensor_parallel(config: Config, installed: Installed) -> int:
    """Ranks that share each layer: the GPUs of one engine divided by its pipeline stages. Raises LaunchRefused."""
    gpus = config.sglang.rollout_num_gpus_per_engine
    if gpus > 1 and not installed.cuda:
        raise LaunchRefused(
            f"--rollout-num-gpus-per-engine is {gpus}, but {installed.python} sees no GPU; set it to 1, where an "
            "engine is one process on the CPU"
        )
    stages = next(
        (int(value) for key, value in config.sglang.sglang_args.items() if dashed(key) in _PIPELINE), 1
    )  # a checked option
    if stages < 1 or gpus % stages:
        raise LaunchRefused(
            f"--sglang-pp-size is {stages}, but must divide --rollout-num-gpus-per-engine {gpus}; choose a divisor"
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
