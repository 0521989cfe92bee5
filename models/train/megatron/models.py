"""`ModelSet` on Megatron-core: tensor, pipeline, virtual pipeline, expert, context and data parallelism.

Invariants:
- every process builds, loads and trains its own part, and takes part in every collective;
- the policy and the reference share one set of parameters in turn, the critic has its own;
- only the process that hands in its data-parallel rank's results adds to totals and hands out log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from models.algorithms.tokens import StepStatistics
from models.errors import TrainConfigInvalid
from models.import_path import pick
from models.train.dp_group import Float32Array
from models.train.huggingface.loading import pick_device
from models.train.megatron.checkpoint import Checkpoints
from models.train.megatron.forward import Pipeline, TokenScorer
from models.train.megatron.inputs import ModelInputs
from models.train.megatron.processes import build_dp_group, build_layout
from models.train.megatron.trained_models import (
    MegatronCritic,
    SwappedReference,
    TrainedChunks,
    check_optimizer,
    into_critic,
)
from models.train.megatron.weights import Source, export_hf, load_chunks, load_hf, read_source, rows_of
from models.train.model_set import Counters, ModelSet, Scored
from models.train.spec import TrainSpec
from models.train.step.critic import critic_train_config
from models.train.step.micro_batch_loss import PolicyNumerator, StepTotals
from models.train.step.micro_batches import MicroBatch
from models.train.step.packing import with_budget

SCHEDULE_TURNS: Final = 4  # micro-batches of a schedule, for each pipeline stage, at least


class MegatronModels(ModelSet):
    """`ModelSet` in one process of a trainer group. Constructing builds the layout and loads all models; collective."""

    reference_apart = True

    def __init__(self, spec: TrainSpec, *, async_save: bool = False) -> None:
        """Needs torch.distributed's default group.

        `async_save`: `save` returns as soon as the state is copied; `finish_save` waits for the disk.

        Raises `CheckpointUnavailable`, `UnsupportedModel`, `TrainConfigInvalid` or `BackendMisuse`.
        """
        check_optimizer(spec)
        self.spec = spec
        self.sizes = build_layout(spec)
        # A schedule of m micro-batches idles for PP - 1 of m + PP - 1 turns: under 20 % from 4 PP on.
        self.pass_micro_batches = SCHEDULE_TURNS * self.sizes.pipeline if self.sizes.pipeline > 1 else 1
        # slime's hooks: after the groups of processes are there, before a pass for log-probs, before a step.
        m = spec.megatron
        init = _hook(m.custom_megatron_init_path)
        self._before_log_prob = _hook(m.custom_megatron_before_log_prob_hook_path)
        self._before_step = _hook(m.custom_megatron_before_train_step_hook_path)
        if init is not None:
            init(spec.arguments)
        self.dp_group = build_dp_group(spec)
        self.device = pick_device(spec.train.train_device)
        source = read_source(spec.train.hf_checkpoint, "hf_checkpoint")
        self.hf_config = source.config
        chunks = load_chunks(source, spec, self.sizes, self.device)
        self._form, packing = rows_of(chunks[0], spec, self.sizes, self.device)
        self.reference = self._reference(source, chunks)
        self.vocab_size = vocabulary = int(chunks[0].architecture.vocab_size)
        self.policy = self.updater = TrainedChunks(chunks, spec.train, spec, spec.total_steps)
        self._pipeline = self._make_pipeline(self.policy)
        self._score: TokenScorer | None = None
        if (last := self._pipeline.last) is not None:
            temperature, at_once = spec.scoring_temperature, spec.train.logprob_chunk_tokens
            self._score = TokenScorer(last, vocab_size=vocabulary, temperature=temperature, chunk_tokens=at_once)
        self.critic = self._critic() if spec.uses_critic else None
        self.checkpoints = Checkpoints(
            self.policy, self.critic, self.reference, sizes=self.sizes, device=self.device, asynchronous=async_save
        )
        self._numerator = PolicyNumerator(spec)
        packing = with_budget(packing, spec.train, spec.parallel)
        # The budget is that of one process; context-parallel ones share a row.
        self.packing = replace(packing, max_tokens=packing.max_tokens * self.sizes.context)

    def _reference(self, source: Source, chunks: list[Any]) -> SwappedReference | None:
        """A copy on the host of what the reference starts with; the chunks hold the policy afterwards."""
        if not self.spec.uses_reference:
            return None
        name = self.spec.train.ref_load
        theirs = None if name is None or name == source.name else read_source(name, "ref_load")
        if theirs is not None:
            _check_same_shape(source, theirs)
            load_hf(chunks, theirs.config, theirs.directory)
        renewed = bool(self.spec.algorithm.ref_update_interval)
        reference = SwappedReference(chunks, lambda: self.policy.settle(), renewed=renewed)
        if theirs is not None:
            load_hf(chunks, source.config, source.directory)
        return reference

    def _critic(self) -> MegatronCritic:
        spec = self.spec
        load = spec.critic.critic_load
        source = read_source(load or spec.train.hf_checkpoint, "critic_load" if load else "hf_checkpoint")
        chunks = load_chunks(source, spec, self.sizes, self.device)
        self.vocab_size = min(self.vocab_size, int(chunks[0].architecture.vocab_size))
        into_critic(chunks, seed=spec.seed, device=self.device)
        trained = TrainedChunks(chunks, critic_train_config(spec.critic, spec.train), spec, None)
        pipeline, hands_in = self._make_pipeline(trained), self.dp_group.is_mp_src_rank
        return MegatronCritic(trained, pipeline, value_clip=spec.critic.value_clip, is_mp_src_rank=hands_in)

    def _make_pipeline(self, trained: TrainedChunks) -> Pipeline:
        interleaved = self.sizes.virtual_pipeline is not None
        return Pipeline(trained.wrapped, self._form, stages=self.sizes.pipeline, interleaved=interleaved)

    # ------------------------------------------------------------------ passes

    def log_probs(self, batches: Sequence[MicroBatch], model: Scored = "policy") -> list[Float32Array]:
        """Of the chosen tokens, one array [N] per micro-batch; nothing without `is_mp_src_rank`."""
        with nullcontext() if model == "policy" or self.reference is None else self.reference.in_place():
            if self._before_log_prob is not None:
                self._before_log_prob(self.spec.arguments, self.policy.wrapped, "" if model == "policy" else "ref_")
            return self._pipeline.score(batches, self._log_probs, keep=self.dp_group.is_mp_src_rank)

    def _log_probs(self, hidden: Tensor, inputs: ModelInputs) -> Tensor:
        assert self._score is not None
        log_probs, _ = self._score(hidden, inputs)
        return log_probs

    def backward(self, batches: Sequence[MicroBatch], statistics: StepStatistics, totals: StepTotals) -> None:
        """Add the gradient of the micro-batches' numerators; `is_mp_src_rank` also adds their sums to `totals`."""
        sums = totals if self.dp_group.is_mp_src_rank else StepTotals()
        if self._before_step is not None and not self.policy.begun:
            ids = divmod(self.policy.updates, self.spec.train.num_steps_per_rollout or 1)
            self._before_step(self.spec.arguments, *ids, self.policy.wrapped, self.policy.optimizer, None)
        self.policy.begun = True

        def numerator(number: int, hidden: Tensor, inputs: ModelInputs) -> Tensor:
            assert self._score is not None
            batch = batches[number]
            if batch.blank:
                return self._log_probs(hidden, inputs).sum() * 0.0
            log_probs, entropy = self._score(hidden, inputs, entropy=self._numerator.entropy(statistics))
            return self._numerator(batch.members, log_probs, entropy, statistics, sums)

        self._pipeline.train(batches, numerator)

    def settle(self) -> None:
        """Make the parameters of all models those of their last updates, before they are read. Collective."""
        self.policy.settle()
        if self.critic is not None:
            self.critic.trained.settle()

    def device_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of policy and critic; the reference is on the host anyway."""
        trained = [self.policy, *([self.critic.trained] if self.critic is not None else [])]
        kept, cleared = zip(*(one.device_tensors() for one in trained), strict=True)
        return [tensor for part in kept for tensor in part], [tensor for part in cleared for tensor in part]

    # ------------------------------------------------------------------ weights and files

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Current weights, gathered one after the other; with contents in the first process."""
        self.policy.settle()
        yield from export_hf(self.policy.chunks, self.hf_config)

    def save(self, directory: Path, counters: Counters) -> None:
        """Write the policy to `directory/hf` and all else beside it.

        Synchronised to disk, unless the models were made with `async_save`: then `finish_save` waits for that.
        """
        self.settle()
        self.checkpoints.save(directory, counters, self.export(), self.spec.train.hf_checkpoint)

    def finish_save(self) -> None:
        """Wait until what `save` wrote is on disk in all processes. Collective. Raises `OSError` if it is not."""
        self.checkpoints.finish()

    def load(self, directory: Path) -> Counters:
        """Restore what `save` wrote, and return its counters. Raises `TrainStateUnreadable`."""
        self.settle()
        return self.checkpoints.load(directory)


def _hook(path: str | None) -> Callable[..., Any] | None:
    return None if path is None else pick("hook", path, {})


def _check_same_shape(policy: Source, reference: Source) -> None:
    """Raise `TrainConfigInvalid` unless the reference fits into the policy's parameters."""
    ignored = {"_name_or_path", "torch_dtype", "dtype", "transformers_version", "eos_token_id", "bos_token_id",
               "pad_token_id", "use_cache"}  # fmt: skip
    keys = (set(policy.config) | set(reference.config)) - ignored
    differing = sorted(key for key in keys if policy.config.get(key) != reference.config.get(key))
    if differing:
        key = differing[0]
        raise TrainConfigInvalid(
            f"ref_load={reference.name!r} is another architecture than the policy: {key} is "
            f"{reference.config.get(key)!r}, not {policy.config.get(key)!r}; Megatron scores the reference in the "
            "policy's place, so give a checkpoint of the same architecture, or leave --ref-load out"
        )
