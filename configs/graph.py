"""The graph of stages as names: the built-in path, loops, custom stages in their places, replicas, streams.

    prompts -> generate -> [custom after generate] -> reward -> [custom after reward] -> (teacher) -> group -> train
                  ^  |                                                                                  |
                  |  v  loop stages (agents, custom): own inlet back into generate                       v
               evaluate  <------------------------------------------------------------------------ evaluate

Invariants: no I/O, no clock; custom stages follow `after` from one to the next, those with the same `after` in the
order of the recipe; the order given here is the order in which a group passes the stages; the only cycles go through a
loop stage or the evaluation, which have inlets of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby, pairwise
from typing import Final, Literal

from msgspec import Struct

from configs.schema import Config, StageConfig, generates

BUILT_IN: Final = (
    "prompts",
    "generate",
    "engine",
    "engines",
    "agents",
    "reward",
    "teacher",
    "group",
    "train",
    "evaluate",
    "fetcher",
)
FOLLOWED: Final = ("generate", "reward", "teacher")  # built-in stages behind which a custom stage may stand

# Stages of which there is one, with the reason.
SINGLE: Final[Mapping[str, str]] = {
    "engines": "it is the single owner of the engines (--scale engine=N says how many of those there are)",
    "fetcher": "it is started on each node that has engines, away from the engines stage",
    "prompts": "it is the single writer of the ledger",
    "train": "it is the single writer of the weights and their version",
    "evaluate": "it joins the answers of one version, which must meet in one place",
}

MOST_REPLICAS: Final = 1024  # of a stage: a larger number is a slip, and holds up the controller
AUTOSCALE_LIMIT: Final = re.compile(r"([^=]+)=(\d{1,6})\.\.(\d{1,6})", re.ASCII)  # stage=LEAST..MOST

PROMPT: Final = "stages.messages:PromptGroup"
SLICE: Final = "stages.messages:RolloutSlice"
REPORT: Final = "stages.messages:Report"


class Stream(Struct, frozen=True):
    """One edge: `producers` (stage, outlet) put messages of `schema` in, `consumer` (stage, inlet) takes them."""

    name: str  # of its consumer, as `<stage>` or `<stage>.<inlet>`
    schema: str  # import path
    consumer: tuple[str, str]
    producers: tuple[tuple[str, str], ...]
    feedback: bool = False
    routing: Literal["least_loaded", "sticky", "keyed"] = "least_loaded"


def behind(config: Config, head: str, passed: frozenset[str] = frozenset()) -> tuple[StageConfig, ...]:
    """Custom stages behind `head`, each with those behind it. `passed` ends the walk where names form a cycle."""
    found: list[StageConfig] = []
    for stage in config.stage:
        if stage.after == head and stage.name != head and stage.name not in passed:
            found.append(stage)
            found.extend(behind(config, stage.name, passed | {head}))
    return tuple(found)


def path(config: Config) -> tuple[str, ...]:
    """The stages that every group passes. Supervised training and saved batches need no generation.

    What stands behind the teacher keeps its place in a run without one.
    """
    if not generates(config):
        return ("prompts", "train")
    own = {head: tuple(stage.name for stage in behind(config, head)) for head in FOLLOWED}
    teacher = ("teacher",) if config.distill.use_opd else ()
    rewarded = ("reward", *own["reward"], *teacher, *own["teacher"])
    return ("prompts", "generate", *own["generate"], *rewarded, "group", "train")


def loops(config: Config) -> tuple[str, ...]:
    """Stages that take unfinished rollouts from generate and return them: agents, the user's own loops.

    `--tools` is a shorthand for an environment: the agents stage calls them."""
    if not generates(config):
        return ()
    own = tuple(stage.name for stage in config.stage if stage.loop is not None)
    agents = ("agents",) if config.environment or config.tools.tools else ()
    return (*agents, *own)


def evaluates(config: Config) -> bool:
    """Whether the run has an evaluate stage."""
    return generates(config) and config.eval.eval_interval is not None and bool(config.eval.eval_prompt_data)


def engine_count(config: Config) -> int:
    """How many engines generate rollouts: those that run already, else as many as the GPUs hold, else `--scale`.

    `--rollout-num-gpus` says so only for SGLang's servers, the only engines that span GPUs. A rest of the division is a
    fault that `configs.rules.engine` reports.
    """
    if not generates(config):
        return 0
    sglang = config.sglang
    if sglang.rollout_external_engine_addrs:
        return len(sglang.rollout_external_engine_addrs)
    if config.engine.engine == "sglang" and sglang.rollout_num_gpus is not None:
        return sglang.rollout_num_gpus // sglang.rollout_num_gpus_per_engine
    return config.run.scale.get("engine", 1)


def evaluation_engines(config: Config) -> tuple[str, ...]:
    """The engines that serve evaluations alone: the address of each, "" of one that the run starts. None of them:
    evaluations share the engines of the rollouts."""
    if not evaluates(config):
        return ()
    return config.eval.eval_external_engine_addrs or ("",) * config.eval.eval_engines


def frozen_engines(config: Config) -> dict[str, str]:
    """Name -> checkpoint or address of the engines whose weights never change. Training alone asks none."""
    if not generates(config):
        return {}
    return {name: place for name, _, place in (entry.partition("=") for entry in config.engine.frozen_engine)}


def engines_started(config: Config) -> int:
    """All engines that the run starts: of rollouts, of frozen models and of evaluations alone."""
    frozen = sum(not is_address(place) for place in frozen_engines(config).values())
    own = 0 if config.sglang.rollout_external_engine_addrs else engine_count(config)
    return own + frozen + evaluation_engines(config).count("")


def is_address(place: str) -> bool:
    """Whether a frozen engine is one that runs already, at this address."""
    return place.startswith(("http://", "https://"))


def stage_names(config: Config) -> tuple[str, ...]:
    """All names that `--scale` knows."""
    return (*BUILT_IN, *(stage.name for stage in config.stage))


def replicas(config: Config) -> dict[str, int]:
    """Replicas of each stage that this run has; `--scale` outranks `replicas` in the stage's own table."""
    names = [*path(config), *loops(config)]
    if "generate" in names:
        names += ["engine", "engines"]
    if evaluates(config):
        names.append("evaluate")
    own = {stage.name: stage.replicas for stage in config.stage}
    counts = {name: config.run.scale.get(name, own.get(name, 1)) for name in names}
    return {**counts, "engine": engine_count(config)} if "engine" in counts else counts


