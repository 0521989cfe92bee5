"""How responses are graded and which groups are trained. Owner: `stages/reward/stage` and `stages/group/stage`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class RewardConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    rm_type: Annotated[
        str,
        Meta(
            description="grader where a row's metadata has no rm_type: auto, exact, exact_match, contains, gsm8k, "
            "gsm8k_flex, math[:DIALECT], math_strict, math_hendrycks, math_verify, deepscaler, dapo, f1, gpqa, ifeval, "
            "ifbench, code, remote[:URL], judge[:NAME], length:N, format:REGEX, random:P, constant:X, "
            "package.module:function; boxed_ before it: last box"
        ),
    ] = "auto"
    custom_rm_path: Annotated[str | None, Meta(description="import path of a grader, package.module:function")] = None
    reward_component: Annotated[
        tuple[str, ...],
        Meta(description="instead of one grader, several with weights: name=GRADER@WEIGHT; repeatable"),
    ] = ()
    reward_key: Annotated[
        str | None, Meta(description="which number of a grader's dict is trained on; default: its 'score'")
    ] = None
    group_rm: Annotated[
        bool, Meta(description="--custom-rm-path takes the responses of a whole group and returns a grade for each")
    ] = False
    custom_reward_post_process_path: Annotated[
        str | None, Meta(description="import path of what turns a group's rewards into its advantages itself")
    ] = None
    math_equivalence: Annotated[
        Literal["either", "compat", "verify"],
        Meta(
            description="who judges for the grader math: string rules (compat), math-verify (verify), or its own "
            "reading, then math-verify (either)"
        ),
    ] = "either"
    overlong_buffer_len: Annotated[
        float,
        Meta(
            ge=0,
            description="overlong shaping: the last so many tokens of the limit are penalised, or below 1 that part of "
            "the limit; 0 = off",
        ),
    ] = 0.0
    overlong_penalty_factor: Annotated[
        float, Meta(ge=0, description="overlong shaping: penalty at the limit, linear from 0 at the buffer's begin")
    ] = 1.0
    mask_truncated: Annotated[
        bool, Meta(description="truncated responses count in their group but are not trained")
    ] = False
    rm_url: Annotated[str | None, Meta(description="address of the reward model of rm_type 'remote'")] = None
    rm_concurrency: Annotated[int, Meta(ge=1, description="requests at one time to the reward model or the judge")] = 64
    rm_timeout_s: Annotated[float, Meta(gt=0, description="deadline of one request to the reward model or judge")] = (
        120.0
    )
    rm_retries: Annotated[int, Meta(ge=0, description="retries of such a request after a fault that may pass")] = 10
    judge_engine: Annotated[
        str | None, Meta(description="frozen engine that judges with rm_type 'judge', by its name in --frozen-engine")
    ] = None
    judge_prompt_path: Annotated[
        str | None, Meta(description="file with the judge's prompt; {prompt}, {response} and {label} are replaced")
    ] = None
    judge_max_tokens: Annotated[int, Meta(ge=1, description="most tokens of the judge's answer")] = 512
    reward_workers: Annotated[int, Meta(ge=0, description="grader processes per reward replica; 0 = in the stage")] = 1
    reward_deadline_s: Annotated[float, Meta(gt=0, description="seconds after which a grader is killed")] = 10.0
    reward_retries: Annotated[int, Meta(ge=0, description="retries after a grader crashed or hung")] = 1
    reward_on_error: Annotated[
        Literal["fail_sample", "zero"],
        Meta(description="what a failed grading (after its retries) does: fail the sample, or reward 0"),
    ] = "fail_sample"


class FilterConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    dynamic_sampling_filter: Annotated[
        tuple[str, ...],
        Meta(
            description="group filters, applied in order: nonzero_std, nonzero_std_fallback, pass_rate:LOW_HIGH, "
            "reward:LOW_HIGH, length:MIN_MAX, staleness:N, max_failed:SHARE, duplicate_prompt; the dropped are refilled"
        ),
    ] = ()
    dynamic_sampling_filter_path: Annotated[
        str | None, Meta(description="import path of one more group filter, package.module:function")
    ] = None
    rollout_sample_filter_path: Annotated[
        str | None,
        Meta(
            description="function that takes rollouts out of the loss, as slime calls it: (args, groups), sets "
            "remove_sample"
        ),
    ] = None
    over_sampling_batch_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="groups in flight towards one rollout batch while filters are on; default: --rollout-batch-size"
        ),
    ] = None
    max_filter_rounds: Annotated[
        int, Meta(ge=1, description="give up when this many batches were filtered without one being trained")
    ] = 50


class ToolsConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    tools: Annotated[tuple[str, ...], Meta(description="tools offered: calculator, or package.module:function")] = ()
    tool_call_open: Annotated[str, Meta(description="text that opens a tool call")] = "<tool_call>"
    tool_call_close: Annotated[str, Meta(description="text that closes a tool call; generation stops there")] = (
        "</tool_call>"
    )
    tool_result_template: Annotated[str, Meta(description="text put after a tool call; {result} is replaced")] = (
        "<tool_response>{result}</tool_response>"
    )
    tool_deadline_s: Annotated[float, Meta(gt=0, description="seconds after which a tool call is abandoned")] = 10.0
    tool_memory_gb: Annotated[
        float, Meta(ge=0, description="most memory of the process of a tool of yours, GiB; 0 = no limit")
    ] = 4.0
    tool_call_parser: Annotated[
        Literal[
            "hermes",
            "qwen",
            "qwen25",
            "qwen3_coder",
            "glm",
            "glm45",
            "glm47",
            "deepseekv3",
            "deepseekv31",
            "kimi_k2",
            "mistral",
            "gpt-oss",
            "llama3",
            "pythonic",
        ]
        | None,
        Meta(description="how environments read the model's tool calls; default: as its chat template writes them"),
    ] = None
