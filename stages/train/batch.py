"""One rollout batch in training: which groups it holds, and what the trainer is given of each.

Invariants: `staleness` counts exactly the tokens that were trained on, by (batch number - version of the token); a
rollout enters its group's baseline once, whatever number of sequences it has, and all of them get its advantage; its
return is its reward at the end plus the rewards of its turns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from configs.schema import Config
from configs.schema.algorithm import KL_IN_REWARD
from models.algorithms.advantages import TOKEN_ESTIMATORS, advantages
from models.errors import InconsistentGroup, InsufficientMembers
from models.import_path import has_args, import_path, raised
from models.slime_arguments import slime_arguments
from models.train.interface import TrainSequence
from models.train.trainer_group.rank_spec import processes_of
from models.train.work import PEAK, Work, checkpoint_shape, speed, work_of
from stages.base import Spans
from stages.errors import UntrainableGroup
from stages.messages import RolloutSlice, Sample, UInt8Array, wire
from stages.ports import Lease
from stages.reward.components import PART, Selection
from stages.rollouts import (
    by_version,
    pass_rate,
    prefixes,
    rollout_return,
    rollouts,
    token_rewards,
    trained_mask,
    trained_masks,
    turn_total,
)
from stages.sample_log import SampleLog
from stages.slime.hooks import logged, rollout_log, shown
from stages.topic_values import sampling
from stages.train.batch_metrics import MASKED, batch_metrics
from stages.train.saved_groups import save_batch, save_train_data

PostProcess = Callable[[Any, Any], Any]
Members = Sequence[Sequence[Sample]]  # rollouts of a group, each with its sequences
Values = npt.NDArray[np.float64]


def for_trainer(config: Config, slice_: RolloutSlice) -> tuple[RolloutSlice, list[TrainSequence]]:
    """What is trained of a group, and its sequences as the trainer takes them. Raises UntrainableGroup."""
    sequences = slice_sequences(config, slice_)
    path = config.reward.custom_convert_samples_to_train_data_path
    return (slice_, sequences) if path is None else converted(config, path, slice_, sequences)


def slice_sequences(config: Config, slice_: RolloutSlice) -> list[TrainSequence]:
    """The sequences of one complete group with their advantages, as the trainer takes them. Raises UntrainableGroup."""
    members = rollouts(slice_.samples)
    values = _rollout_values(config, slice_, members)
    group, configured = slice_.group, config.rollout.rollout_temperature
    drawn = sampling(group, config.rollout).temperature
    supervised = config.train.loss_type == "sft_loss"
    sequences = []
    for parts, value in zip(members, values, strict=True):
        total = turn_total(parts)
        for sample, prefix, rewards in zip(parts, prefixes(parts), token_rewards(parts), strict=True):
            mask, scored = trained_mask(sample), sample.teacher_log_probs
            sequences.append(
                TrainSequence(
                    group_id=group.group_id,
                    rollout_id=group.group_id * group.n_samples + sample.index,
                    tokens=np.array(sample.token_ids, dtype=np.int32),
                    prompt_length=sample.prompt_length,
                    loss_mask=mask,
                    rollout_log_probs=np.array(sample.log_probs, dtype=np.float32),
                    advantages=(float(value) * mask).astype(np.float32),
                    versions=sample.versions,
                    reward=sample.reward or 0.0,
                    truncated=sample.status == "truncated",
                    teacher_log_probs=np.array(scored, dtype=np.float32) if len(scored) else None,
                    prefix=prefix,
                    token_rewards=rewards,
                    turn_total=total,
                    temperature=None if supervised or drawn == configured else drawn,
                )
            )
    return sequences


def _rollout_values(config: Config, slice_: RolloutSlice, members: Members) -> Values:
    """[n] the advantage of each rollout's tokens."""
    if config.train.loss_type == "sft_loss":
        return np.ones(len(members))
    path = config.reward.custom_reward_post_process_path
    if path is not None:
        return post_processed(config, import_path(path), path, slice_, members)
    algorithm = config.algorithm

    def values(rewards: Sequence[float]) -> Values:
        return advantages(
            algorithm.advantage_estimator,
            rewards,
            [parts[0].index for parts in members],
            normalize_std=not algorithm.disable_grpo_std_normalization,
            normalize=not algorithm.disable_rewards_normalization,
        )

    try:
        if algorithm.advantage_estimator != "gdpo":
            return values([rollout_return(parts) for parts in members])
        found, turns = [parts[-1].reward_parts for parts in members], [turn_total(parts) for parts in members]
        weighted = [
            one.weight * values([parts[one.name] for parts in found]) for one in Selection(config.reward).components
        ]
        return sum(weighted, values([parts.get(PART, 0.0) for parts in found]) + values(turns))
    except (InsufficientMembers, InconsistentGroup) as error:
        raise UntrainableGroup(str(error)) from error
    except KeyError as name:
        words = f"a reward has no component {name}; choose grpo where rewards are not those of --reward-component"
        raise UntrainableGroup(f"--advantage-estimator gdpo: {words}") from name


