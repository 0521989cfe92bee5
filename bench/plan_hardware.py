"""From GPUs and a model to the seconds that a cluster of `bench.plan_cluster` takes. Pure arithmetic.

    decode step of b rollouts   a + c b      a = weights read / bandwidth + overhead
                                             c = KV cache read / bandwidth + operations that do not hide behind that
    trainer, per token          passes * forward operations / (GPUs * peak * utilisation)

Peaks and bandwidths are those of the data sheets, dense bfloat16. What share of them is reached, no data sheet says:
`Efficiency` holds these shares, and `bench.plan_published` says from which published case each was calibrated.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

import msgspec

from bench.plan_types import Cluster
from configs.plan.gpus import NODE_GPUS
from configs.plan.model_table import preset_config
from configs.plan.parameters import forward_flops, matrices, total_parameters
from configs.plan.run_estimate import STATIC_FRACTION
from configs.plan.staleness import capped_lognormal_mean
from configs.schema.model_shapes import ModelShape, known_shape


class Gpu(msgspec.Struct, frozen=True):
    """Of one GPU: dense bfloat16 operations and bytes of memory per second, bytes of memory."""

    flops: float
    bandwidth: float
    memory: float


GPUS: Final = {  # the makers' data sheets, SXM where there are several
    "a100": Gpu(312e12, 2.04e12, 80e9),
    "h20": Gpu(148e12, 4.0e12, 96e9),
    "h100": Gpu(989e12, 3.35e12, 80e9),
    "h200": Gpu(989e12, 4.8e12, 141e9),
    "b200": Gpu(2250e12, 8.0e12, 180e9),
}


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the data sheet that are reached, and times that no sheet tells. Defaults: calibrated on H100."""

    train: float = 0.31  # of the peak, training a dense model
    train_experts: float = 0.061  # the same where layers have experts
    bandwidth: float = 0.80  # of the memory, decoding
    prefill: float = 0.40  # of the peak, with many tokens in a pass
    overhead_s: float = 0.007  # of a decode step: launches, sampling, scheduling
    reduce_s: float = 15e-6  # of one sum over the GPUs of an engine within a node, two for each layer
    far_reduce_s: float = 80e-6  # the same over several nodes


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be trained, and on what. Lengths in tokens; `sigma` of the logarithm of the response's length."""

    model: str = "qwen2.5-7b"
    gpu: str = "h100"
    gpus: int = 16
    engine_gpus: int = 1  # of one engine: its tensor parallel size
    trainer_unit: int = 1  # GPUs by which the trainer grows: its model parallel size
    groups: int = 64
    members: int = 16
    prompt: int = 300
    mean: float = 4000.0
    sigma: float = 0.8
    cap: int = 16384
    staleness: int = 2
    interval: int = 1
    turns: int = 1
    tool_s: float = 0.0
    filtered: float = 0.0
    passes: float = 4.0  # forward passes that a trained token costs: 3 and one to recompute; each log-prob pass is 1
    update_s: float = 2.0
    rolling: int = 1
    slots: int = 256
    fixed_s: float = 0.0  # of a batch, whatever its size
    streams: bool = True
    efficiency: Efficiency = Efficiency()

    @property
    def length(self) -> float:
        """Mean tokens of a response, the cap considered."""
        return capped_lognormal_mean(self.mean, self.sigma, self.cap)


@cache
def shape_of(model: str) -> ModelShape:
    """Of a preset of `--model`. Raises ConfigError, which names those that there are."""
    shape = known_shape(preset_config(model).model.architecture)
    if shape is None:
        raise ValueError(f"the preset {model} has an architecture that is not known; correct its file")
    return shape


def weight_bytes(shape: ModelShape, running: float) -> float:
    """Bytes of weights that a decode step of so many rollouts reads: of experts, those that any of its tokens wants."""
    routed = sum(m.parameters for i in range(shape.layers) for m in matrices(shape, i) if m.split == "expert")
    touched = 1 - (1 - shape.active_experts / shape.experts) ** running if shape.experts else 1.0
    return 2.0 * (total_parameters(shape) - routed * (1 - touched))


def kv_tokens(job: Job) -> int:
    """Tokens that the KV cache of one engine holds; 0 where the weights leave no room."""
    shape, gpu = shape_of(job.model), GPUS[job.gpu]
    room = gpu.memory * STATIC_FRACTION * job.engine_gpus - 2 * total_parameters(shape)
    return max(0, int(room / (2 * shape.key_values * shape.layers)))


def cluster_of(job: Job, engines: int, trainer_gpus: int, *, colocated: bool = False, batches: int = 10) -> Cluster:
    """The cluster of a split. Raises ValueError where an engine has no room for one rollout of full length."""
    shape, gpu, share = shape_of(job.model), GPUS[job.gpu], job.efficiency
    room = kv_tokens(job)
    if room < job.prompt + job.cap:
        raise ValueError(
            f"an engine of {job.engine_gpus} x {job.gpu} has room for {room:,} tokens of {job.model}'s KV cache, and "
            f"one rollout may have {job.prompt + job.cap:,}; raise --engine-gpus"
        )
    context = job.prompt + _mean_context(job)
    wanted = job.groups * job.members * (1 if colocated else job.staleness / job.interval + 1) / engines
    slots = max(1, min(job.slots, int(room / context)))
    running = max(1.0, min(slots, wanted))
    bandwidth = gpu.bandwidth * share.bandwidth * job.engine_gpus
    one = forward_flops(shape, int(context)) / context  # operations of a token
    # A step of the matrices takes max(weights read, b * operations): a line through both ends of it.
    weights_s = weight_bytes(shape, running) / bandwidth
    token_s = one / (gpu.flops * share.prefill * job.engine_gpus)
    return Cluster(
        engines=engines,
        slots=slots,
        a_s=weights_s + share.overhead_s + _reduce_s(shape, job.engine_gpus, share),
        c_s=2 * shape.key_values * shape.layers * context / bandwidth + max(0.0, token_s - weights_s / running),
        # The members of a group share their prompt's prefill.
        prefill_s=token_s / job.members,
        kv_tokens=room,
        token_s=job.passes * forward_flops(shape, int(job.prompt + job.length)) / (job.prompt + job.length)
        / (trainer_gpus * gpu.flops * (share.train_experts if shape.experts else share.train)),
        colocated=colocated,
        batches=batches,
        **{name: getattr(job, name) for name in COMMON},
    )  # fmt: skip


COMMON: Final = tuple(set(Job.__struct_fields__) & set(Cluster.__struct_fields__) - {"slots"})


def _reduce_s(shape: ModelShape, gpus: int, share: Efficiency) -> float:
    """Of a decode step: what tensor parallelism waits for its sums."""
    if gpus == 1:
        return 0.0
    return 2 * shape.layers * (share.reduce_s if gpus <= NODE_GPUS else share.far_reduce_s)


def _mean_context(job: Job) -> float:
    """Response tokens in the cache of a running rollout, mean over its time: E[L^2] / 2 E[L], the cap left out."""
    return min(job.length * math.exp(job.sigma**2) / 2, job.cap / 2)


def bounds(job: Job, engines: int, trainer_gpus: int) -> tuple[float, float]:
    """Seconds of a batch that the engines need at full slots, and the trainer: no schedule of this split is faster."""
    c = cluster_of(job, engines, trainer_gpus)
    rollouts = job.groups * job.members
    running = min(c.slots, rollouts * (job.staleness / job.interval + 1) / engines)
    generate = rollouts * job.length * (c.a_s + c.c_s * running) / running / engines
    return generate, rollouts * (job.length + job.prompt) * c.token_s + job.fixed_s
