"""The run: how long, how far ahead, where it continues, parts of it alone, saved batches, faults on purpose."""

from __future__ import annotations

import importlib.util
import os.path
from collections.abc import Iterator
from pathlib import Path

import msgspec

from configs.graph import replicas
from configs.load import CONFIG_FILE
from configs.plan.gpus import trainer_processes
from configs.schema import Config, generates
from configs.schema.run import RANK, TRACKERS, FaultKind, batch_file, read_fault


def length_faults(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.num_rollout is None and rollout.num_epoch is None:
        yield "--num-rollout is not set, but a run needs a length; set --num-rollout or --num-epoch"
    if rollout.num_rollout is not None and rollout.num_epoch is not None:
        yield (
            f"--num-epoch is {rollout.num_epoch} and --num-rollout is {rollout.num_rollout}, but only one may set the "
            "length of the run; leave one of them out"
        )
    if config.train.lr_warmup_fraction is not None and config.train.lr_warmup_iters:
        yield (
            f"--lr-warmup-fraction is {config.train.lr_warmup_fraction} and --lr-warmup-iters is "
            f"{config.train.lr_warmup_iters}, but only one may set the warm-up; leave one of them out"
        )
    context = rollout.rollout_max_context_len
    if context is not None and rollout.rollout_max_response_len >= context:
        yield (
            f"--rollout-max-response-len is {rollout.rollout_max_response_len}, but prompt and response share "
            f"--rollout-max-context-len {context}, and a prompt has at least one token; set it below {context}"
        )
    prompt = config.data.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt >= context:
        yield (
            f"--rollout-max-prompt-len is {prompt}, but --rollout-max-context-len {context} leaves no token for the "
            f"response; set it to at most {context - 1}"
        )
    group, sample = rollout.group_deadline_secs, rollout.sample_deadline_secs
    if group is not None and sample is not None and group >= sample:  # the one replaces what is slow, the other ends it
        yield (
            f"--group-deadline-secs is {group:g}, but must be less than --sample-deadline-secs {sample:g}, which would "
            "end each rollout before; lower it, or leave one of them out"
        )
    evaluation = config.eval
    if evaluation.eval_interval is not None and not evaluation.eval_prompt_data:
        yield (
            f"--eval-interval is {evaluation.eval_interval}, but there is nothing to evaluate on; give "
            "--eval-prompt-data, or leave --eval-interval out"
        )
    if rollout.num_rollout == 0 and not evaluation.eval_prompt_data:
        yield "--num-rollout is 0 (evaluate only), but there is nothing to evaluate on; give --eval-prompt-data"


def staleness_faults(config: Config) -> Iterator[str]:
    gate = config.asynchrony
    bound, interval = gate.max_staleness, gate.update_weights_interval
    if bound is not None and bound < interval - 1:
        yield (
            f"--max-staleness is {bound}, but weights are published every {interval} batches and the gate would close "
            f"for good before that; set --max-staleness to at least {interval - 1}, or --update-weights-interval "
            f"{bound + 1}"
        )
    if gate.colocate and bound:
        yield (
            f"--colocate with max_staleness {bound}: engine and trainer take turns, so that nothing can be generated "
            "ahead; add --mode sync, or leave --colocate out"
        )


def resume_faults(config: Config) -> Iterator[str]:
    run = config.run
    if run.resume is not None:
        if not Path(run.resume).is_dir():
            yield (
                f"--resume is {run.resume!r}, but there is no such directory; give the directory of the run to continue"
            )
        if run.run_dir is not None and Path(run.run_dir) != Path(run.resume):
            yield (
                f"--run-dir is {run.run_dir!r} and --resume is {run.resume!r}, but a resumed run continues in its own "
                "directory; leave --run-dir out"
            )
    elif run.run_dir is not None and os.path.exists(Path(run.run_dir) / CONFIG_FILE):  # False where it cannot be
        yield (
            f"--run-dir is {run.run_dir!r}, but a run is already there; continue it with --resume {run.run_dir}, or "
            "choose another directory"
        )


def run_warnings(config: Config) -> Iterator[str]:
    gate, run = config.asynchrony, config.run
    if gate.async_buffer_size != "auto" and gate.max_staleness is not None:
        natural = gate.async_buffer_size + gate.update_weights_interval - 1
        if gate.max_staleness != natural:
            yield (
                f"max_staleness {gate.max_staleness} outranks async_buffer_size {gate.async_buffer_size} (which alone "
                f"would give {natural}): the gate follows max_staleness"
            )
    if run.resume is not None and config.checkpoint.save_interval is None:
        yield (
            "--save-interval is not set: the resumed run saves when it ends or is stopped, and killed before that it "
            "starts again from the checkpoint it began with; add --save-interval to save on the way"
        )
    if run.auto_resume and config.checkpoint.save_interval is None:
        yield (
            f"--auto-resume {run.auto_resume} without --save-interval: a run that is killed starts again from where it "
            "began; set --save-interval to the number of batches that you would rather repeat"
        )
    evaluation = config.eval
    if evaluation.eval_interval is not None and not generates(config):
        why = "--loss-type sft_loss" if config.train.loss_type == "sft_loss" else "--load-debug-rollout-data"
        yield f"--eval-interval has no effect with {why}: no engine is started to evaluate with"
    if evaluation.eval_prompt_data and evaluation.eval_interval is None:
        yield "--eval-prompt-data is given but never used; add --eval-interval"
    interval = evaluation.eval_interval
    if interval is not None and interval % gate.update_weights_interval:
        yield (
            f"--eval-interval {interval} is no multiple of --update-weights-interval {gate.update_weights_interval}: "
            "versions between two publications cannot be evaluated"
        )
    context, prompt = config.rollout.rollout_max_context_len, config.data.rollout_max_prompt_len
    response = config.rollout.rollout_max_response_len
    if context is not None and prompt is not None and prompt < context - 1 and prompt + response > context:
        yield (
            f"the longest prompts ({prompt} tokens) leave less than --rollout-max-response-len {response} inside "
            f"--rollout-max-context-len {context}: their responses are cut short"
        )


def greedy_warnings(config: Config) -> Iterator[str]:
    """Held-out sets with several answers to a prompt, all of them greedy."""
    evaluation = config.eval
    for name, _ in evaluation.data_sets if evaluation.eval_function_path is None else ():
        try:
            own = evaluation.of(name)
        except msgspec.ValidationError:  # a fault says so
            continue
        if own.n_samples_per_eval_prompt > 1 and (own.eval_temperature == 0 or own.eval_top_k == 1):
            greedy = "--eval-top-k is 1" if own.eval_temperature else "--eval-temperature is 0"
            yield (
                f"--n-samples-per-eval-prompt is {own.n_samples_per_eval_prompt} for the held-out set {name}, but "
                f"{greedy} (greedy), so that the answers to a prompt are all alike; set --eval-temperature above 0, "
                "such as 0.6, or evaluate one answer"
            )


def tracker_faults(config: Config) -> Iterator[str]:
    """Whether the experiment trackers are known and their libraries installed."""
    for name in config.observe.report_to:
        if name not in TRACKERS:
            yield f"--report-to is {name!r}, but must be one of {', '.join(TRACKERS)}; choose one, or leave it out"
        elif importlib.util.find_spec(name) is None:
            yield f"--report-to {name} needs a package that is not installed; pip install {name}"


def otel_faults(config: Config) -> Iterator[str]:
    endpoint = config.observe.otel_endpoint
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        yield f"--otel-endpoint is {endpoint!r}, but must begin with http:// or https://; such as http://127.0.0.1:4318"
    if not all(map(importlib.util.find_spec, ("opentelemetry", "opentelemetry.exporter"))):
        name = "opentelemetry-exporter-otlp-proto-http"
        yield f"--otel-endpoint needs a package that is not installed; pip install {name}"


def debug_faults(config: Config) -> Iterator[str]:
    debug = config.debug
    loaded = debug.load_debug_rollout_data
    yield from _injection_faults(config)
    yield from _profile_faults(config)
    if debug.debug_rollout_only and (debug.debug_train_only or loaded is not None):
        other = "--debug-train-only" if loaded is None else "--load-debug-rollout-data"
        yield f"--debug-rollout-only generates and {other} does not; leave one of them out"
    if debug.debug_train_only and loaded is None and config.train.loss_type != "sft_loss":
        yield (
            "--debug-train-only starts no engine, so that there is nothing to train on; give --load-debug-rollout-data "
            "with batches that an earlier run saved, or --loss-type sft_loss"
        )
    yield from _template_faults(config)
    if loaded is None:
        return
    if config.train.loss_type == "sft_loss":
        yield "--load-debug-rollout-data holds rollouts, and --loss-type sft_loss trains on labels; leave one out"
    if config.run.resume is not None:
        yield (
            "--resume with --load-debug-rollout-data: batches would be cut differently; start the run again, which "
            "generates nothing"
        )


def _profile_faults(config: Config) -> Iterator[str]:
    """What of the trainer cannot be profiled."""
    debug, train, planned = config.debug, config.train, config.rollout.num_rollout
    first, end = debug.profile_step_start, debug.profile_step_end
    if train.train_backend == "simulated" and (debug.use_pytorch_profiler or debug.record_memory_history):
        flag = "--use-pytorch-profiler" if debug.use_pytorch_profiler else "--record-memory-history"
        yield f"{flag} with --train-backend simulated: it computes nothing; leave one of them out"
    elif debug.record_memory_history and train.train_device == "cpu":
        yield "--record-memory-history is of a GPU's memory, and --train-device is cpu; leave one of them out"
    if debug.use_pytorch_profiler and first >= end:
        yield f"--profile-step-start is {first} and must be below --profile-step-end {end}; lower it, or raise the end"
    elif debug.use_pytorch_profiler and planned is not None and end > planned:
        yield f"--profile-step-end is {end}, but the run has {planned} rollout batches; set it to at most {planned}"


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


def _template_faults(config: Config) -> Iterator[str]:
    """Names of files with the number of a batch in them; and which batch is not there, before anything is trained."""
    debug, batches = config.debug, config.rollout.num_rollout
    for label, template in (
        ("--save-debug-rollout-data", debug.save_debug_rollout_data),
        ("--load-debug-rollout-data", debug.load_debug_rollout_data),
        ("--save-debug-train-data", debug.save_debug_train_data),
    ):
        if template is None:
            continue
        try:
            first, second = batch_file(template, 0), batch_file(template, 1)
        except ValueError as error:
            yield f"{label} is {template!r}, but {error}; write {{rollout_id}}"
            continue
        if label != "--load-debug-rollout-data":
            if first == second and batches != 1:
                yield (
                    f"{label} is {template!r}, so that each batch would replace the one before; write {{rollout_id}} "
                    "somewhere in it"
                )
            continue
        missing = next((n for n in range(batches or 1) if not Path(batch_file(template, n)).is_file()), None)
        if missing is not None:
            cure = "correct the path" if missing == 0 else f"set --num-rollout to at most {missing}"
            yield (
                f"{label} is {template!r}, but there is no {batch_file(template, missing)} for batch {missing}; {cure}"
            )