def post_processed(config: Config, function: PostProcess, path: str, slice_: RolloutSlice, members: Members) -> Values:
    """What the user's function makes of the returns of the rollouts, one number each; with slime's signature it is
    `(args, samples)` and returns (raw rewards, numbers)."""
    last = tuple(parts[-1] for parts in members)
    try:
        if has_args(function):
            samples = shown(msgspec.structs.replace(slice_, samples=last))
            for sample, parts in zip(samples, members, strict=True):
                sample.reward = rollout_return(parts)
            _, found = function(slime_arguments(config), samples)
        else:
            found = function([rollout_return(parts) for parts in members], last)
        values = np.asarray(found, dtype=np.float64)
    except Exception as error:
        raise UntrainableGroup(f"--custom-reward-post-process-path {path} raised {raised(error)}") from error
    if values.shape != (len(members),) or not np.isfinite(values).all():
        raise UntrainableGroup(
            f"--custom-reward-post-process-path {path} gave {values.tolist()!r:.200} for {len(members)} rollouts; it "
            "must return one finite number for each"
        )
    return values


_CONVERTED = ("tokens", "response_lengths", "loss_masks", "rewards")  # of slime's train data, what is read here


def converted(
    config: Config, path: str, slice_: RolloutSlice, sequences: Sequence[TrainSequence]
) -> tuple[RolloutSlice, list[TrainSequence]]:
    """The group as the user's function `(args, samples)` has it: slime's dict of lists, with an entry for each sequence
    that is trained. It chooses sequences, masks and advantages (`rewards`); tokens are those of the record.

    Raises UntrainableGroup.
    """
    whole = rollouts(slice_.samples)
    parts = [(sample, rollout_return(members)) for members in whole for sample in members]
    samples = shown(msgspec.structs.replace(slice_, samples=tuple(sample for sample, _ in parts)))
    for given, (_, value) in zip(samples, parts, strict=True):
        given.reward = value
    try:
        data = import_path(path)(slime_arguments(config), samples)
        columns = [list(data[name]) for name in _CONVERTED]
        rollout_ids = data.get("sample_indices", [None] * len(columns[0]))
        chosen: dict[int, tuple[npt.NDArray[np.uint8], float]] = {}
        for rollout_id, *entry in zip(rollout_ids, *columns, strict=True):
            # Responses of a group may be equal, so an entry without a number is that of the first one that has none.
            here = (i for i, s in enumerate(sequences) if i not in chosen and rollout_id in (None, s.rollout_id))
            place = next((i for i in here if np.array_equal(sequences[i].tokens, entry[0])), None)
            chosen[-1 if place is None else place] = _entry(None if place is None else sequences[place], *entry)
    except Exception as error:
        flag = "--custom-convert-samples-to-train-data-path"
        raise UntrainableGroup(f"{flag} {path} raised {raised(error)}") from error
    kept: list[Sample] = []
    trained: list[TrainSequence] = []
    for place, (sequence, (sample, _)) in enumerate(zip(sequences, parts, strict=True)):
        mask, value = chosen.get(place, (np.zeros_like(sequence.loss_mask), 0.0))
        kept.append(msgspec.structs.replace(sample, loss_mask=wire(mask, UInt8Array)))
        advantage = (value * mask).astype(np.float32)
        trained.append(dataclasses.replace(sequence, loss_mask=mask, reward=value, advantages=advantage))
    return msgspec.structs.replace(slice_, samples=tuple(kept)), trained


