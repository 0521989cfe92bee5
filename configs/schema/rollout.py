"""How many rollouts, how they are sampled, and how far generation may run ahead of training.

Owners: `stages/generate`, `stages/staleness_gate`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from configs.schema.notation import Count, Factor, Natural, NonNegative, Positive, ReadBy, Section


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
    custom_generate_deadline_secs: Annotated[Positive, ReadBy("a function of yours that generates")] = 1800.0
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


class AsyncConfig(Section, frozen=True, kw_only=True):
    """Asynchrony: how far generation may run ahead."""

    async_buffer_size: Natural = 2
    """rollout batches that may be out beyond the one in training (N)"""
    update_weights_interval: Count = 1
    """publish weights every K rollout batches"""
    max_staleness: Natural | None = None
    """no token older than this many versions is trained; default: N + K - 1"""
    async_unused_samples_handler: Literal["requeue", "drop"] = "requeue"
    """prompt of a group that became too stale: requeue = submit it once more, drop = do not"""
    buffer_order: str = "oldest_first"
    """which finished group is trained next: oldest_first, ready_first, priority (strongest learning signal), or
    package.module:function"""
    colocate: bool = False
    """engine and trainer share their devices in turns (sync mode only)"""
