"""Generation: how many rollouts, how they are sampled, how far ahead of training, and by which engines.

Owners: `stages/generate`, `stages/staleness_gate`, `stages/engines`, `stages/sampling`, `models/engines`,
`models/weights`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta

from configs.schema.notation import Count, Factor, Natural, NonNegative, Port, Positive, ReadBy, Section


class RolloutConfig(Section, frozen=True, kw_only=True):
    """Rollout: how many, and how they are sampled."""

    num_rollout: Natural | None = None
    """rollout batches to train on (0 = evaluate only)"""
    num_epoch: Count | None = None
    """instead of --num-rollout: passes over the prompts"""
    rollout_batch_size: Count = 32
    """prompt groups per rollout batch (B)"""
    n_samples_per_prompt: Count = 8
    """rollouts per prompt (the group size)"""
    rollout_temperature: Positive = 1.0
    """sampling temperature; also divides the trainer's logits"""
    rollout_top_p: Factor = 1.0
    """nucleus sampling; 1 = off"""
    rollout_top_k: Annotated[int, Meta(ge=-1)] = -1
    """top-k sampling; -1 = off"""
    rollout_max_response_len: Count = 512
    """most tokens of one response, tool tokens included"""
    rollout_max_context_len: Annotated[int, Meta(ge=2)] | None = None
    """most tokens of prompt + response; default: the model's own limit"""
    rollout_stop: tuple[str, ...] = ()
    """stop strings; the matched text stays in the sample"""
    rollout_stop_token_ids: tuple[int, ...] = ()
    """stop token ids beside the tokenizer's EOS"""
    rollout_skip_special_tokens: bool = True
    """drop special tokens from the decoded text"""
    max_turns: Annotated[Count, ReadBy("a loop stage or a function of yours that generates")] = 8
    """most generation turns of one rollout: with a loop stage, a function or an agent"""
    rollout_priority: Literal["oldest_group", "fifo"] = "oldest_group"
    """order of the turns that wait for an engine: oldest_group = those of the oldest group first, since the trainer
    waits for its members; fifo = in order of arrival"""
    custom_generate_function_path: str | None = None
    """function that generates a rollout, with slime's interface: async (args, sample, sampling_params) -> sample or
    list of samples; a row may name its own in metadata.generate_function_path"""
    rollout_function_path: str | None = None
    """function that generates whole batches, with slime's interface: (args, rollout_id, data_source,
    evaluation=False) -> groups of samples"""
    custom_args: dict[str, Any] = {}
    """values that functions with slime's interface find in args, beside the settings of the run; "none" = None"""
    custom_generate_deadline_secs: Annotated[
        Positive, ReadBy("a function of yours that generates or --eval-function-path")
    ] = 1800.0
    """seconds after which a call of such a function is cancelled, and its rollouts fail"""
    server_concurrency: Count = 512
    """most samples in flight per engine"""
    request_timeout_secs: Positive = 600.0
    """deadline of one engine request, seconds"""
    min_tokens_per_sec: NonNegative = 0.1
    """least rate of a response: if fewer tokens have arrived when --request-timeout-secs passes, the response is
    lost and counts as a retry, else its rest is requested (0: one token is enough)"""
    sample_deadline_secs: Positive | None = None
    """seconds of generation after which a rollout is stopped and kept as truncated; default: none"""
    group_deadline_secs: Positive | None = None
    """seconds after which the unfinished rollouts of a group are stopped and generated once more from the start;
    favours short responses, and is counted; default: none"""
    adaptive_concurrency: bool = True
    """lower the samples in flight per engine when its KV cache is full or requests are retracted"""
    max_retries: Natural = 3
    """retries of an engine request after a transport error"""
    partial_rollout: bool = True
    """continue an aborted response from its partial output instead of starting it again"""


AUTO_MOST: Final = 8  # largest N that `--async-buffer-size auto` takes