def _entry(
    sequence: TrainSequence | None, tokens: Sequence[int], length: int, mask: Sequence[int], reward: float
) -> tuple[npt.NDArray[np.uint8], float]:
    """(Loss mask of all tokens, advantage) of an entry for a sequence. Raises ValueError."""
    if sequence is None or sequence.response_length != length:
        raise ValueError(
            f"{len(tokens)} tokens with response_lengths {length} are no sequence of the group without an entry; "
            "tokens cannot be changed: leave the entry out, or set its loss_masks to 0"
        )
    whole, value = np.concatenate([np.zeros(sequence.prompt_length), np.array(mask)]), float(reward)
    if len(whole) != len(tokens) or not np.isin(whole, (0, 1)).all() or not math.isfinite(value):
        raise ValueError(
            f"an entry has {len(mask)} loss_masks for {length} tokens, and the reward {reward}; give 0 or 1 for each "
            "token of the response, and a finite number"
        )
    if (whole > sequence.loss_mask).any():
        first = int(np.flatnonzero(whole > sequence.loss_mask)[0])
        raise ValueError(f"loss_masks is 1 for token {first}, which may not be trained; leave it 0 where it was 0")
    return whole.astype(np.uint8), value


def values_are_advantages(config: Config) -> bool:
    """Whether tokens are trained with the value of their rollout, as it is here; else the trainer makes another one."""
    algorithm, estimator = config.algorithm, config.algorithm.advantage_estimator
    functions = (algorithm.custom_advantage_function_path, algorithm.rollout_data_postprocess_path)
    subtracts_kl = algorithm.kl_coef > 0 and estimator in KL_IN_REWARD
    changed = algorithm.normalize_advantages or config.distill.use_opd or subtracts_kl or functions != (None, None)
    return not changed and estimator not in TOKEN_ESTIMATORS