def streams(config: Config) -> tuple[Stream, ...]:
    """All edges of the graph, those of the path first. Every stream has one consuming stage."""
    order = path(config)
    reporters = [name for name in order if name in ("group", "train")]
    found = [
        Stream(
            name,
            PROMPT if name == "generate" else SLICE,
            (name, "in"),
            ((before, "out"),),
            routing="keyed" if name == "group" else "least_loaded",  # the rollouts of a group meet in one replica
        )
        for before, name in pairwise(order)
    ]
    for name in loops(config):  # turns of a rollout go to one replica, which may keep what belongs to it in a cache
        turns = (("generate", f"loop.{name}"),)
        found.append(Stream(name, SLICE, (name, "in"), turns, feedback=True, routing="sticky"))
    if back := tuple((name, "out") for name in loops(config)):
        found.append(Stream("generate.return", SLICE, ("generate", "return"), back, feedback=True))
    if evaluates(config):
        found.append(Stream("generate.eval", PROMPT, ("generate", "eval"), (("evaluate", "out"),), feedback=True))
        found.append(Stream("evaluate", SLICE, ("evaluate", "in"), (("group", "eval"),)))
        reporters.append("evaluate")
    settle = tuple((name, "settle") for name in reporters)
    return (*found, Stream("settle", REPORT, ("prompts", "settle"), settle))


def chains(config: Config, counts: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """Neighbours on the path that run in one process, two stages at least each. `counts`: replicas by stage.

    A stage with several replicas is in none, for what reaches it may have to go to another process."""
    between = path(config)[1:-1]  # the ledger lives in the controller, and the trainer keeps its process busy
    asked = config.run.chain or ("+".join(between),)
    found: list[tuple[str, ...]] = []
    for text in asked:
        runs = groupby(text.split("+"), key=lambda name: counts.get(name, 1) == 1)
        found += [tuple(names) for single, names in runs if single]
    return tuple(chained for chained in found if len(chained) > 1)


def joined_to(config: Config, counts: Mapping[str, int]) -> dict[str, str]:
    """Stages that share a process: each later stage of a chain -> the first stage of that chain."""
    return {name: chained[0] for chained in chains(config, counts) for name in chained[1:]}


def autoscale_limits(config: Config) -> dict[str, tuple[int, int]]:
    """Stage, or `engine` -> the fewest and the most replicas; empty without `--autoscale`. Of what has no fault."""
    found = [match for text in config.run.autoscale if (match := AUTOSCALE_LIMIT.fullmatch(text))]
    return {match[1]: (int(match[2]), int(match[3])) for match in found}
