"""Stages, replicas, devices; roles, labels and nodes of a Ray cluster.

Whether a cluster has such nodes is seen at the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from configs import graph
from configs.schema import Config, StageConfig
from configs.schema.notation import cure, repeated

_NAME = re.compile(r"[a-z][a-z0-9_-]*", re.ASCII)
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?", re.ASCII)
_MEET: Final = (
    "but --dynamic-sampling-filter duplicate_prompt compares each with all before it, which must meet in one replica; "
    "leave one of them out"
)
ROLES: Final = ("train", "rollout", "cpu")
Labels = dict[str, str]


def scale_faults(config: Config) -> Iterator[str]:
    for name, count in config.run.scale.items():
        if name == "tools" and name not in graph.stage_names(config):
            yield f"--scale tools={count} names no stage: tools are called in the stage agents; set agents={count}"
        elif name not in graph.stage_names(config):
            hint = cure(name, graph.stage_names(config), f"the stages are {', '.join(graph.stage_names(config))}")
            yield f"--scale {name}={count} names no stage; {hint}"
        elif count < 1:
            yield f"--scale {name}={count} leaves no replica, but each stage needs at least one; set {name}=1"
        elif name in graph.SINGLE and count > 1:
            why = graph.SINGLE[name]
            yield f"--scale {name}={count} is too many, for there can be only one: {why}; leave {name} out"
        elif count > graph.MOST_REPLICAS:
            yield (
                f"--scale {name}={count} is more than {graph.MOST_REPLICAS} replicas, the most of a stage, for each is "
                f"a process; set {name}={graph.MOST_REPLICAS} or less"
            )
        elif name == "group" and count > 1 and "duplicate_prompt" in config.filter.dynamic_sampling_filter:
            yield f"--scale group={count} shares groups out, {_MEET}"
        elif name == "agents" and name not in graph.loops(config):
            yield (
                f"--scale agents={count} scales a stage that this run does not have; add an [[environment]] or "
                "--tools, or leave agents out"
            )
    for stage in config.stage:
        if stage.replicas > graph.MOST_REPLICAS:
            yield f"stage.{stage.name}.replicas is {stage.replicas}, above {graph.MOST_REPLICAS}, the most; set fewer"
    started = sum(not graph.is_address(place.partition("=")[2]) for place in config.engine.frozen_engine)
    started += graph.evaluation_engines(config).count("")
    last = config.engine.engine_port + graph.engine_count(config) + started - 1
    if config.engine.engine_port and last > 65535:
        yield (
            f"--engine-port is {config.engine.engine_port}, but the last engine would need {last}; set a lower port, "
            "or 0"
        )


def chain_faults(config: Config) -> Iterator[str]:
    between, seen = graph.path(config)[1:-1], set[str]()
    for text in config.run.chain if config.run.chain != ("none",) else ():
        names = text.split("+")
        start = between.index(names[0]) if names[0] in between else 0
        if len(names) < 2 or between[start : start + len(names)] != tuple(names):
            order = "+".join(between) or "nothing, for this run has no stage between prompts and train"
            yield f"--chain {text} names no neighbours of this run, which are in their order {order}; or set none"
        elif twice := sorted(seen & set(names)):
            yield f"--chain names {twice[0]} twice, but a stage is in one process; leave one of them out"
        seen |= set(names)


def table_name_faults(section: str, names: Sequence[str]) -> Iterator[str]:
    """Names of the tables of a section."""
    for name, count in repeated(names):
        yield f"{section}.{name} is there {count} times, but names must differ; rename all but one"
    for name in dict.fromkeys(names):
        if not _NAME.fullmatch(name):
            yield f"{section} name {name!r} must be small letters, digits, - and _, with a letter first; rename it"


def stage_faults(config: Config) -> Iterator[str]:
    names = [stage.name for stage in config.stage]
    yield from table_name_faults("stage", names)
    for name in dict.fromkeys(names):
        if name in graph.BUILT_IN:
            yield f"stage.{name} has the name of a built-in stage; rename it, for example my_{name}"
    for stage in config.stage:
        yield from _place_faults(stage, config)
    reached = {stage.name for head in graph.FOLLOWED for stage in graph.behind(config, head)}
    for stage in config.stage:
        if stage.after in names and stage.name not in reached and stage.after != stage.name:
            yield (
                f"stage.{stage.name}.after is {stage.after!r}, but that chain of stages never begins at a built-in "
                f"one; let one of them come after {', '.join(graph.FOLLOWED)}"
            )


def _place_faults(stage: StageConfig, config: Config) -> Iterator[str]:
    key = f"stage.{stage.name}"
    if (stage.after is None) == (stage.loop is None):
        have = "both after and loop" if stage.after is not None else "neither after nor loop"
        yield f"{key} has {have}, but needs exactly one; write for example after = 'generate'"
        return
    if stage.loop is not None:
        if stage.loop != "generate":
            yield (
                f"{key}.loop is {stage.loop!r}, but only generate sends unfinished rollouts round; set loop = "
                "'generate'"
            )
        return
    after = str(stage.after)
    own = [other.name for other in config.stage if other.after is not None and other.name != stage.name]
    allowed = (*graph.FOLLOWED, *own)
    if after in allowed:
        return
    if after in graph.BUILT_IN:
        yield f"{key}.after is {after!r}, which is no place for a custom stage; choose one of {', '.join(allowed)}"
    else:
        yield f"{key}.after is {after!r}, which is no stage; {cure(after, allowed)}"


def device_faults(config: Config) -> Iterator[str]:
    for label, device in (
        ("--engine-device", config.engine.engine_device),
        ("--train-device", config.train.train_device),
    ):
        if not _DEVICE.fullmatch(device):
            yield f"{label} is {device!r}, but must be auto, cpu, cuda or cuda:N; give for example {label} cpu"
        elif device.startswith("cuda:") and config.run.runner == "ray":
            yield f"{label} is {device}, but with --runner ray it is Ray that chooses the GPU; set {label} cuda"


def scale_warnings(config: Config) -> Iterator[str]:
    if config.tools.tools and config.rollout.max_turns == 1:
        yield "--max-turns 1 ends a rollout at its first tool call, so that no answer follows the tool's result"
    absent = set(config.run.scale) & set(graph.BUILT_IN) - set(graph.replicas(config))
    for name in sorted(absent - {"agents"}):
        yield f"--scale {name} has no effect: this run has no such stage"


def autoscale_faults(config: Config) -> Iterator[str]:
    there, seen = graph.replicas(config), set[str]()
    for text in config.run.autoscale:
        match = graph.AUTOSCALE_LIMIT.fullmatch(text)
        if match is None:
            yield f"--autoscale {text!r} is no STAGE=LEAST..MOST; write for example reward=1..8"
            continue
        name, least, most = match[1], int(match[2]), int(match[3])
        if name in seen:
            yield f"--autoscale has limits of {name} twice; leave all but one out"
        elif name not in graph.stage_names(config):
            known = [stage for stage in there if stage not in graph.SINGLE]
            hint = cure(name, known, f"the stages that scale are {', '.join(known)}")
            yield f"--autoscale {text} names no stage; {hint}"
        elif name in graph.SINGLE:
            yield f"--autoscale {text} cannot be, for there is only one: {graph.SINGLE[name]}; leave {name} out"
        elif name not in there:
            yield f"--autoscale {text} scales a stage that this run does not have; leave {name} out"
        elif not 1 <= least <= most <= graph.MOST_REPLICAS:
            yield (
                f"--autoscale {text} must have 1 <= LEAST <= MOST <= {graph.MOST_REPLICAS}; write for example "
                f"{name}=1..{min(max(least, most, 2), graph.MOST_REPLICAS)}"
            )
        elif not least <= there[name] <= most:
            yield (
                f"--autoscale {text} does not hold the {there[name]} replicas that --scale gives {name}; widen it, or "
                f"set --scale {name}={min(max(there[name], least), most)}"
            )
        elif name == "engine" and (why := _fixed_engines(config)):
            yield f"--autoscale {text} cannot be with {why}, which fixes the number of engines; leave one of them out"
        elif name == "group" and most > 1 and "duplicate_prompt" in config.filter.dynamic_sampling_filter:
            yield f"--autoscale {text} would share groups out, {_MEET}"
        seen.add(name)


def _fixed_engines(config: Config) -> str | None:
    """The setting for which no engine may come or go."""
    if config.sglang.rollout_external_engine_addrs:
        return "--rollout-external-engine-addrs"
    if config.asynchrony.colocate:
        return "--colocate"
    if config.engine.engine == "sglang" and config.sglang.rollout_num_gpus is not None:
        return "--rollout-num-gpus"
    return None


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
    return dict(labels_of(text) for text in config.ray.ray_labels).get(role, ({},))


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
    address = config.ray.ray_address or "auto"
    if address != "auto" and not address.rpartition(":")[2].isdigit():
        yield f"--ray-address is {address!r}, but must be auto or host:port; give what `ray start --head` printed"
    elif address.startswith("ray://"):
        yield (
            f"--ray-address is {config.ray.ray_address}, but the controller must run on a node of the cluster; "
            "start it there with --ray-address auto, or with `ray job submit`"
        )
    count, each = graph.engine_count(config), config.sglang.rollout_num_gpus_per_engine
    nodes, per_node = config.parallel.actor_num_nodes, config.parallel.actor_num_gpus_per_node
    if config.asynchrony.colocate and (count * each > nodes * per_node or per_node % each):
        yield (
            "--colocate with --runner ray puts each engine on GPUs of the trainer on one node, which no other engine "
            f"has: {each} (--rollout-num-gpus-per-engine) for each of {count} engines, but the trainer has {per_node} "
            f"(--actor-num-gpus-per-node) on {nodes} (--actor-num-nodes); have fewer or smaller engines, or use "
            "--runner local"
        )
