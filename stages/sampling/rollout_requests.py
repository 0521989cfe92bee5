"""From a rollout to its request of an engine, and from the engine's answer back to the rollout. No I/O, no clock.

Invariants:
- The seed of sample i is the same in a joint request and when it goes on alone. A rollout that is begun anew draws from
  a seed of its own. No request has a larger budget than the sample has left.
- Token ids, log-probs and versions are the engine's; arrays keep equal length; neighbouring runs of one version are one
  run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from configs.schema import Config
from models.engines.noise import GOLDEN, mix, sample_seed
from models.engines.protocol import SamplingParams
from stages.messages import NO_IDS, Extra, PromptGroup, Sample, Status
from stages.rollouts import new_sample, with_tokens
from stages.sampling.engine_choice import FIRST_COME
from stages.sampling.requests import Finish, SampleRequest, SampleResult, summed
from stages.staleness_gate import StalenessGate
from stages.topic_values import EVALUATION, POLICY, sampling

_SEED_BITS: Final = 0x7FFFFFFF


class Deadline(msgspec.Struct, frozen=True):
    """How long an engine may still work on a rollout, seconds, and which limit says so."""

    left_s: float
    of_group: bool


class Requests:
    """The requests of one configuration. `max_context`: most tokens of prompt and response."""

    def __init__(self, config: Config, max_context: int) -> None:
        self.config, self.rollout, self.max_context = config, config.rollout, max_context
        rules, gate = config.asynchrony, StalenessGate.of(config)
        masks = gate.masks or config.correction.mask_offpolicy_in_partial_rollout
        self._evaluation = EVALUATION if config.eval.apart else POLICY  # whose engines answer it
        self._cancels_stale = rules.cancel_stale_rollouts and rules.max_staleness is not None and not masks

    def cancels_stale(self, group: PromptGroup) -> bool:
        """Whether a group with a token that is too old is trained by no batch, and is not generated to its end.

        Not of programs that ask through a gateway: they would take it for a fault. So `of` leaves it to the caller.
        """
        return self._cancels_stale and group.purpose == "train"

    def budget(self, group: PromptGroup, sample: Sample, *, each_turn: bool = False) -> int:
        """Tokens that the sample may still get; below 0 if it has too many.

        `each_turn`: the response length bounds each request, as for functions written for slime, and the context all.
        """
        longest = self.rollout.rollout_max_response_len
        if group.purpose == "eval":
            longest = self.config.eval.of(group.dataset).eval_max_response_len or longest
        if each_turn:
            return min(longest, self.max_context - sample.length)
        return min(longest, self.max_context - sample.prompt_length) - sample.response_length

    def params(self, group: PromptGroup, sample: Sample, budget: int, n: int) -> SamplingParams:
        """Sampling parameters of a request for `n` samples, of which `sample` is the first."""
        evaluating, evaluation = group.purpose == "eval", self.config.eval.of(group.dataset)
        drawn = sampling(group, self.rollout)
        again = 2 * sample.sequence + sample.replaced  # sequences of a rollout that share tokens must not go on alike
        seed = group.seed & _SEED_BITS
        seed = mix(seed + again * GOLDEN) & _SEED_BITS if again else seed
        stop, stop_tokens = list(self.rollout.rollout_stop), list(self.rollout.rollout_stop_token_ids)
        if evaluating:
            stop, stop_tokens = [*stop, *evaluation.eval_stop], [*stop_tokens, *evaluation.eval_stop_token_ids]
        if self.config.tools.tools:
            stop.append(self.config.tools.tool_call_close)
        return SamplingParams(
            temperature=evaluation.eval_temperature if evaluating else drawn.temperature,
            top_p=evaluation.eval_top_p if evaluating else drawn.top_p,
            top_k=evaluation.eval_top_k if evaluating else self.rollout.rollout_top_k,
            max_new_tokens=budget,
            stop=stop or None,
            stop_token_ids=stop_tokens or None,
            skip_special_tokens=self.rollout.rollout_skip_special_tokens,
            no_stop_trim=True,
            n=n,
            # sample i of a joint request draws from sample_seed(seed, i), and so it does when it continues alone
            sampling_seed=sample_seed(seed, sample.index if n == 1 else 0),
        )

    def of(
        self, group: PromptGroup, samples: Sequence[Sample], budget: int, deadline: Deadline | None
    ) -> SampleRequest:
        """One request for samples that share their tokens so far."""
        first = samples[0]
        return SampleRequest(
            self.params(group, first, budget, len(samples)),
            token_ids=first.token_ids.tolist(),
            prompt_length=first.prompt_length,
            policy=self._evaluation if group.purpose == "eval" else POLICY,
            session=group.key,
            group=group.group_id,
            returning=first.response_length > 0 or first.replaced > 0,
            order=self.order(group, first),
            pinned_version=group.pinned_version,
            engine_s=None if deadline is None else deadline.left_s,
        )

    def order(self, group: PromptGroup, sample: Sample) -> tuple[int, int]:
        """Among requests that wait for an engine: the oldest group first, for the trainer waits for its slowest member;
        in a group, the rollout with the most turns behind it. What an evaluation asks keeps the order in which it came.
        """
        if self.rollout.rollout_priority == "fifo" or group.purpose == "eval":
            return FIRST_COME
        return group.group_id, -sample.turns

    def deadline(self, group: PromptGroup, sample: Sample) -> Deadline | None:
        """The limit that ends first; a rollout's clock runs while an engine works on it."""
        limits = [Deadline(limit - sample.generate_s, False) for limit in [self.rollout.sample_deadline_secs] if limit]
        if self.rollout.group_deadline_secs is not None and group.purpose == "train":
            limits.append(Deadline(self.rollout.group_deadline_secs - sample.generate_s, True))
        return min(limits, key=lambda limit: limit.left_s, default=None)

    def stopped(self, sample: Sample, deadline: Deadline) -> Sample:
        """What becomes of a rollout whose time is over: begun anew once, else kept as truncated.

        One that has been through a loop stage after a turn is never begun anew: what the stage did would be done twice.
        """
        if deadline.of_group and sample.replaced == 0 and sample.turns == 0 and sample.sequences == 1:
            fresh = new_sample(sample.token_ids[: sample.prompt_length], sample.index)
            kept = {"reused_tokens": sample.reused_tokens, "loop_state": sample.loop_state}
            return msgspec.structs.replace(fresh, replaced=1, **kept)
        return msgspec.structs.replace(sample, status="truncated")