class AsyncConfig(Section, frozen=True, kw_only=True):
    """Asynchrony: how far generation may run ahead."""

    async_buffer_size: Natural | Literal["auto"] = 2
    """rollout batches that may be out beyond the one in training (N). auto: the smallest N from 1 to 8 with nearly the
    best goodput, first by the plan, then by the measured lengths and times"""
    update_weights_interval: Count = 1
    """publish weights every K rollout batches"""
    max_staleness: Natural | None = None
    """no token older than this many versions is trained; default: N + K - 1"""
    async_unused_samples_handler: Literal["requeue", "drop", "train_masked"] = "requeue"
    """a group that became too stale: requeue = submit its prompt once more, drop = do not, train_masked = train the
    group without its stale tokens"""
    cancel_stale_rollouts: bool = True
    """end a response as soon as its group is too old for every later batch; its slot is free for a fresh one"""
    buffer_order: str = "oldest_first"
    """which finished group is trained next: oldest_first, ready_first, priority (strongest learning signal), or
    package.module:function"""
    colocate: bool = False
    """engine and trainer share their devices in turns (sync mode only)"""


RouterPolicy = Literal["auto", "round_robin", "random", "power_of_two", "cache_aware", "session", "least_loaded"]


class SimulatedEngineConfig(Section, frozen=True, kw_only=True):
    """Latency model: one decode step of b requests takes `a_ms + c_ms * b`; prefill costs per token."""

    READ_BY: ClassVar[str] = "--engine simulated"

    a_ms: NonNegative = 8.0
    """fixed time of a decode step, ms"""
    c_ms: NonNegative = 0.1
    """time of a decode step per running request, ms"""
    prefill_ms_per_token: NonNegative = 0.02
    """prefill time per prompt token, ms"""
    length_mean: Positive = 400.0
    """mean response length, tokens"""
    length_sigma: NonNegative = 1.0
    """sigma of the lognormal response length; 0 = constant"""
    length_cap: Count = 3200
    """longest response, tokens"""
    update_s: NonNegative = 0.2
    """time that one weight update stalls the engine, seconds"""
    prepare_s: NonNegative = 0.0
    """time before it in which the engine reads the weights beside its requests, seconds"""
    time_scale: Positive = 1.0
    """multiply all times, e.g. 0.05 for a twentieth"""
    kv_tokens: Count = 1_000_000
    """KV capacity, tokens; beyond it requests are retracted"""
    vocab_size: Annotated[int, Meta(ge=2)] = 256
    """token ids are drawn below this"""


class EngineConfig(Section, frozen=True, kw_only=True):
    """Inference engine."""

    engine: Literal["embedded", "simulated", "sglang"] = "embedded"
    """inference engine behind the SGLang protocol; sglang starts real SGLang servers"""
    engine_checkpoint: str | None = None
    """Hugging Face checkpoint of the same model in whose types the engines get all weights, e.g. one in float8;
    default: --hf-checkpoint"""
    pause_generation_mode: Literal["in_place", "retract", "abort"] = "in_place"
    """in-flight requests at a weight update: keep the KV cache (in_place), recompute it (retract), or return partial
    output and resume (abort)"""
    engine_slots: Count = 256
    """most requests that one engine decodes together"""
    engine_port: Port = 0
    """first port of the engines' HTTP servers; 0 = any free port"""
    allow_plain_engines: bool = False
    """let requests to engines on other machines go as plain HTTP, which their network can read: prompts, responses and
    the token of the engines; for a network that you trust. https:// addresses need no leave"""
    engine_device: str = "auto"
    """device of the embedded engine: auto, cpu, cuda, cuda:1"""
    engine_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """precision of the embedded engine"""
    engine_memory_fraction: Factor | None = None
    """share of its GPU that the KV cache of an embedded engine may take; default: 0.3 where the policy is trained on
    that GPU at the same time, else 0.8, divided by the number of engines"""
    prefix_cache: bool = True
    """reuse the KV cache of equal prompts within one weights version"""
    frozen_engine: tuple[str, ...] = ()
    """engines whose weights never change (teachers, judges): name=CHECKPOINT starts with the run, name=http://host:port
    is used as it is"""
    simulated: SimulatedEngineConfig = SimulatedEngineConfig()


