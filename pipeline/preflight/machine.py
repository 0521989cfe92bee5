"""What a plan (`--dry-run`) looks at on its machine: directories, weights, ports, addresses. A run meets
most of it as it goes on.

Invariant: nothing is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from configs.graph import engines_started, evaluation_engines, frozen_engines, is_address
from configs.schema import Config, generates, served_checkpoint
from configs.schema.run import batch_file
from models.engines.client import EngineClient
from models.engines.embedded.model_spec import served_shape
from models.errors import CheckpointUnavailable, EngineError, EngineStartError, UnsupportedModel
from models.families.source import check_files, read_hf_config
from pipeline.errors import NotHere, Refused, UsageError
from pipeline.facts.run_directory import disk_error, in_use
from pipeline.hosts.machine import HOST, PortInUse, held_port
from pipeline.hosts.ray.cluster import reach
from pipeline.preflight.data import BUILT_IN_MODELS, HEALTH_S, check_frozen, check_vocabularies, external_token
from pipeline.preflight.refusals import tokenizer_here
from stages.train.saved_groups import SavedBatches


def check_run_dir(config: Config) -> None:
    """It can be made: a directory is, in it or above it, for a moment."""
    path = Path(config.run.resume or config.run.run_dir or "runs").absolute()
    if in_use(path):
        raise UsageError(f"--run-dir {path} is in use by another run; choose another directory")
    try:
        _make_for_a_moment(path)
    except OSError as error:
        raise disk_error(path, error) from error


def _make_for_a_moment(path: Path) -> None:
    tempfile.TemporaryDirectory(dir=next(place for place in (path, *path.parents) if place.exists())).cleanup()


def check_targets(config: Config) -> None:
    """What else the run writes can be written where it is named: a copy of a checkpoint may come hours later. On a
    cluster the trainer's node decides. Raises Refused."""
    debug, faults = config.debug, []
    targets = {
        "--save-hf": config.checkpoint.save_hf,
        "--update-weight-delta-dir": config.update.update_weight_delta_dir,
    }
    for flag, name in (("rollout", debug.save_debug_rollout_data), ("train", debug.save_debug_train_data)):
        targets[f"--save-debug-{flag}-data"] = name and (os.path.dirname(name) or ".")
    given = {flag: target for flag, target in targets.items() if target is not None and config.run.runner != "ray"}
    for flag, target in given.items():
        try:
            _make_for_a_moment(Path(target).absolute())
        except OSError as error:
            faults.append(
                f"{flag} is {target!r}, where nothing can be written ({error.strerror}); choose another place"
            )
    if faults:
        raise Refused(faults)


def check_batches(config: Config) -> None:
    """The first saved batch can be read, and trained by this configuration. Raises SavedBatchError."""
    template = config.debug.load_debug_rollout_data
    if template is not None and Path(batch_file(template, 0)).is_file():  # else the rules have said so
        SavedBatches(config).group(0)


def check_weights(config: Config) -> None:
    """The headers of the files, which say how long these are; and whether the embedded engine serves the model. Files
    other than safetensors are left to their reader, which that engine is not."""
    flags = {place: f"--frozen-engine {name}=" for name, place in frozen_engines(config).items()}
    flags |= {config.critic.critic_load or "": "--critic-load ", config.train.ref_load or "": "--ref-load "}
    flags |= {served_checkpoint(config): "--engine-checkpoint ", config.train.hf_checkpoint: "--hf-checkpoint "}
    places = {place: Path(place).expanduser() for place in flags if place not in BUILT_IN_MODELS and place}
    embedded = config.engine.engine == "embedded" and generates(config)
    served = {served_checkpoint(config), *frozen_engines(config).values()} if embedded else set[str]()
    for place, path in places.items() if config.train.train_backend != "simulated" else ():
        try:
            if not (path / "config.json").is_file():  # the rules have said so
                continue
            if place in served:
                served_shape(read_hf_config(path), path)
            if config.train.train_backend == "megatron" and not flags[place].startswith(("--frozen", "--engine")):
                check_megatron(read_hf_config(path))
            if place in served or not any(path.glob("*.bin")):
                check_files(path)
        except (CheckpointUnavailable, EngineStartError, UnsupportedModel) as error:
            raise UsageError(f"{flags[place]}{place}: {error}") from error
    if names := [place for place, path in places.items() if not path.is_dir() and not is_address(place)]:
        raise NotHere(f"weights and tokenizer of {', '.join(names)}: the Hugging Face hub is asked at the start")


def check_megatron(hf_config: Mapping[str, Any]) -> None:
    """As the ranks do when they build the model. Loads torch, which a plan may. Raises UnsupportedModel."""
    from models.families.registry import architecture_of

    architecture_of(hf_config)


def check_ports(config: Config) -> None:
    """Ports that are named are free. Those of a cluster's nodes are seen at the start."""
    first, observe = config.engine.engine_port, config.observe
    started = engines_started(config)
    ports = {port: ("--engine-port", HOST) for port in range(first, first + started) if config.run.runner != "ray"}
    if observe.prometheus_port in ports and observe.prometheus_port:
        raise UsageError(
            f"--prometheus-port is {observe.prometheus_port}, but the engines take the ports {first} to "
            f"{first + started - 1} (--engine-port); choose another port"
        )
    for port, (flag, host) in (
        ports | {observe.prometheus_port: ("--prometheus-port", observe.prometheus_host)}
    ).items():
        try:
            with held_port(port, host) if port and ":" not in host else contextlib.nullcontext():
                pass
        except PortInUse as error:
            raise UsageError(f"{flag}: {error.strerror}; stop what listens there, or choose another port") from error


def check_cluster(config: Config) -> None:
    address = config.ray.ray_address or os.environ.get("RAY_ADDRESS")
    if config.run.runner == "ray" and address is not None:
        reach(address)
        raise NotHere(f"nodes and GPUs of the cluster at {address}: a run counts them when it has joined it")


def check_running(config: Config) -> None:
    """Engines and routers that are there already answer."""
    if generates(config):
        asyncio.run(_all_answer(config))


async def _all_answer(config: Config) -> None:
    flag, token = "--rollout-external-engine-addrs", external_token(config)
    servers = dict.fromkeys(config.sglang.rollout_external_engine_addrs, (flag, "/model_info"))
    asked = ("--eval-external-engine-addrs", "/model_info")
    servers |= {url: asked for url in evaluation_engines(config) if url}
    if config.router.router_address is not None:
        servers[config.router.router_address] = ("--router-address", "/health")
    for url, (flag, path) in servers.items():
        async with EngineClient(url, connect_timeout_s=HEALTH_S, token=token) as client:
            try:
                await client.call("GET", path, None, HEALTH_S)
            except EngineError as error:
                raise UsageError(f"{flag} {url}: {error}; start it first, or give its right address") from error
    if config.engine.frozen_engine:
        await check_frozen(config, tokenizer_here(config))


MACHINE: Final = (
    check_run_dir, check_targets, check_batches, check_weights, check_vocabularies, check_ports, check_cluster,
    check_running,
)  # fmt: skip