class Batch:
    """Groups of rollout batch `step` (0 = the first)."""

    def __init__(self, config: Config, step: int) -> None:
        self.config, self.step = config, step
        self.leases: list[Lease[RolloutSlice]] = []
        self.slices: list[RolloutSlice] = []  # what is trained of each group
        self.masked_tokens = 0  # too old, in groups that are trained
        self.sequences: dict[int, list[TrainSequence]] = {}  # by group, while they wait for their turn
        self.advantages: dict[int, list[float]] = {}  # by group, of each sequence: all its trained tokens have the same
        self.log_probs: dict[int, list[npt.NDArray[np.float32]]] = {}  # of the first groups, with the first weights
        self.kept: list[TrainSequence] = []  # all of them, for --save-debug-train-data
        self.staleness: Counter[int] = Counter()  # trained tokens by age
        self.trained_tokens = 0
        self.compute_s = 0.0
        self.work: list[Work] = []  # by group
        self.pending = 0  # groups since the backend last ran all of its own through
        members = 1 if config.train.loss_type == "sft_loss" else config.rollout.n_samples_per_prompt
        self.expected_rollouts = config.rollout.rollout_batch_size * members

    def add(self, slice_: RolloutSlice, sequences: list[TrainSequence], masked: int = 0) -> None:
        """Take a group; `sequences` are kept until they are handed to the backend. `masked`: its stale tokens."""
        self.slices.append(slice_)
        self.sequences[slice_.group.group_id] = sequences
        self.work.append(work_of(sequences))
        if values_are_advantages(self.config):
            self.advantages[slice_.group.group_id] = [
                float(one.advantages[one.loss_mask > 0][:1].sum()) for one in sequences
            ]
        if self.config.debug.save_debug_train_data is not None:
            self.kept += sequences
        self.masked_tokens += masked
        self.pending += 1
        for parts in rollouts(slice_.samples):
            for sample, mask in zip(parts, trained_masks(parts), strict=True):
                for version, n in by_version(sample, mask):
                    self.trained_tokens += n
                    self.staleness[self.step - version] += n

    @property
    def group_ids(self) -> tuple[int, ...]:
        return tuple(slice_.group.group_id for slice_ in self.slices)

    @property
    def pass_rates(self) -> dict[int, float]:
        """Share of correct rollouts of each group with verdicts."""
        rates = {slice_.group.group_id: pass_rate(slice_.samples) for slice_ in self.slices}
        return {group_id: rate for group_id, rate in rates.items() if rate is not None}

    def token_hash(self) -> str:
        """xxh3 of the trained ids and masks in group order: equal batches have equal hashes."""
        digest = xxhash.xxh3_128()
        for slice_ in sorted(self.slices, key=lambda one: one.group.group_id):
            group = slice_.group
            digest.update(f"{group.group_id}:{group.prompt_index}".encode())
            for parts in rollouts(slice_.samples):
                for sample, mask in zip(parts, trained_masks(parts), strict=True):
                    digest.update(np.ascontiguousarray(sample.token_ids).tobytes())
                    digest.update(mask.astype(np.uint8).tobytes())
        return digest.hexdigest()

    def metrics(self) -> dict[str, float]:
        """Rollout-side metrics, under the names of docs/metrics.md."""
        metrics = batch_metrics(self.config, self.step, self.slices, self.staleness)
        return metrics | ({MASKED: float(self.masked_tokens)} if self.masked_tokens else {})

    def speed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """How fast it was trained. `metrics`: of the backend, which knows its GPU."""
        train = self.config.train
        if train.train_backend == "simulated":
            return {}
        gpu_s = self.compute_s * processes_of(self.config.parallel)
        peak = train.peak_tflops or metrics.get(PEAK)
        return speed(checkpoint_shape(train.hf_checkpoint), self.work, gpu_s, peak)


class BatchLog:
    """What is written down of each trained batch, beside its report: samples, trace, the user's own log and files."""

    def __init__(self, config: Config, run_dir: Path, spans: Spans) -> None:
        self.samples = SampleLog(config, run_dir)
        self._config, self._spans = config, spans
        rollouts_trained = config.train.loss_type != "sft_loss"
        path = config.observe.custom_rollout_log_function_path
        self._log = rollout_log(path) if path is not None and rollouts_trained else None
        self._file = config.debug.save_debug_rollout_data if rollouts_trained else None

    async def trained(self, step: int, batch: Batch, metrics: dict[str, float]) -> None:
        """Of the batch whose report is step `step`."""
        slices = batch.slices
        if self._log is not None:
            samples = [sample for slice_ in slices for sample in shown(slice_)]
            reported, wall_s = batch.metrics() | metrics, metrics["perf/step_time"]
            flag = "--custom-rollout-log-function-path"
            await logged(flag, self._log, step - 1, slime_arguments(self._config), samples, reported, wall_s)
        for group_id in batch.group_ids:  # where the arrows of a group end in the trace
            self._spans.add("trained", time.time(), 0.0, group=group_id, detail=f"step {step}")
        if self._file is not None:
            await asyncio.to_thread(save_batch, self._file, step - 1, slices)
        if (file := self._config.debug.save_debug_train_data) is not None:
            await asyncio.to_thread(save_train_data, file, step - 1, batch.kept)
        await self.samples.trained(step, slices, batch.advantages, batch.log_probs)
