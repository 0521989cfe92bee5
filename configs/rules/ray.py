"""Roles, labels and devices of a run on a Ray cluster; whether the cluster has such nodes is seen at the start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from configs.graph import engine_count
from configs.schema import Config
from configs.schema.did_you_mean import cure

ROLES: Final = ("train", "rollout", "cpu")
Labels = dict[str, str]


def labels_of(text: str) -> tuple[str, tuple[Labels, ...]]:
    """A role and its alternatives, from `role=key:value,key:value|...`. Raises ValueError."""
    role, equals, rest = text.partition("=")
    if not (role and equals and rest):
        raise ValueError("must have the form role=key:value")
    alternatives = []
    for alternative in rest.split("|"):
        pairs = [condition.partition(":") for condition in alternative.split(",")]
        if not all(key and colon and value for key, colon, value in pairs):
            raise ValueError("must have the form role=key:value,key:value|key:value")
        alternatives.append({key: value for key, _, value in pairs})
    return role, tuple(alternatives)


def alternatives(config: Config, role: str) -> tuple[Labels, ...]:
    """Labels that a node for this role must have: the first of these sets that can be met. Any node: one empty set."""
    found = dict(labels_of(text) for text in config.ray.ray_labels)
    return found.get(role, ({},))


def ray_faults(config: Config) -> Iterator[str]:
    if config.run.runner != "ray":
        return
    roles = []
    for text in config.ray.ray_labels:
        try:
            role, _ = labels_of(text)
        except ValueError as error:
            yield f"--ray-labels holds {text!r}, but it {error}; write for example rollout=market:spot|market:on-demand"
            continue
        roles.append(role)
        if role not in ROLES:
            yield f"--ray-labels holds {text!r}, but {role} is no role; {cure(role, ROLES)}"
        elif roles.count(role) == 2:
            yield f"--ray-labels names {role} twice; join them: , between what must hold, | before a fallback"
    for role, count in config.ray.ray_cpus.items():
        if role not in ROLES:
            yield f"--ray-cpus {role}={count} names no role; {cure(role, ROLES)}"
        elif count < 0:
            yield f"--ray-cpus {role}={count} is less than nothing; set {role}=0, or leave it out"
    if (config.ray.ray_address or "").startswith("ray://"):
        yield (
            f"--ray-address is {config.ray.ray_address}, but the controller must run on a node of the cluster; "
            "start it there with --ray-address auto, or with `ray job submit`"
        )
    for label, device in (
        ("--train-device", config.train.train_device),
        ("--engine-device", config.engine.engine_device),
    ):
        if device.startswith("cuda:"):
            yield f"{label} is {device}, but with --runner ray it is Ray that chooses the GPU; set {label} cuda"
    if config.asynchrony.colocate and config.sglang.rollout_num_gpus_per_engine * engine_count(config) > 1:
        yield (
            "--colocate with --runner ray is for one engine on one GPU, which it shares with the trainer; lower "
            "--rollout-num-gpus and --scale engine=N, or use --runner local"
        )
