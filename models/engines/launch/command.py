"""The command line and the environment of one SGLang server, from the configuration and what is installed.

Invariants: pure; an option is given only if the installed version has it; the user's own options come last and win; a
server answers on the loopback address unless a caller names another one, and its /health answers without generating,
for a paused engine must not look dead.
"""

from __future__ import annotations

from typing import Final

from configs.schema import Config
from models.engines.launch.arguments import LOOPBACK, Arguments, Launch, base_environment
from models.engines.launch.environment import Installed
from models.engines.launch.errors import LaunchRefused
from models.engines.launch.options import dashed

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
