"""What the planner says of cases that were published, beside what was published. No figure of ours is among them.

Sources: NeMo-RL, docs/about/performance-summary.md, table of v0.4 (DGX H100; engines and trainer on half of the GPUs
each where they are apart, as in its recipes); verl, docs/advance/fully_async.md (Qwen2.5-Math-7B, H20). They give mean
lengths or step times, not the distribution of lengths: `sigma` is assumed, 0.6, or 0.35 where most come near the cap.

Rows that constants were calibrated on say so; they show how well few constants fit, not how well the planner predicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec.structs import replace

from bench.plan_cluster import simulate
from bench.plan_hardware import Job, cluster_of
from bench.plan_types import Cluster, Result


class Row(msgspec.Struct, frozen=True):
    """One published case. Times in seconds for each publication of weights; `note` names what was calibrated on it."""

    source: str
    case: str
    published: float
    predicted: float
    note: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


# NeMo-RL: forward and backward (3), log-probs of the policy and of the reference (2), whole batches.
# case, preset, GPUs, of one engine, groups, mean, sigma, cap, apart, published s, calibrated
NEMO: Final = (
    ("Llama 8B, on-policy, 16 GPUs", "llama3.1-8b", 16, 1, 64, 980, 0.6, 4096, False, 97.7, "overhead"),
    ("Llama 8B, 1 step off, 8 + 8", "llama3.1-8b", 16, 1, 64, 1050, 0.6, 4096, True, 74.6, "train"),
    ("Qwen3 32B, on-policy, 32", "qwen3-32b", 32, 4, 64, 3260, 0.35, 4096, False, 393.0, ""),
    ("Qwen3 32B, 1 step off, 32 + 32", "qwen3-32b", 64, 4, 64, 3260, 0.35, 4096, True, 215.0, "train"),
    ("Qwen3 30B-A3B, on-policy, 32", "qwen3-30b-a3b", 32, 4, 64, 3200, 0.35, 4096, False, 225.0, ""),
    ("Qwen3 30B-A3B, 1 step off, 16 + 16", "qwen3-30b-a3b", 32, 2, 64, 3200, 0.35, 4096, True, 244.0, "train_experts"),
    ("Qwen3 235B-A22B, on-policy, 128", "qwen3-235b-a22b", 128, 16, 16, 5800, 0.35, 8192, False, 506.0, ""),
    ("Qwen3 235B-A22B, 1 step off, 128 + 128", "qwen3-235b-a22b", 256, 8, 16, 5800, 0.35, 8192, True, 241.0, ""),
    ("DeepSeek V3, on-policy, 256", "deepseek-v3", 256, 32, 16, 660, 0.5, 1536, False, 154.0, ""),
    ("DeepSeek V3, 1 step off, 256 + 256", "deepseek-v3", 512, 32, 16, 660, 0.5, 1536, True, 77.9, ""),
)
# verl: 512 groups of 16, answers up to 28K. GPU seconds of a publication as it reports them for 128 GPUs in turns
# (update 113.81 s and old log-probs 53.92 s) and for 64 that only train (113.16 s).
VERL_IN_TURNS, VERL_APART = (113.81 + 53.92) * 128, 113.16 * 64
VERL_MEAN = 1700.0  # tokens, so that 128 GPUs in turns generate for the 178 s that it reports
VERL_INTERVAL = 16  # mini-batches of 32 groups for each publication
# case, engines' GPUs, trainer's GPUs (None: in turns), staleness threshold, published s, calibrated
VERL: Final = (
    ("128 in turns", 128, None, 0.0, 356.3, "mean length, trainer in turns"),
    ("64 in turns", 64, None, 0.0, 365.28, ""),
    ("32 in turns", 32, None, 0.0, 790.10, ""),
    ("64 + 64, threshold 0", 64, 64, 0.0, 231.34, ""),
    ("64 + 64, threshold 0.1", 64, 64, 0.1, 171.30, ""),
    ("64 + 64, threshold 0.3", 64, 64, 0.3, 146.11, ""),
    ("64 + 64, threshold 0.5", 64, 64, 0.5, 150.63, "trainer apart"),
    ("32 + 32, threshold 0.5", 32, 32, 0.5, 189.26, ""),
    ("16 + 16, threshold 0.5", 16, 16, 0.5, 294.77, ""),
)
# Monte-Carlo runs of a calculation apart from this code: 32 GPUs of 32 slots, 4K tokens of constant time, cap 32K.
# sigma, waves (batch / slots), share of slots at work in synchronous generation, gain of asynchrony at half and half
THEORY: Final = (
    (0.5, 4, 0.54, 1.43), (0.5, 1, 0.20, None), (1.0, 4, 0.36, 1.88), (1.0, 1, 0.12, 4.66), (1.3, 1, 0.11, None),
)  # fmt: skip


def nemo(quick: bool) -> Iterator[Row]:
    for case, model, gpus, each, groups, mean, sigma, cap, apart, published, note in NEMO[: 2 if quick else None]:
        job = Job(
            model=model, gpu="h100", gpus=gpus, engine_gpus=each, groups=groups, members=32, prompt=100, mean=mean,
            sigma=sigma, cap=cap, staleness=int(apart), passes=5.0, streams=False, rolling=gpus,
        )  # fmt: skip
        side = gpus // 2 if apart else gpus
        cluster = cluster_of(job, side // each, side, colocated=not apart, batches=6 if quick else 10)
        yield Row("NeMo-RL", case, published, simulate(cluster).step_s, note)


def verl_cluster(generates: int, trains: int | None, threshold: float, publications: int) -> Cluster:
    """verl counts samples: 512 (1 + threshold) groups for each publication. That is our gate with mini-batches of 32 as
    batches, published every 16, and room for 16 (1 + threshold) of them."""
    job = Job(
        model="qwen2.5-7b", gpu="h20", gpus=128, groups=512, members=16, prompt=150, mean=VERL_MEAN, sigma=0.6,
        cap=28672, update_s=0.12, rolling=1 << 20, streams=trains is not None, staleness=0,
    )  # fmt: skip
    whole = cluster_of(job, generates, trains or generates, colocated=trains is None, batches=publications)
    tokens = 512 * 16 * (job.length + job.prompt)
    if trains is None:
        return replace(whole, token_s=VERL_IN_TURNS / generates / tokens, warm_up=1)
    k = VERL_INTERVAL
    return replace(
        whole, token_s=VERL_APART / trains / tokens, groups=32, interval=k, batches=publications * k, warm_up=2 * k,
        staleness=k - 1 + round(threshold * k),
    )  # fmt: skip


def verl() -> Iterator[Row]:
    for case, generates, trains, threshold, published, note in VERL:
        result = simulate(verl_cluster(generates, trains, threshold, 5))
        yield Row("verl", case, published, result.step_s, note)


def theory_cluster(sigma: float, waves: int, *, apart: bool) -> Cluster:
    """Training costs what generation does (r = 1), so that half of the GPUs is the best share for either."""
    token_s = 0.01  # of one slot
    batch = 1024 * waves
    train = token_s / 32 / (16 if apart else 32)
    return Cluster(
        engines=16 if apart else 32, slots=32, a_s=token_s, c_s=0.0, token_s=train, groups=batch, members=1,
        mean=4096.0, sigma=sigma, cap=32768, staleness=12 // waves + 1 if apart else 0, colocated=not apart, rolling=64,
        batches=(6 + 20 // waves if apart else 4), warm_up=(3 + 14 // waves if apart else 1),
    )  # fmt: skip


def theory(quick: bool) -> Iterator[Row]:
    for sigma, waves, share, gain in THEORY[: 2 if quick else None]:
        case = f"sigma {sigma:g}, {waves} wave{'s' * (waves > 1)}"
        sync = simulate(theory_cluster(sigma, waves, apart=False))
        yield Row("Monte-Carlo", f"{case}: slots at work, sync", share, _generating(sync))
        if gain is not None and not quick:
            apart = simulate(theory_cluster(sigma, waves, apart=True))
            yield Row("Monte-Carlo", f"{case}: gain of async", gain, sync.step_s / apart.step_s)


def _generating(sync: Result) -> float:
    """Share of the slots that decode while anything is generated."""
    return sync.slots_busy / (1 - sync.trainer_busy)


def rows(quick: bool) -> list[Row]:
    """All cases; the quick form has those that take seconds."""
    return [*theory(quick), *nemo(quick), *(() if quick else verl())]
