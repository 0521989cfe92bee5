"""Parts of a run alone, saved rollout batches, faults on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from configs.graph import replicas
from configs.plan.parallel_layout import trainer_processes
from configs.schema import Config
from configs.schema.debug import RANK, FaultKind, batch_file, read_fault


def debug_faults(config: Config) -> Iterator[str]:
    debug = config.debug
    saved, loaded = debug.save_debug_rollout_data, debug.load_debug_rollout_data
    yield from _injection_faults(config)
    yield from _template_faults("--save-debug-rollout-data", saved)
    yield from _template_faults("--load-debug-rollout-data", loaded)
    if debug.debug_rollout_only and (debug.debug_train_only or loaded is not None):
        other = "--debug-train-only" if loaded is None else "--load-debug-rollout-data"
        yield f"--debug-rollout-only generates and {other} does not; leave one of them out"
    if debug.debug_train_only and loaded is None and config.train.loss_type != "sft_loss":
        yield (
            "--debug-train-only starts no engine, so that there is nothing to train on; give --load-debug-rollout-data "
            "with batches that an earlier run saved, or --loss-type sft_loss"
        )
    if saved is not None and config.rollout.num_rollout != 1 and _names_no_batch(saved):
        yield (
            f"--save-debug-rollout-data is {saved!r}, so that each batch would replace the one before; write "
            "{rollout_id} somewhere in it"
        )
    if loaded is None:
        return
    if config.train.loss_type == "sft_loss":
        yield "--load-debug-rollout-data holds rollouts, and --loss-type sft_loss trains on labels; leave one out"
    if config.run.resume is not None:
        yield (
            "--resume with --load-debug-rollout-data: batches would be cut differently; start the run again, which "
            "generates nothing"
        )
    yield from _missing_faults(loaded, config.rollout.num_rollout)


def _injection_faults(config: Config) -> Iterator[str]:
    """What `--fault-inject` asks for and this run cannot do."""
    known = [name for name in replicas(config) if name != "engines"]  # which takes no messages
    if trainer_processes(config):
        known.append(RANK)
    for text in config.debug.fault_inject:
        try:
            fault = read_fault(text)
        except ValueError as error:
            yield f"--fault-inject {text!r}: {error}"
            continue
        if fault.stage not in known:
            yield (
                f"--fault-inject {text!r}: there is no stage {fault.stage} in this run that takes messages; choose one "
                f"of {', '.join(known)}"
            )
        elif fault.stage == "engine" and (why := _engine_fault(config, fault.kind)):
            yield f"--fault-inject {text!r}: {why}"
        elif fault.kind == "drop" and fault.stage != "engine":
            yield f"--fault-inject {text!r}: drop is of an answer, so only engine has it; choose another kind"
        elif fault.kind in ("kill", "hang") and config.run.runner == "inprocess" and fault.stage != RANK:
            yield (
                f"--fault-inject {text!r}: with --runner inprocess {fault.kind} would be of the whole run; choose "
                "--runner local, or the kind error or slow"
            )


def _engine_fault(config: Config, kind: FaultKind) -> str | None:
    """Why the engines of this run cannot have it, None if they can."""
    if config.sglang.rollout_external_engine_addrs:
        return "engines that are not started by the run have no faults on purpose; disturb generate"
    if config.engine.engine == "sglang" and kind != "kill":
        return "SGLang's servers can only be killed on purpose; choose kill, --engine simulated, or disturb generate"
    return None


def _template_faults(label: str, template: str | None) -> Iterator[str]:
    try:
        if template is not None:
            batch_file(template, 0)
    except ValueError as error:
        yield f"{label} is {template!r}, but {error}; write {{rollout_id}}"


def _names_no_batch(template: str) -> bool:
    try:
        return batch_file(template, 0) == batch_file(template, 1)
    except ValueError:
        return False


def _missing_faults(template: str, batches: int | None) -> Iterator[str]:
    """Which batch is not there, before anything is trained."""
    try:
        missing = next((n for n in range(batches or 1) if not Path(batch_file(template, n)).is_file()), None)
    except ValueError:
        return
    if missing is not None:
        cure = "correct the path" if missing == 0 else f"set --num-rollout to at most {missing}"
        yield (
            f"--load-debug-rollout-data is {template!r}, but there is no {batch_file(template, missing)} for batch "
            f"{missing}; {cure}"
        )