COUNTS: Final = ("cached_tokens", "retractions", "resumed", "reused_tokens", "spec_proposed", "spec_accepted")
EXPERTS: Final = "routed_experts"  # among the extras, if the request wanted them
STATUS_OF: Final[dict[Finish, Status]] = {
    "stop": "completed",
    "length": "truncated",
    "aborted": "aborted",
    "failed": "failed",
}


def append_result(sample: Sample, result: SampleResult) -> Sample:
    """The sample with what engines made of it in one turn. Status: stop -> completed, length -> truncated."""
    ids, error = result.token_ids, result.error
    counts = {name: getattr(sample, name) + getattr(result, name) for name in COUNTS}
    return msgspec.structs.replace(
        with_tokens(sample, result.text, ids, np.ones(len(ids)), result.log_probs, result.runs),
        status=STATUS_OF[result.finish],
        error=None if error is None else f"{type(error).__name__}: {error}",
        generate_s=sample.generate_s + result.spent_s,
        **counts,
        extras=_with_experts(sample.extras, result.routed_experts),
        metrics=summed(sample.metrics, result.figures),
    )


def _with_experts(extras: dict[str, Extra], experts: bytes) -> dict[str, Extra]:
    """The choices of experts, int32 of tokens x layers x top-k, in which each token of the context stands once.

    A turn's experts begin with the first token of its context; the choices of earlier turns made the tokens.
    """
    if not experts:
        return extras
    known, reported = extras.get(EXPERTS, NO_IDS), np.frombuffer(experts, dtype="<i4")
    return {**extras, EXPERTS: np.concatenate([known, reported[len(known) :]]).view(Extra)}
