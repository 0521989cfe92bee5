"""The limits of `--autoscale`: which stages a run may scale by itself, and between which numbers of replicas. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from configs.graph import SINGLE, replicas, stage_names
from configs.schema import Config
from configs.schema.did_you_mean import cure

_LIMIT: Final = re.compile(r"([^=]+)=(\d{1,6})\.\.(\d{1,6})", re.ASCII)


def autoscale_limits(config: Config) -> dict[str, tuple[int, int]]:
    """Stage, or `engine` -> the fewest and the most replicas; empty without `--autoscale`. Of what has no fault."""
    found = [match for text in config.run.autoscale if (match := _LIMIT.fullmatch(text))]
    return {match[1]: (int(match[2]), int(match[3])) for match in found}


def autoscale_faults(config: Config) -> Iterator[str]:
    there, seen = replicas(config), set[str]()
    for text in config.run.autoscale:
        match = _LIMIT.fullmatch(text)
        if match is None:
            yield f"--autoscale {text!r} is no STAGE=LEAST..MOST; write for example reward=1..8"
            continue
        name, least, most = match[1], int(match[2]), int(match[3])
        if name in seen:
            yield f"--autoscale has limits of {name} twice; leave all but one out"
        elif name not in stage_names(config):
            known = [stage for stage in there if stage not in SINGLE]
            hint = cure(name, known, f"the stages that scale are {', '.join(known)}")
            yield f"--autoscale {text} names no stage; {hint}"
        elif name in SINGLE:
            yield f"--autoscale {text} cannot be, for there is only one: {SINGLE[name]}; leave {name} out"
        elif name not in there:
            yield f"--autoscale {text} scales a stage that this run does not have; leave {name} out"
        elif not 1 <= least <= most:
            yield f"--autoscale {text} must have 1 <= LEAST <= MOST; write for example {name}=1..{max(least, most, 2)}"
        elif not least <= there[name] <= most:
            near = min(max(there[name], least), most)
            yield (
                f"--autoscale {text} does not hold the {there[name]} replicas that --scale gives {name}; widen it, or "
                f"set --scale {name}={near}"
            )
        elif name == "engine" and (why := _fixed_engines(config)):
            yield f"--autoscale {text} cannot be with {why}, which fixes the number of engines; leave one of them out"
        elif name == "group" and most > 1 and "duplicate_prompt" in config.filter.dynamic_sampling_filter:
            yield (
                f"--autoscale {text} would share groups out, but --dynamic-sampling-filter duplicate_prompt compares "
                "each with all before it, which must meet in one replica; leave one of them out"
            )
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
