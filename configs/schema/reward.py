"""How responses are graded and which groups are trained. Owner: `stages/reward` and `stages/group`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class RewardConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    rm_type: Annotated[
        str,
        Meta(description="grader: auto, exact, gsm8k, gsm8k_flex, contains, length:N, random, constant:X, ..."),
    ] = "auto"
    custom_rm_path: Annotated[str | None, Meta(description="import path of a grader, package.module:function")] = None
    reward_workers: Annotated[int, Meta(ge=0, description="grader processes per reward replica; 0 = in the stage")] = 1
    reward_deadline_s: Annotated[float, Meta(gt=0, description="seconds after which a grader is killed")] = 10.0
    reward_retries: Annotated[int, Meta(ge=0, description="retries after a grader crashed or hung")] = 1


class FilterConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    dynamic_sampling_filter: Annotated[
        Literal["nonzero_std", "none"] | None,
        Meta(description="group filter: nonzero_std drops groups in which all rewards are equal, and refills them"),
    ] = None
    dynamic_sampling_filter_path: Annotated[
        str | None, Meta(description="import path of a group filter, package.module:function")
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
