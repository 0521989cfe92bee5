"""The run as a whole: mode, place on disk, life cycle, placement, observation, and faults on purpose.

Owners: `pipeline`, `stages/train/saved_batches`, `models/fault_injection`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, get_args

from msgspec import Struct

from configs.schema.notation import Count, Natural, Port, Positive, ReadBy, Section, as_number


class RunConfig(Section, frozen=True, kw_only=True):
    """The run: mode, place on disk, life cycle, placement."""

    mode: Literal["async", "sync", "one_step"] = "async"
    """preset of the staleness gate"""
    seed: int = 42
    """seed of initialisation, order and sampling"""
    deterministic: bool = False
    """train the groups of a batch in the order of their ids, whatever order they arrive in"""
    run_dir: str | None = None
    """directory of this run; default: runs/<time>"""
    resume: str | None = None
    """continue the run in this directory from its last checkpoint"""
    runner: Literal["local", "inprocess", "ray"] = "local"
    """a process per stage replica, all in one process, or a process each on a Ray cluster"""
    preload: Annotated[bool, ReadBy("--runner local")] = True
    """import the libraries of the run's processes once and copy that process for each, so that they start and come back
    at once; on a machine with a GPU, those that do not compute"""
    try_functions: bool = True
    """call the user's graders, filters, advantages and losses once on a made-up group before anything starts"""
    deadline_s: Positive | None = None
    """finish in-flight work and stop after this many seconds"""
    drain_s: Positive = 30.0
    """most seconds to finish in-flight work at a stop"""
    stall_notice_s: Positive = 60.0
    """seconds without an outcome of any group after which the run reports what it waits for"""
    stall_limit_s: Positive = 7200.0
    """seconds in which nothing moves between the stages, after which the run is ended"""
    max_restarts: Natural = 5
    """restarts of one process within an hour before the run is given up"""
    auto_resume: Natural = 0
    """start the whole run again when it is killed, or ends with an error after a checkpoint, at most this many times
    within an hour; with --runner local its engines stay up meanwhile; 0 = off"""
    scale: dict[str, int] = {}
    """replicas by stage, as stage=N; repeatable"""
    chain: tuple[str, ...] = ()
    """neighbouring stages that run in one process while each has one replica, as first+second+...; none: each stage
    has a process of its own; default: all stages between prompts and train"""
    autoscale: tuple[str, ...] = ()
    """stages that the run scales by itself, and engine, as stage=LEAST..MOST; default: none"""
    autoscale_window_s: Positive = 30.0
    """least seconds of measurement before advice, or a change by --autoscale"""


class RayConfig(Section, frozen=True, kw_only=True):
    """Processes on a Ray cluster."""

    READ_BY: ClassVar[str] = "--runner ray"

    ray_address: str | None = None
    """the cluster to run on, as host:port, or auto for the one that this machine belongs to; default: $RAY_ADDRESS,
    else one of this machine alone, which ends with the run"""
    ray_labels: tuple[str, ...] = ()
    """nodes of a role (train, rollout, cpu) by their labels, as role=key:value,key:value, with | before each fallback:
    rollout=market:spot|market:on-demand; * is one value that all nodes of a group have: train=nvlink-domain:*"""
    ray_cpus: dict[str, int] = {}
    """CPUs of one process of a role, as role=N; default: train=1 rollout=1 cpu=0"""
    ray_placement: Literal["pack", "spread"] = "pack"
    """put processes on few nodes (pack) or on many (spread), where nothing else decides it"""


class ModelConfig(Section, frozen=True, kw_only=True):
    """Published models."""

    model: str | None = None
    """preset of configs/models: published dimensions, and a suggested parallel layout"""
    architecture: dict[str, Any] = {}
    """Hugging Face config.json of that model, for estimates and for the check"""
    model_args: dict[str, Any] = {}
    """what options of Megatron-LM such as --num-layers 36 say of the model; compared with the config.json of
    --hf-checkpoint"""


