"""Engines, their router, the route of the weights: what contradicts itself without asking any environment.

Options that are passed on to SGLang or its router are checked against the installed versions elsewhere
(`pipeline.preflight.refusals`); here only options that no server would get are reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from configs.graph import engine_count, frozen_engines, is_address
from configs.schema import Config, router_kind
from configs.schema.notation import repeated

_ADDRESS: Final = re.compile(r"https?://[^\s/:@]+:\d{1,5}/?|https?://\[[0-9a-fA-F:]+\]:\d{1,5}/?")
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_OWN_ROUTES: Final = ("disk", "delta")  # of the engines that are not SGLang


def fleet_faults(config: Config) -> Iterator[str]:
    """How many engines, on what, and whose."""
    sglang, scale = config.sglang, config.run.scale.get("engine")
    external = sglang.rollout_external_engine_addrs
    gpus, each = sglang.rollout_num_gpus, sglang.rollout_num_gpus_per_engine
    if gpus is not None and gpus % each:
        yield (
            f"--rollout-num-gpus is {gpus}, but must be divisible by --rollout-num-gpus-per-engine {each}, for an "
            f"engine takes whole GPUs; set it to {max(1, gpus // each) * each}"
        )
    elif gpus is not None and scale is not None and config.engine.engine == "sglang" and scale != gpus // each:
        yield (
            f"--rollout-num-gpus {gpus} gives {gpus // each} engines of {each} GPUs, but --scale says engine={scale}; "
            "leave one of them out"
        )
    yield from _addresses("--rollout-external-engine-addrs", external)
    yield from _addresses("--eval-external-engine-addrs", evaluating := config.eval.eval_external_engine_addrs)
    for address in sorted({place.rstrip("/") for place in external} & {place.rstrip("/") for place in evaluating}):
        yield (
            f"--eval-external-engine-addrs holds {address!r}, as does --rollout-external-engine-addrs, but an engine "
            "has one version at a time; give evaluations engines of their own"
        )
    yield from _plain_faults(config)
    if not external:
        return
    if config.engine.engine != "sglang":
        yield (
            f"--rollout-external-engine-addrs names SGLang servers, but --engine is {config.engine.engine}, whose "
            "engines are started with the run; add --engine sglang"
        )
    if scale is not None and scale != len(external):
        yield (
            f"--scale engine={scale} contradicts the {len(external)} addresses of --rollout-external-engine-addrs; "
            "leave engine out"
        )


def _plain_faults(config: Config) -> Iterator[str]:
    """Addresses of other machines without TLS."""
    places = {
        "--rollout-external-engine-addrs": config.sglang.rollout_external_engine_addrs,
        "--eval-external-engine-addrs": config.eval.eval_external_engine_addrs,
        "--router-address": filter(None, [config.router.router_address]),
        "--frozen-engine": filter(is_address, frozen_engines(config).values()),
    }
    for name, addresses in places.items():
        for address in addresses:
            if _remote(address) and address.startswith("http:") and not config.engine.allow_plain_engines:
                yield (
                    f"{name} {address} is another machine without TLS: anyone who can read its network reads prompts, "
                    "responses and the engines' token; give an https:// address, or --allow-plain-engines on a "
                    "network that you trust"
                )


def router_faults(config: Config) -> Iterator[str]:
    """What chooses an engine for a request, and how."""
    router = config.router
    if router.router_address is not None:
        yield from _addresses("--router-address", (router.router_address,))
        if router.router == "none":
            yield "--router is none, but --router-address names one; leave one of them out"
    kind = router_kind(config)
    if router.router_policy == "least_loaded" and kind != "none":
        yield (
            f"--router-policy is least_loaded, which the generate stage alone can do, but a router ({kind}) stands in "
            "front of the engines; add --router none, or choose power_of_two"
        )


def update_faults(config: Config) -> Iterator[str]:
    """The route of the weights."""
    update, engine = config.update, config.engine.engine
    if update.update_weight_transport not in _OWN_ROUTES and engine != "sglang":
        yield (
            f"--update-weight-transport is {update.update_weight_transport}, but the {engine} engine takes weights by "
            f"{' and '.join(_OWN_ROUTES)} only; choose one of these, or --engine sglang"
        )
    elif update.update_weight_transport == "tensor" and config.run.runner == "ray" and config.sglang.rollout_num_gpus:
        yield (
            "--update-weight-transport is tensor, which copies to each engine's own GPUs, but with --runner ray the "
            "cluster assigns them and the run does not know which; choose disk, distributed or delta"
        )


def warnings(config: Config) -> Iterator[str]:
    sglang, router, kind = config.sglang, config.router, router_kind(config)
    external = sglang.rollout_external_engine_addrs
    unread = sorted(sglang.sglang_args)
    if unread and config.engine.engine != "sglang":
        yield f"--sglang-{_dashed(unread[0])} has no effect: --engine is {config.engine.engine}"
    elif unread and external:
        yield f"--sglang-{_dashed(unread[0])} has no effect: the engines run already"
    if config.engine.engine != "sglang" and (sglang.rollout_num_gpus or sglang.rollout_num_gpus_per_engine > 1):
        yield (
            "--rollout-num-gpus and --rollout-num-gpus-per-engine have no effect with --engine "
            f"{config.engine.engine}; use --scale engine=N and --engine-device"
        )
    if router.router_args and (kind == "none" or router.router_address is not None):
        why = "this run has no router" if kind == "none" else "the router runs already"
        yield f"--router-{_dashed(min(router.router_args))} has no effect: {why}"
    if router.router_address is not None and router.router_policy != "auto":
        yield "--router-policy says only how requests are sent round the router: --router-address has its own policy"
    route = config.update.update_weight_transport
    remote = [address for address in external if _remote(address)]
    if remote and route in ("disk", "tensor"):  # they need more than an address in common
        yield (
            f"--update-weight-transport {route} goes through this machine's memory, which {remote[0]} cannot read if "
            "it is another machine; use delta with a shared --update-weight-delta-dir, or distributed"
        )
    if config.asynchrony.colocate and route == "distributed":
        yield "--update-weight-transport distributed cannot join two processes on one GPU; with --colocate use tensor"
    if (config.update.update_weight_rolling or 0) > max(1, engine_count(config)):
        yield (
            f"--update-weight-rolling {config.update.update_weight_rolling} lets all {engine_count(config)} engines "
            "stand still at once"
        )


def _remote(address: str) -> bool:
    """Whether an address is well formed and not of this machine by its name."""
    return bool(_ADDRESS.fullmatch(address)) and urlsplit(address).hostname not in _LOOPBACK


def _addresses(label: str, addresses: tuple[str, ...]) -> Iterator[str]:
    for address in addresses:
        port = address.rstrip("/").rpartition(":")[2]
        if not _ADDRESS.fullmatch(address) or not 0 < int(port) < 65536:
            yield f"{label} holds {address!r}, but an address must have the form http://host:port; write it so"
    for address, count in repeated(address.rstrip("/") for address in addresses):
        yield f"{label} holds {address!r} {count} times, but each is one engine; leave it there once"


def _dashed(name: str) -> str:
    return name.replace("_", "-")
