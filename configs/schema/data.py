"""Where prompts come from and how a row becomes a prompt. Owner: `stages/prompts/stage`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct


class DataConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt_data: Annotated[
        tuple[str, ...],
        Meta(description="prompt files: JSONL, Parquet or a Hugging Face dataset directory; slices as path@[a:b]"),
    ] = ()
    data_source_path: Annotated[
        str | None,
        Meta(
            description="class that gives the prompts, as slime calls it: get_samples(n), save(rollout_id), "
            "load(rollout_id), len; it may read --prompt-data by args.prompt_data"
        ),
    ] = None
    input_key: Annotated[str, Meta(description="row field with the prompt: text or a list of chat messages")] = "input"
    label_key: Annotated[str | None, Meta(description="row field with the reference answer")] = None
    metadata_key: Annotated[str, Meta(description="row field with a metadata object")] = "metadata"
    tool_key: Annotated[str, Meta(description="row field with the tools offered to the model")] = "tools"
    apply_chat_template: Annotated[
        bool,
        Meta(description="render chat messages (or wrap text as one user turn) with the tokenizer's chat template"),
    ] = False
    apply_chat_template_kwargs: Annotated[
        dict[str, Any], Meta(description="extra arguments of the chat template, as JSON")
    ] = {}
    chat_template_path: Annotated[str | None, Meta(description="file with a Jinja chat template to use instead")] = None
    rollout_shuffle: Annotated[bool, Meta(description="shuffle the prompts anew in each epoch, by seed")] = False
    rollout_seed: Annotated[int, Meta(description="seed of prompt order and sampling")] = 42
    rollout_max_prompt_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="longer prompts (tokens) are skipped at load and counted"),
    ] = None
    curriculum: Annotated[
        Literal["none", "pass_rate"],
        Meta(
            description="pass_rate: prompts whose share of correct rollouts left the range below are asked less often"
        ),
    ] = "none"
    curriculum_low: Annotated[float, Meta(ge=0, le=1, description="curriculum: lower bound of the pass rate")] = 0.1
    curriculum_high: Annotated[float, Meta(ge=0, le=1, description="curriculum: upper bound of the pass rate")] = 0.9
    curriculum_keep: Annotated[
        float,
        Meta(gt=0, le=1, description="curriculum: probability with which a prompt out of the range is asked again"),
    ] = 0.25
    strict_data: Annotated[bool, Meta(description="make a malformed row an error instead of skipping it")] = False