class CheckpointConfig(Section, frozen=True, kw_only=True):
    """Checkpoints."""

    save_interval: Count | None = None
    """checkpoint every this many rollout batches"""
    keep_last_n: Count = 2
    """checkpoints kept"""
    async_save: Annotated[bool, ReadBy("--train-backend fsdp or megatron")] = False
    """write sharded checkpoints (fsdp, megatron) while the next batches train"""
    save_hf: str | None = None
    """also write the weights of each checkpoint in Hugging Face format here; {step} is its number, {rollout_id} that of
    its last batch, from 0"""
    response_journal_tokens: Natural = 256
    """with --save-interval: record responses every this many tokens, so that those of a killed process continue
    where they were; 0 = off"""


class ObserveConfig(Section, frozen=True, kw_only=True):
    """Observation."""

    live: bool | None = None
    """live table; default: if the output is a terminal"""
    view: bool = False
    """show the run in a browser: serve it on this machine while it runs, and print the address"""
    use_tensorboard: bool = True
    """write TensorBoard events"""
    report_to: tuple[str, ...] = ()
    """experiment trackers that get every row of metrics.jsonl: wandb (Weights & Biases), mlflow, trackio"""
    project: Annotated[str, ReadBy("--report-to")] = "sluice"
    """project of the trackers; MLflow calls it experiment"""
    run_name: Annotated[str | None, ReadBy("--report-to")] = None
    """name of the run in the trackers; default: that of the run's directory"""
    run_group: Annotated[str | None, ReadBy("--report-to")] = None
    """group of runs in the trackers"""
    wandb_team: Annotated[str | None, ReadBy("--report-to wandb")] = None
    """entity at Weights & Biases that the project belongs to"""
    wandb_mode: Annotated[Literal["online", "offline"], ReadBy("--report-to wandb")] = "online"
    """offline: files in the run's directory, for `wandb sync`"""
    wandb_host: Annotated[str | None, ReadBy("--report-to wandb")] = None
    """address of a server of Weights & Biases of your own"""
    use_plot: bool = True
    """draw the learning curve when the run ends"""
    trace: bool = True
    """write a Perfetto trace of the stage spans of each sample"""
    log_interval: Count = 10
    """print a line every this many rollout batches"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """least level of what processes write into logs/, and the controller into run.log beside what the terminal says"""
    custom_rollout_log_function_path: str | None = None
    """function called with each rollout batch, with slime's interface: (rollout_id, args, samples,
    rollout_extra_metrics, rollout_time)"""
    custom_eval_rollout_log_function_path: str | None = None
    """function called with each evaluation, with slime's interface: (rollout_id, args, data, extra_metrics)"""
    samples_interval: Natural = 10
    """write samples.jsonl every this many rollout batches, and after the first; 0 = off"""
    samples_groups: Annotated[Count, ReadBy("--samples-interval above 0")] = 4
    """samples.jsonl: groups of such a batch, and of those that ended untrained since"""
    samples_max_mb: Annotated[Positive, ReadBy("--samples-interval above 0")] = 64.0
    """samples.jsonl: bound of its size, MB; the fuller the file, the fewer batches are written"""
    otel_endpoint: str | None = None
    """OpenTelemetry collector (OTLP over HTTP) that gets the spans, such as http://127.0.0.1:4318; default:
    $OTEL_EXPORTER_OTLP_ENDPOINT, else none"""
    prometheus_port: Port = 0
    """port of the run's /metrics for Prometheus; 0 = off"""
    prometheus_host: Annotated[str, ReadBy("--prometheus-port above 0")] = "127.0.0.1"
    """address that /metrics listens on"""


class StageConfig(Section, frozen=True, kw_only=True):
    """Custom stages.

    A stage of the user's own, inserted into the graph.
    """

    name: str
    path: str
    """import path of the class, package.module:Class"""
    after: str | None = None
    """stage whose output it takes"""
    loop: str | None = None
    """stage whose output it takes and to which it returns it"""
    replicas: Count = 1
    concurrency: Count = 8
    options: dict[str, Any] = {}


FaultKind = Literal["kill", "error", "hang", "slow", "drop"]
TRACKERS: Final = ("wandb", "mlflow", "trackio")
RANK: Final = "rank"  # of a trainer group; the train stage, which hands it its work, is `train`
# Longer than a lease without a sign of life (30 s), and than the health checks of an engine by default (45 s).
_SECONDS: Final = {"hang": 60.0, "slow": 1.0}


