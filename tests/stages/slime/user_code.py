"""Generate functions as slime's documentation has its users write them; only the import of `Sample` is another one."""

from __future__ import annotations

import asyncio
import copy
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stages.slime import DataSource, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, post, run

STARTED: list[Any] = []  # samples of functions that then wait for ever


def tokenize(text: str) -> list[int]:
    return list(text.encode())


async def ask(args: Any, input_ids: list[int], sampling_params: dict[str, Any]) -> tuple[list[int], Any]:
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(url, payload)
    return [item[1] for item in output["meta_info"]["output_token_logprobs"]], output


async def single_turn(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    prompt_ids = tokenize(sample.prompt)
    new_ids, output = await ask(args, prompt_ids, sampling_params)
    sample.tokens = prompt_ids + new_ids
    sample.response_length = len(new_ids)
    sample.response = output["text"]
    sample.rollout_log_probs = [item[0] for item in output["meta_info"]["output_token_logprobs"]]
    ends = {"length": Sample.Status.TRUNCATED, "abort": Sample.Status.ABORTED, "stop": Sample.Status.COMPLETED}
    sample.status = ends[output["meta_info"]["finish_reason"]["type"]]
    return sample


async def with_tools(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Two turns with an observation between them, which is masked, and a reward of its own."""
    prompt_ids, params = tokenize(sample.prompt), {**sampling_params, "max_new_tokens": 5}
    first, _ = await ask(args, prompt_ids, params)
    observation = tokenize("ok")
    second, output = await ask(args, prompt_ids + first + observation, params)
    response_ids = first + observation + second
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = f"label {sample.label}"
    sample.loss_mask = [1] * len(first) + [0] * len(observation) + [1] * len(second)
    sample.reward = 0.0 if evaluation else 0.25
    sample.update_from_meta_info(args, output["meta_info"])
    return sample


async def segments(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """A compacted context: what the first segment made is summed up in the prompt of the second."""
    first = await with_tools(args, copy.deepcopy(sample), sampling_params)
    prompt_ids = tokenize("summary")
    new_ids, _ = await ask(args, prompt_ids, {**sampling_params, "max_new_tokens": 3})
    second = copy.deepcopy(sample)
    second.tokens, second.response_length = prompt_ids + new_ids, len(new_ids)
    second.reward, second.status = 1.0, Sample.Status.COMPLETED
    return [first, second]


async def drifting(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Puts other tokens behind the prompt than the engine gave: what tokenising a decoded text anew does."""
    sample = await single_turn(args, sample, sampling_params)
    sample.tokens[-2] = (sample.tokens[-2] + 1) % 256
    return sample


async def raising(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    raise ConnectionError("the sandbox is gone")


async def waiting(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    STARTED.append(sample)
    await asyncio.Event().wait()
    return sample


async def blocking(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Stops its own loop for a while, as a synchronous client does."""
    time.sleep(0.2)  # noqa: ASYNC251  (what is shown)
    return await single_turn(args, sample, sampling_params)


def not_async(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return sample


async def too_few(args: Any, sample: Sample) -> Sample:
    return sample


class Counting(DataSource):
    """A data source that gives 0, 1, 2, ... and remembers in a file where it is, as slime's own does."""

    def __init__(self, args: Any) -> None:
        self.args, self.next = args, 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = []
        for _ in range(num_samples):
            sample = Sample(prompt=f"{self.next}+1=", label=str(self.next + 1), metadata={"n": self.next})
            groups.append([copy.deepcopy(sample) for _ in range(self.args.n_samples_per_prompt)])
            self.next += 1
        return groups

    def save(self, rollout_id: int) -> None:
        Path(self.args.save, f"state_{rollout_id}").write_text(str(self.next))

    def load(self, rollout_id: int | None = None) -> None:
        self.next = int(Path(self.args.load, f"state_{rollout_id}").read_text())

    def __len__(self) -> int:
        return 1000


class Empty(Counting):
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return []


class Short(Counting):
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return [group[:1] for group in super().get_samples(num_samples)]


class Broken(Counting):
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        raise OSError("the disk is gone")


class NamesCode(Counting):
    """By its data: the metadata, as rows of a file would have it."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = super().get_samples(num_samples)
        for sample in (sample for group in groups for sample in group):
            sample.metadata["generate_function_path"] = "os.system"
        return groups


class ChoosesFunction(Counting):
    """By its code: the attribute of the sample."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = super().get_samples(num_samples)
        for sample in (sample for group in groups for sample in group):
            sample.generate_function_path = f"{__name__}.too_few"
        return groups


class NoLoad:
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return []

    def save(self, rollout_id: int) -> None: ...

    def __len__(self) -> int:
        return 1


class Odd(Counting):
    def get_samples(self) -> list[list[Sample]]:  # type: ignore[override]
        return []


def whole_batch(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """As slime's own: draws until the batch is full, asks for all at the same time, sorts by the index."""

    async def one(sample: Sample) -> Sample:
        sample = await single_turn(args, sample, {"max_new_tokens": 6})
        sample.reward = float(len(sample.tokens))
        return sample

    async def all_of_them() -> list[list[Sample]]:
        groups: list[list[Sample]] = []
        while len(groups) < args.rollout_batch_size:
            drawn = data_source.get_samples(args.rollout_batch_size - len(groups))
            groups += [list(await asyncio.gather(*map(one, group))) for group in drawn]
        return sorted(groups, key=lambda group: group[0].index or 0)

    return RolloutFnTrainOutput(samples=run(all_of_them()), metrics={"batch": rollout_id, "source": "mine"})


async def drops_the_first(args: Any, rollout_id: int, data_source: Any) -> list[list[Sample]]:
    """Puts one group back, leaves one out, returns the others without a class around them."""
    _, second, *rest = data_source.get_samples(args.rollout_batch_size)
    data_source.add_samples([second])
    return [[await single_turn(args, sample, {}) for sample in group] for group in rest]


def draws_nothing(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    return RolloutFnTrainOutput(samples=[[Sample(index=0)]])


def draws_too_much(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    while True:
        data_source.get_samples(2)


def hangs(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> None:
    STARTED.append(data_source.get_samples(2))
    time.sleep(30)


def differing_rewards(args: Any, samples: list[Sample], **kwargs: Any) -> SimpleNamespace:
    rewards = {sample.get_reward_value(args) for sample in samples}
    return SimpleNamespace(keep=len(rewards) > 1, reason=None if len(rewards) > 1 else f"all_{rewards.pop():.0f}")


def short_ones(args: Any, groups: list[list[Sample]]) -> None:
    for sample in (sample for group in groups for sample in group):
        sample.remove_sample = sample.response_length < 3


def plus_index(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    raw = [float(sample.reward) for sample in samples]  # type: ignore[arg-type]
    return raw, [args.n_samples_per_prompt + reward for reward in raw]


async def rewarded(args: Any, sample: Sample) -> float:
    return float(sample.response == sample.label and sample.metadata["n"] == 1)


async def left_on_it(args: Any, sample: Sample) -> float:
    return float(sample.metadata["seen"] + sample.calls)  # type: ignore[attr-defined]


async def left_on_them(args: Any, samples: list[Sample]) -> list[float]:
    return [await left_on_it(args, sample) for sample in samples]


async def rewarded_together(args: Any, samples: list[Sample]) -> list[float]:
    return [float(place) for place, _ in enumerate(samples)]


def log_batch(
    rollout_id: int, args: Any, samples: list[Sample], rollout_extra_metrics: Any, rollout_time: float
) -> bool:
    line = f"{rollout_id} {len(samples)} {rollout_extra_metrics['rollout/raw_reward']:.1f} {rollout_time > 0}\n"
    with Path(args.hf_checkpoint, "batches.txt").open("a") as file:
        file.write(line)
    return True


def log_evaluation(rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: dict[str, float]) -> bool:
    for name, messages in data.items():
        prompts, labels = zip(*((sample.prompt, sample.label) for sample in messages["samples"]), strict=True)
        STARTED.append((rollout_id, messages["rewards"], list(prompts), list(labels), extra_metrics[f"eval/{name}"]))
    return False


def log_raises(rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> bool:
    raise OSError("no tracker")


def no_source_at_all(args: Any) -> None: ...


# Functions for whole groups and whole evaluations.

ASKED: list[Any] = []  # (rollout_id, groups, number) of each call of a buffer filter
SEEN: list[Any] = []  # [group, rewards] that were shown


def cut_and_scaled(args: Any, samples: list[Sample]) -> dict[str, Any]:
    kept = [sample for sample in samples if sample.reward < 3]
    return {
        "tokens": [sample.tokens for sample in kept],
        "response_lengths": [sample.response_length for sample in kept],
        "loss_masks": [[*sample.loss_mask[:-1], 0] for sample in kept],
        "rewards": [10 * sample.get_reward_value(args) for sample in kept],
    }


def cut_and_scaled_backwards(args: Any, samples: list[Sample]) -> dict[str, Any]:
    back = [sample for sample in reversed(samples)]
    return {
        "tokens": [sample.tokens for sample in back],
        "response_lengths": [sample.response_length for sample in back],
        "loss_masks": [sample.loss_mask for sample in back],
        "rewards": [10 * sample.reward for sample in back],
        "sample_indices": [sample.index for sample in back],
    }


def other_tokens(args: Any, samples: list[Sample]) -> dict[str, Any]:
    data = cut_and_scaled(args, samples)
    return {**data, "tokens": [[token + 1 for token in one] for one in data["tokens"]]}


def twice(args: Any, samples: list[Sample]) -> dict[str, Any]:
    return {name: [*values, values[0]] for name, values in cut_and_scaled(args, samples).items()}


def masks_what_no_policy_made(args: Any, samples: list[Sample]) -> dict[str, Any]:
    data = cut_and_scaled(args, samples)
    return {**data, "loss_masks": [[1] * length for length in data["response_lengths"]]}


def mask_too_short(args: Any, samples: list[Sample]) -> dict[str, Any]:
    data = cut_and_scaled(args, samples)
    return {**data, "loss_masks": [mask[:-1] for mask in data["loss_masks"]], "rewards": [1.0, 0.0]}


def no_number(args: Any, samples: list[Sample]) -> dict[str, Any]:
    return {**cut_and_scaled(args, samples), "rewards": [float("nan")] * 2}


def no_masks(args: Any, samples: list[Sample]) -> dict[str, Any]:
    data = cut_and_scaled(args, samples)
    del data["loss_masks"]
    return data


def unequal_lists(args: Any, samples: list[Sample]) -> dict[str, Any]:
    return {**cut_and_scaled(args, samples), "rewards": [1.0]}


def best_first_and_no_bad_ones(args: Any, rollout_id: int, buffer: list[Any], num_samples: int) -> list[Any]:
    ASKED[:] = [(rollout_id, [group[0].group_index for group in buffer], num_samples)]
    buffer[:] = [group for group in buffer if group[0].reward >= 0]
    buffer.sort(key=lambda group: -group[0].reward)
    picked = buffer[:num_samples]
    del buffer[:num_samples]
    return picked


def nothing_yet(args: Any, rollout_id: int, buffer: list[Any], num_samples: int) -> list[Any]:
    return []


def made_up_groups(args: Any, rollout_id: int, buffer: list[Any], num_samples: int) -> list[Any]:
    return [[Sample(group_index=99)]]


def not_a_list(args: Any, rollout_id: int, buffer: list[Any], num_samples: int) -> Any:
    return iter(buffer[0][0])  # type: ignore[call-overload]


def see_all(args: Any, samples: list[list[Sample]], data_source: DataSource) -> None:
    SEEN.extend([group[0].group_index, [sample.reward for sample in group]] for group in samples)


async def evaluated(args: Any, rollout_id: int, data_source: Any, evaluation: bool = True) -> Any:
    new_ids, _ = await ask(args, tokenize("abc"), {"temperature": 0.0, "max_new_tokens": 8})
    assert evaluation
    data = {"held": {"rewards": [1, 0.0], "truncated": [False, True], "samples": []}}
    return RolloutFnEvalOutput(data=data, metrics={"answered": len(new_ids), "rollout_id": rollout_id, "text": "x"})


def evaluation_breaks(args: Any, rollout_id: int, data_source: Any, evaluation: bool = True) -> Any:
    raise OSError("no data")


async def by_texts(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Three turns, sent as texts; the engine's bytes are no UTF-8, so that the text alone does not give them back."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens, sample.loss_mask, text = tokenize(sample.prompt), [], sample.prompt
    masks = sample.loss_mask
    for observation in ("see: ", "and: ", ""):
        output = await post(url, {"text": text, "sampling_params": sampling_params, "return_logprob": True})
        made = output["meta_info"]["output_token_logprobs"]
        ids, log_probs = [item[1] for item in made], [item[0] for item in made]
        sample.append_response_tokens(args, tokens=ids, log_probs=log_probs, meta_info=output["meta_info"])
        sample.append_response_tokens(args, tokens=tokenize(observation), trainable=False)
        text += output["text"] + observation
    sample.response, sample.loss_mask = text.removeprefix(sample.prompt), masks
    return sample


async def label_is_object(args: Any, sample: Sample) -> dict[str, Any]:
    return {"score": float(isinstance(sample.label, dict)), "acc": True, "pred": "4", "note": "in words", "none": None}
