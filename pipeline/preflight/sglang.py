"""Checks of the Python environment of SGLang and its router, before anything starts.

Invariants: the environment is probed only if a server or router of this run uses it; all faults of options for SGLang
are reported together, in one sentence each, before the first process starts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pipeline
from configs.graph import engine_count, frozen_engines, is_address
from configs.schema import Config, generates, router_kind
from models.engines.errors import LaunchError
from models.engines.launch.command import tensor_parallel
from models.engines.launch.environment import Installed, Part, find_python, probe
from models.engines.launch.options import dashed, router_faults, server_faults
from models.engines.launch.router_command import require_router
from pipeline.errors import Refused, UsageError


class NoSglang(UsageError):
    """The environment of SGLang is missing, or does not answer."""


ROOT = Path(pipeline.__file__).parent.parent


def parts(config: Config) -> tuple[Part, ...]:
    """The programs that this run starts from that environment."""
    if not generates(config):
        return ()
    own = engine_count(config) > 0 and not config.sglang.rollout_external_engine_addrs
    frozen = any(not is_address(place) for place in frozen_engines(config).values())
    server = config.engine.engine == "sglang" and (own or frozen)
    kind = router_kind(config) if config.router.router_address is None else "none"
    programs: list[Part] = ["server"] if server else []
    if kind != "none":
        programs.append("smg" if kind == "smg" else "router")
    return tuple(programs)


def prepare_sglang(config: Config, *, warn: bool = True) -> Installed:
    """Find the environment, list its versions, check the options for SGLang; with `warn`, print unwise settings.

    A run that starts no program of SGLang probes nothing, and gets an account without versions. Blocks for 0.1 s, or
    for the 5 to 15 s of SGLang's imports after an installation. Raises UsageError with every fault, or what is missing.
    """
    wanted = parts(config)
    if not wanted:
        nothing = find_python(config.sglang, ROOT) if config.sglang.sglang_python else Path()
        return Installed(python=str(nothing), python_version="")
    try:
        installed = probe(find_python(config.sglang, ROOT), wanted)
    except LaunchError as error:
        raise NoSglang(str(error)) from error
    try:
        if faults := [*_faults(config, installed, wanted)]:
            raise Refused(faults)
    except LaunchError as error:
        raise UsageError(str(error)) from error
    for line in warnings(config, installed) if warn and "server" in wanted else ():
        sys.stderr.write(f"warning: {line}\n")
    return installed


def warnings(config: Config, installed: Installed) -> Iterator[str]:
    """Settings whose effect on this run's servers the user may not want."""
    off = any(dashed(key) == "disable-overlap-schedule" and value for key, value in config.sglang.sglang_args.items())
    generates = not config.sglang.rollout_external_engine_addrs
    if installed.cuda and generates and config.engine.pause_generation_mode == "in_place" and not off:
        yield (
            "--pause-generation-mode is in_place, and SGLang's overlap scheduling is on: the first token of a prefill "
            "under way at an update is of the older weights and labelled with the newer; use --pause-generation-mode "
            "retract, or --sglang-disable-overlap-schedule"
        )


def _faults(config: Config, installed: Installed, wanted: Sequence[Part]) -> Iterator[str]:
    """All faults of this run's options for the environment. Raises LaunchError."""
    if "server" in wanted:
        faults = server_faults(config.sglang.sglang_args, installed)
        yield from faults
        if not faults:
            tensor_parallel(config, installed)
    for part in wanted:
        if part != "server":
            require_router(part, installed)
            yield from router_faults(config.router.router_args, installed, part)
