"""How many rollouts, and how they are sampled. Owner: `stages/generate/stage`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class RolloutConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    num_rollout: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="rollout batches to train on (0 = evaluate only)"),
    ] = None
    num_epoch: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="instead of --num-rollout: passes over the prompts"),
    ] = None
    rollout_batch_size: Annotated[int, Meta(ge=1, description="prompt groups per rollout batch (B)")] = 32
    n_samples_per_prompt: Annotated[int, Meta(ge=1, description="rollouts per prompt (the group size)")] = 8
    rollout_temperature: Annotated[
        float, Meta(gt=0, description="sampling temperature; also divides the trainer's logits")
    ] = 1.0
    rollout_top_p: Annotated[float, Meta(gt=0, le=1, description="nucleus sampling; 1 = off")] = 1.0
    rollout_top_k: Annotated[int, Meta(ge=-1, description="top-k sampling; -1 = off")] = -1
    rollout_max_response_len: Annotated[
        int, Meta(ge=1, description="most tokens of one response, tool tokens included")
    ] = 512
    rollout_max_context_len: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(description="most tokens of prompt + response; default: the model's own limit"),
    ] = None
    rollout_stop: Annotated[
        tuple[str, ...], Meta(description="stop strings; the matched text stays in the sample")
    ] = ()
    rollout_stop_token_ids: Annotated[
        tuple[int, ...], Meta(description="stop token ids beside the tokenizer's EOS")
    ] = ()
    rollout_skip_special_tokens: Annotated[bool, Meta(description="drop special tokens from the decoded text")] = True
    max_turns: Annotated[
        int, Meta(ge=1, description="most generation turns of one rollout: with a loop stage, a function or an agent")
    ] = 8
    rollout_priority: Annotated[
        Literal["oldest_group", "fifo"],
        Meta(
            description="who goes first of the turns that wait for an engine: those of the oldest group, whose members "
            "the trainer waits for, or those that came first"
        ),
    ] = "oldest_group"
    custom_generate_function_path: Annotated[
        str | None,
        Meta(
            description="function that makes a rollout, as slime calls it: async (args, sample, sampling_params) -> "
            "sample or list of samples; a row may name its own in metadata.generate_function_path"
        ),
    ] = None
    rollout_function_path: Annotated[
        str | None,
        Meta(
            description="function that makes whole batches, as slime calls it: (args, rollout_id, data_source, "
            "evaluation=False) -> groups of samples"
        ),
    ] = None
    custom_generate_deadline_secs: Annotated[
        float,
        Meta(gt=0, description="seconds after which a call of such a function is ended, and its rollouts failed"),
    ] = 1800.0
    server_concurrency: Annotated[int, Meta(ge=1, description="most samples in flight per engine")] = 512
    request_timeout_secs: Annotated[float, Meta(gt=0, description="deadline of one engine request, seconds")] = 600.0
    min_tokens_per_sec: Annotated[
        float,
        Meta(
            ge=0,
            description="of an answer; one that has brought fewer when its deadline passes is lost, and counts as a "
            "retry (0: one token is enough to be asked again for the rest)",
        ),
    ] = 0.1
    sample_deadline_secs: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="seconds of generation after which a rollout is stopped and kept as truncated; default: none"),
    ] = None
    group_deadline_secs: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="seconds after which the unfinished rollouts of a group are stopped and each is generated anew "
            "once; favours short responses, and is counted; default: none"
        ),
    ] = None
    adaptive_concurrency: Annotated[
        bool,
        Meta(description="lower the samples in flight per engine when its KV cache is full or requests are retracted"),
    ] = True
    max_retries: Annotated[int, Meta(ge=0, description="retries of an engine request after a transport error")] = 3
    partial_rollout: Annotated[
        bool, Meta(description="continue an aborted response from its partial output instead of starting it again")
    ] = True
