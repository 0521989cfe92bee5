"""Where prompts come from, held-out evaluation, and the supervised warm start.

Owners: `stages/prompts`, `stages/evaluate`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from configs.schema.notation import Count, Factor, Natural, NonNegative, Positive, ReadBy, Section, Share


class DataConfig(Section, frozen=True, kw_only=True):
    """Data: where prompts come from."""

    prompt_data: tuple[str, ...] = ()
    """prompt files: JSONL, Parquet or a Hugging Face dataset directory; slices as path@[a:b]"""
    data_source_path: str | None = None
    """class that supplies the prompts, with slime's interface: get_samples(n), save(rollout_id), load(rollout_id),
    len; it may read --prompt-data as args.prompt_data"""
    input_key: str = "input"
    """row field with the prompt: text or a list of chat messages"""
    label_key: str | None = None
    """row field with the reference answer"""
    metadata_key: str = "metadata"
    """row field with a metadata object"""
    tool_key: str = "tools"
    """row field with the tools offered to the model"""
    apply_chat_template: bool = False
    """render chat messages (or wrap text as one user turn) with the tokenizer's chat template"""
    apply_chat_template_kwargs: dict[str, Any] = {}
    """extra arguments of the chat template, as JSON"""
    chat_template_path: str | None = None
    """file with a Jinja chat template to use instead"""
    rollout_shuffle: Annotated[bool, ReadBy("a run without --data-source-path")] = False
    """shuffle the prompts in each epoch, by seed"""
    rollout_seed: int = 42
    """seed of prompt order and sampling"""
    rollout_max_prompt_len: Count | None = None
    """longest prompt, tokens; longer prompts are skipped at load and counted"""
    curriculum: Annotated[Literal["none", "pass_rate"], ReadBy("a run without --data-source-path")] = "none"
    """pass_rate: prompts whose pass rate lies outside curriculum_low .. curriculum_high are drawn less often"""
    curriculum_low: Annotated[Share, ReadBy("--curriculum pass_rate")] = 0.1
    """curriculum: lower bound of the pass rate"""
    curriculum_high: Annotated[Share, ReadBy("--curriculum pass_rate")] = 0.9
    """curriculum: upper bound of the pass rate"""
    curriculum_keep: Annotated[Factor, ReadBy("--curriculum pass_rate")] = 0.25
    """curriculum: probability that a prompt outside the range is drawn when its turn comes"""
    strict_data: bool = False
    """make a malformed row an error instead of skipping it"""


class EvalConfig(Section, frozen=True, kw_only=True):
    """Evaluation."""

    eval_interval: Count | None = None
    """evaluate every this many versions; default: off"""
    eval_prompt_data: tuple[str, ...] = ()
    """held-out prompts: name=path[@[a:b]] or path[@[a:b]]; several allowed"""
    n_samples_per_eval_prompt: Annotated[Count, ReadBy("--eval-prompt-data")] = 1
    """rollouts per held-out prompt"""
    eval_temperature: Annotated[NonNegative, ReadBy("--eval-prompt-data")] = 0.0
    """sampling temperature of evaluation; 0 = greedy"""
    eval_max_response_len: Annotated[Count | None, ReadBy("--eval-prompt-data")] = None
    """most tokens of a response in an evaluation; default: --rollout-max-response-len"""
    eval_input_key: Annotated[str | None, ReadBy("--eval-prompt-data")] = None
    """row field with the prompt in held-out data; default: --input-key"""
    eval_label_key: Annotated[str | None, ReadBy("--eval-prompt-data")] = None
    """row field with the reference answer in held-out data; default: --label-key"""
    eval_deadline_s: Annotated[Positive, ReadBy("--eval-prompt-data")] = 300.0
    """give up on an evaluation after this many seconds"""
    skip_eval_before_train: Annotated[bool, ReadBy("--eval-prompt-data")] = False
    """no evaluation of the first weights"""


class WarmStartConfig(Section, frozen=True, kw_only=True):
    """Supervised warm start.

    Supervised training on prompt + label before the reinforcement learning, through the same pipeline.
    """

    warm_start_steps: Natural = 0
    """optimizer steps of supervised warm start; 0 = none"""
    warm_start_batch_size: Annotated[Count, ReadBy("--warm-start-steps above 0")] = 128
    """examples per step"""
    warm_start_target_loss: Annotated[Positive | None, ReadBy("--warm-start-steps above 0")] = None
    """end the warm start early, when the mean loss of its last 10 steps is below this"""
    warm_start_lr: Annotated[Positive, ReadBy("--warm-start-steps above 0")] = 1e-3
    """learning rate of the warm start"""
    warm_start_data: Annotated[tuple[str, ...], ReadBy("--warm-start-steps above 0")] = ()
    """examples of the warm start; default: --prompt-data"""
    warm_start_label_key: Annotated[str | None, ReadBy("--warm-start-steps above 0")] = None
    """row field with the text to learn; default: --label-key"""