class DebugConfig(Section, frozen=True, kw_only=True):
    """Debugging: saved rollout batches, parts of a run alone, faults on purpose."""

    save_debug_rollout_data: str | None = None
    """write every rollout batch whole to this file; {rollout_id} is its number, from 0"""
    save_debug_train_data: str | None = None
    """write what the trainer is given of every batch to this Parquet file, a row for each sequence; {rollout_id} is its
    number, from 0"""
    load_debug_rollout_data: str | None = None
    """train on the batches of such files, without engines and rewards"""
    debug_train_only: bool = False
    """refuse a run that would start engines: needs --load-debug-rollout-data or --loss-type sft_loss"""
    debug_rollout_only: bool = False
    """generate and grade, but train nothing: every version has the weights of the start"""
    use_pytorch_profiler: bool = False
    """profile the trainer with torch's profiler: a trace of each rank in RUN/profile/"""
    profile_step_start: Annotated[Natural, ReadBy("--use-pytorch-profiler")] = 10
    """first rollout batch of the profile, from 0"""
    profile_step_end: Annotated[Count, ReadBy("--use-pytorch-profiler")] = 12
    """rollout batch before which the profile ends"""
    record_memory_history: bool = False
    """record allocations of the trainer's GPU memory: a snapshot of each rank in RUN/profile/"""
    memory_snapshot_num_steps: Annotated[Count, ReadBy("--record-memory-history")] = 2
    """rollout batches after which the snapshot is written and recording ends; also written where memory runs out"""
    memory_snapshot_path: Annotated[str, ReadBy("--record-memory-history")] = "snapshot.pickle"
    """end of the snapshot's file name, behind rank-N-"""
    fault_inject: tuple[str, ...] = ()
    """disturb a stage, engine or rank on purpose, as stage:probability:kind, e.g. reward:0.01:kill; kinds: kill, error,
    hang, slow, for engine also drop; repeatable"""


def batch_file(template: str, rollout_id: int) -> str:
    """Where batch `rollout_id` (0 = the first) lies. Raises ValueError for a template that names something else."""
    try:
        return template.format(rollout_id=rollout_id)
    except (KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"the only name in braces is {{rollout_id}}, not {error}") from error


class FaultSpec(Struct, frozen=True):
    """`probability`: of each message that the stage takes; for `engine`, of each request to generate (of SGLang, of
    each health check); for `rank`, of each call that a rank of the trainer group makes. `seconds`: length of a `hang`
    or `slow`, 0 for other kinds."""

    stage: str
    probability: float
    kind: FaultKind
    seconds: float = 0.0

    def __str__(self) -> str:
        length = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{self.stage} {self.kind}{length}, {self.probability:.3g} of {self.unit}"

    @property
    def unit(self) -> str:
        return {"engine": "requests", RANK: "calls"}.get(self.stage, "messages")


def read_fault(text: str) -> FaultSpec:
    """Raises ValueError that names the rule."""
    stage, *rest = text.split(":")
    if not stage or len(rest) not in (2, 3):
        raise ValueError("must be stage:probability:kind, or stage:probability:kind:seconds, such as reward:0.01:kill")
    kind = next((known for known in get_args(FaultKind) if known == rest[1]), None)
    if kind is None:
        raise ValueError(f"the kind is {rest[1]!r} and must be one of {', '.join(get_args(FaultKind))}")
    probability = as_number(rest[0]) or 0.0
    if not 0 < probability <= 1:
        raise ValueError(f"the probability is {rest[0]!r} and must be a number above 0 and at most 1")
    seconds = _SECONDS.get(kind, 0.0)
    if len(rest) == 3:
        if kind not in _SECONDS:
            raise ValueError(f"seconds stand only behind {' and '.join(_SECONDS)}, not behind {kind}")
        seconds = as_number(rest[2]) or 0.0
        if not 0 < seconds <= 86400:
            raise ValueError(f"the seconds are {rest[2]!r} and must be a number above 0, a day at the most")
    return FaultSpec(stage, probability, kind, seconds)
