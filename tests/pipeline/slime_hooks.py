"""Functions as a user of slime has them, each of which leaves a trace; runs of test_slime_runs.py name them.

torch is imported by the functions that make tensors: the processes that only look for functions here need two seconds
less.
"""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stages.slime import GenerateState, Sample, post


def note(name: str, *words: Any) -> None:
    """Into the folder in which the run was started."""
    with Path(f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(words) + "\n")


# What makes and grades rollouts.


async def two_requests(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    ids = GenerateState(args).tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    url, made = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", list[int]()
    for _ in range(4 if sample.metadata["n"] == 4 else 2):
        asked = {"input_ids": ids + made, "sampling_params": {**sampling_params, "max_new_tokens": 3}}
        output = await post(url, asked)
        made += [one[1] for one in output["meta_info"]["output_token_logprobs"]]
    sample.tokens, sample.response_length, sample.status = ids + made, len(made), Sample.Status.COMPLETED
    sample.response, sample.metadata["depth"] = "evaluated" if evaluation else "trained", args.depth
    return sample


async def by_row(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample = await two_requests(args, sample, sampling_params)
    sample.response = "by row"
    return sample


async def graded(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    return {"score": sample.metadata["depth"] + args.bonus, "other": 1.0}


def graded_by_row(args: Any, sample: Sample) -> dict[str, float]:
    return {"score": 100.0}


class Judge:
    def __init__(self, best: float) -> None:
        self.best = best

    async def together(self, args: Any, samples: list[Sample]) -> list[float]:
        assert len(samples) == args.n_samples_per_prompt
        return [self.best if place == 1 else 0.0 for place, _ in enumerate(samples)]


judged = Judge(4.0).together


# What chooses what is trained.


def not_the_first(args: Any, samples: list[Sample], **kwargs: Any) -> SimpleNamespace:
    keep = samples[0].metadata["n"] != 1
    return SimpleNamespace(keep=keep, reason=None if keep else "the_first")


def without_the_last(args: Any, groups: list[list[Sample]]) -> None:
    for group in groups:
        group[-1].remove_sample = True


def places(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    return [sample.get_reward_value(args) for sample in samples], [float(place) for place, _ in enumerate(samples)]


# What the trainer computes.


def for_every_token(args: Any, rollout_data: dict[str, Any]) -> None:
    import torch

    rewards, lengths = rollout_data["rewards"], rollout_data["response_lengths"]
    note("advantages", *zip(rewards, lengths, strict=True))
    made = [reward * torch.ones(length) for reward, length in zip(rewards, lengths, strict=True)]
    rollout_data["advantages"] = rollout_data["returns"] = made


def tripled(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    note("post_processed", rollout_id, sum(float(advantages.sum()) for advantages in rollout_data["advantages"]))
    rollout_data["advantages"] = [3 * advantages for advantages in rollout_data["advantages"]]


def doubled(args: Any, *, pg_loss: Any, loss_masks: list[Any], **kwargs: Any) -> Any:
    return 2 * pg_loss, loss_masks, {"own_weight": pg_loss.new_full(pg_loss.shape, 2.0)}


def summed(total_lengths: Any, response_lengths: Any, loss_masks: Any, calculate_per_token_loss: bool = False) -> Any:
    import torch

    def reduce(pg_loss: Any) -> Any:
        total = (pg_loss * torch.cat(list(loss_masks))).sum()
        note("reduced", float(total.detach()))
        return total

    return reduce


def first_rewarded(tokens: Any, groups: Any, config: Any) -> Any:
    """A loss of groups."""
    note("groups", groups.reward.tolist())
    return tokens.log_probs * 0 + groups.reward[tokens.sequence]


# What looks on.


def log_rollout(rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> bool:
    for sample in samples:
        row = sample.metadata["n"], sample.response, sample.get_reward_value(args), sample.remove_sample
        note("rollouts", rollout_id, *row)
    return False


def log_evaluation(rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: dict[str, float]) -> bool:
    for name, one in data.items():
        note("evaluations", rollout_id, name, one["rewards"], [sample.response for sample in one["samples"]])
    return True


# Of Megatron's processes.


def megatron_begins(args: Any) -> None:
    from megatron.core import parallel_state

    note("megatron", "init", parallel_state.get_tensor_model_parallel_world_size(), args.lr)


def before_log_probs(args: Any, model: list[Any], store_prefix: str) -> None:
    note("megatron", f"log_prob {store_prefix}", len(model))


def before_step(
    args: Any, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    for group in optimizer.param_groups:
        group["eps"] = 1e9  # of Adam, so that this step moves next to nothing
    note("megatron", "step", rollout_id, step_id)


# What goes wrong.


async def breaks(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    raise ValueError("the shelf is empty")


async def gives_a_number(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> int:
    return 5


async def hangs(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> None:
    await asyncio.Event().wait()


def forgets_to_return(args: Any, samples: list[Sample]) -> None:
    """A filter."""


async def log_later(rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> bool:
    return True


def spoils(args: Any, samples: list[Sample]) -> Any:
    raise ValueError("the shelf is empty")


class Numbers:
    """A data source without groups."""

    def __init__(self, args: Any) -> None: ...

    def get_samples(self, num_samples: int) -> int:
        return num_samples

    def save(self, rollout_id: int) -> None: ...

    def load(self, rollout_id: int | None = None) -> None: ...

    def __len__(self) -> int:
        return 1


class Hangs(Numbers):
    def get_samples(self, num_samples: int) -> int:
        threading.Event().wait()
        return num_samples