class SglangConfig(Section, frozen=True, kw_only=True):
    """SGLang servers."""

    sglang_python: str | None = None
    """Python interpreter of the environment that SGLang is installed in; default: .venv-sglang/bin/python of the
    project (make sglang-env), else the one that runs Sluice"""
    rollout_num_gpus: Count | None = None
    """GPUs of all engines; default: one engine's worth for each of --scale engine=N"""
    rollout_num_gpus_per_engine: Count = 1
    """GPUs of one engine: its tensor parallel times its pipeline parallel size"""
    rollout_external_engine_addrs: tuple[str, ...] = ()
    """engines that run already, as http://host:port; none is started then"""
    rollout_external_engine_token_file: str | None = None
    """file (mode 0600) with the token of engines, router and frozen engines that run already: what SGLang was given as
    its api key"""
    sglang_args: dict[str, Any] = {}
    """options of the SGLang server by name; on the command line --sglang-<option> value"""


class RouterConfig(Section, frozen=True, kw_only=True):
    """Router in front of the engines."""

    router: Literal["auto", "none", "sglang", "smg"] = "auto"
    """router process in front of the engines: sglang (sglang-router), smg (its successor), or none (the generate stage
    chooses); auto = sglang with SGLang engines, else none"""
    router_policy: RouterPolicy = "auto"
    """how an engine is chosen; session keeps the turns of a rollout on one engine; least_loaded is for --router none;
    auto, for rollouts of several turns (tools, environments, agents, generate functions, loops) = session behind a
    router, without one session until an engine has 1.25 times its share; for others round_robin and least_loaded"""
    router_address: str | None = None
    """a router that runs already, as http://host:port; none is started then"""
    router_args: dict[str, Any] = {}
    """options of the router by name; on the command line --router-<option> value"""


class HealthConfig(Section, frozen=True, kw_only=True):
    """Health of the engines."""

    rollout_health_check_interval: Positive = 5.0
    """seconds between two requests to an engine's /health"""
    rollout_health_check_timeout: Positive = 10.0
    """seconds after which a request to /health counts as failed"""
    rollout_health_check_failures: Count = 3
    """consecutive failed requests to /health after which an engine is ended and started again"""
    rollout_health_check_first_wait: Positive = 600.0
    """most seconds that an engine may take to come up"""
    stream_interval: Natural = 32
    """tokens in each part of a streamed response; when an engine is lost, the parts that arrived are kept; 0 = do
    not stream, so that its partial output is lost"""


class UpdateConfig(Section, frozen=True, kw_only=True):
    """Weights to the engines."""

    update_weight_transport: Literal["disk", "distributed", "tensor", "delta"] = "disk"
    """disk: the engine loads safetensors from shared memory; distributed: broadcast over gloo or NCCL; tensor:
    handles of shared memory (CUDA IPC on a GPU); delta: compressed differences in a shared directory, assembled
    beside the engine"""
    update_weight_buffer_size: Annotated[Count, ReadBy("--update-weight-transport distributed or tensor")] = 512 << 20
    """bytes of one bucket of the routes distributed and tensor"""
    update_weight_rolling: Count | None = None
    """most engines that are paused for an update at the same time; default: all, or one with the route distributed"""
    update_weight_delta_dir: Annotated[str | None, ReadBy("--update-weight-transport delta")] = None
    """directory of the delta route that trainer and engines share; default: in the run"""
    update_weight_max_failures: Count = 5
    """consecutive failed updates after which an engine is started again; an external engine counts as away for a
    while instead, and an engine in this process ends the run"""
    policy_proof: bool = True
    """before an engine serves a version, compare its log-probs of a few fixed sequences with the trainer's"""
    policy_proof_threshold: Annotated[Positive | None, ReadBy("--policy-proof")] = None
    """largest difference of a log-prob, in nats, and four times the largest mean difference; default: by the types of
    trainer and engine (0.0001 for float32 on CPUs, 2 for bfloat16, 6 for quantised engines)"""
    check_weight_update_equal: Annotated[bool, ReadBy("several engines")] = False
    """after an update, compare the engines' tensor checksums with each other"""
