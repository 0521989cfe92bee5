"""The run as a whole: mode, place on disk, life cycle, placement, observation. Owner: `pipeline`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct


class RunConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    mode: Annotated[Literal["async", "sync", "one_step"], Meta(description="preset of the staleness gate")] = "async"
    seed: Annotated[int, Meta(description="seed of initialisation, order and sampling")] = 42
    deterministic: Annotated[
        bool, Meta(description="train the groups of a batch in the order of their ids, whatever order they arrive in")
    ] = False
    run_dir: Annotated[str | None, Meta(description="directory of this run; default: runs/<time>")] = None
    resume: Annotated[str | None, Meta(description="continue the run in this directory from its last checkpoint")] = (
        None
    )
    runner: Annotated[
        Literal["local", "inprocess", "ray"],
        Meta(description="a process per stage replica, all in one process, or a process each on a Ray cluster"),
    ] = "local"
    deadline_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="finish in-flight work and stop after this many seconds"),
    ] = None
    hub_processes: Annotated[
        int, Meta(ge=0, description="processes that the hubs of the streams are divided over; 0: in the controller's")
    ] = 0
    hub_shards: Annotated[
        int,
        Meta(ge=1, description="hubs of each stream, in as many of --hub-processes, which divide its groups"),
    ] = 1
    drain_s: Annotated[float, Meta(gt=0, description="most seconds to finish in-flight work at a stop")] = 30.0
    stall_notice_s: Annotated[
        float,
        Meta(gt=0, description="seconds without an outcome of any group after which the run says what it waits for"),
    ] = 60.0
    stall_limit_s: Annotated[
        float,
        Meta(gt=0, description="seconds in which nothing moves between the stages, after which the run is ended"),
    ] = 7200.0
    max_restarts: Annotated[
        int, Meta(ge=0, description="restarts of one process within an hour before the run is given up")
    ] = 5
    train_standby: Annotated[
        bool,
        Meta(
            description="keep a process that has loaded the train stage's libraries, to take its place at once if it "
            "is killed; costs the memory of these"
        ),
    ] = False
    auto_resume: Annotated[
        int,
        Meta(
            ge=0,
            description="start the whole run again when it is killed, or ends with an error after a checkpoint, at "
            "most this many times within an hour; with --runner local its engines stay up meanwhile; 0 = off",
        ),
    ] = 0
    scale: Annotated[dict[str, int], Meta(description="replicas by stage, as stage=N; repeatable")] = {}
    autoscale: Annotated[
        tuple[str, ...],
        Meta(description="stages that the run scales by itself, and engine, as stage=LEAST..MOST; default: none"),
    ] = ()
    autoscale_window_s: Annotated[
        float, Meta(gt=0, description="least seconds that the run is measured for an advice or a change of --autoscale")
    ] = 30.0


class CheckpointConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    save_interval: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="checkpoint every this many rollout batches"),
    ] = None
    keep_last_n: Annotated[int, Meta(ge=1, description="checkpoints kept")] = 2
    async_save: Annotated[
        bool, Meta(description="write sharded checkpoints (fsdp, megatron) while the next batches train")
    ] = False
    save_hf: Annotated[
        str | None,
        Meta(description="also write the weights of each checkpoint in Hugging Face format here; {step} is its number"),
    ] = None
    response_journal_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="with --save-interval: write responses down every this many tokens, so that those of a killed "
            "process go on where they were; 0 = off",
        ),
    ] = 256


class ObserveConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    live: Annotated[bool | None, Meta(description="live table; default: if the output is a terminal")] = None
    use_tensorboard: Annotated[bool, Meta(description="write TensorBoard events")] = True
    use_plot: Annotated[bool, Meta(description="draw the learning curve when the run ends")] = True
    trace: Annotated[bool, Meta(description="write a Perfetto trace of the stage spans of each sample")] = True
    log_interval: Annotated[int, Meta(ge=1, description="print a line every this many rollout batches")] = 10
    custom_rollout_log_function_path: Annotated[
        str | None,
        Meta(
            description="called with each rollout batch, as slime calls it: (rollout_id, args, samples, "
            "rollout_extra_metrics, rollout_time)"
        ),
    ] = None
    custom_eval_rollout_log_function_path: Annotated[
        str | None,
        Meta(description="called with each evaluation, as slime calls it: (rollout_id, args, data, extra_metrics)"),
    ] = None
    samples_interval: Annotated[
        int, Meta(ge=0, description="write samples.jsonl every this many rollout batches, and after the first; 0 = off")
    ] = 10
    samples_groups: Annotated[
        int, Meta(ge=1, description="samples.jsonl: groups of such a batch, and of those that ended untrained since")
    ] = 4
    samples_max_mb: Annotated[
        float, Meta(gt=0, description="samples.jsonl: size that it approaches; the fuller, the fewer batches it gets")
    ] = 64.0
    prometheus_port: Annotated[
        int, Meta(ge=0, le=65535, description="port of the run's /metrics for Prometheus; 0 = off")
    ] = 0
    prometheus_host: Annotated[str, Meta(description="address that /metrics listens on")] = "127.0.0.1"


class StageConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A stage of the user's own, inserted into the graph."""

    name: str
    path: Annotated[str, Meta(description="import path of the class, package.module:Class")]
    after: Annotated[str | None, Meta(description="stage whose output it takes")] = None
    loop: Annotated[str | None, Meta(description="stage whose output it takes and to which it returns it")] = None
    replicas: Annotated[int, Meta(ge=1)] = 1
    concurrency: Annotated[int, Meta(ge=1)] = 8
    options: dict[str, Any] = {}


class WarmStartConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Supervised training on prompt + label before the reinforcement learning, through the same pipeline."""

    warm_start_steps: Annotated[int, Meta(ge=0, description="optimizer steps of supervised warm start; 0 = none")] = 0
    warm_start_batch_size: Annotated[int, Meta(ge=1, description="examples per step")] = 128
    warm_start_target_loss: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="end the warm start early, when the mean loss of its last 10 steps is below this"),
    ] = None
    warm_start_lr: Annotated[float, Meta(gt=0, description="learning rate of the warm start")] = 1e-3
    warm_start_data: Annotated[
        tuple[str, ...], Meta(description="examples of the warm start; default: --prompt-data")
    ] = ()
    warm_start_label_key: Annotated[
        str | None, Meta(description="row field with the text to learn; default: --label-key")
    ] = None
