"""The task: where prompts come from, evaluation and warm start, rewards, tools and environments.

Owners: `stages/prompts`, `stages/evaluate`, `stages/reward`, `stages/group`, `stages/tools`, `stages/agents`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from configs.schema.notation import Count, Factor, Natural, NonNegative, Positive, ReadBy, Section, Share


class DataConfig(Section, frozen=True, kw_only=True):
    """Data: where prompts come from."""

    prompt_data: tuple[str, ...] = ()
    """prompt files: JSONL, Parquet or a Hugging Face dataset directory; slices as path@[a:b]"""
    prompt_data_weights: Annotated[tuple[Positive, ...], ReadBy("a run without --data-source-path")] = ()
    """share of each entry of --prompt-data among the prompts, as numbers above 0 in their order; default: one after the
    other"""
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
    trust_data_code: bool = False
    """rows may name functions and addresses that no setting names (rm_type, custom_rm_path and generate_function_path
    in their metadata): whoever wrote the data can then run code here"""
    max_bad_rows: Natural | None = None
    """most malformed rows of a data set that are skipped, one more is an error; --strict-data is 0; default: any
    number"""


class EvalSet(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one held-out data set; None: as in `EvalConfig`."""

    n_samples: Count | None = None
    temperature: NonNegative | None = None
    top_p: Factor | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    max_response_len: Count | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    input_key: str | None = None
    label_key: str | None = None
    metadata_key: str | None = None
    tool_key: str | None = None
    apply_chat_template: bool | None = None
    chat_template_path: str | None = None
    rm_type: str | None = None


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
    eval_top_p: Annotated[Factor, ReadBy("--eval-prompt-data")] = 1.0
    """nucleus of evaluation: the most probable tokens whose probabilities reach this sum"""
    eval_top_k: Annotated[int, Meta(ge=-1), ReadBy("--eval-prompt-data")] = -1
    """the K most probable tokens in evaluation; -1 = all"""
    eval_max_response_len: Annotated[Count | None, ReadBy("--eval-prompt-data")] = None
    """most tokens of a response in an evaluation; default: --rollout-max-response-len"""
    eval_stop: Annotated[tuple[str, ...], ReadBy("--eval-prompt-data")] = ()
    """texts that end a response in an evaluation, beside --rollout-stop"""
    eval_stop_token_ids: Annotated[tuple[int, ...], ReadBy("--eval-prompt-data")] = ()
    """tokens that end a response in an evaluation, beside --rollout-stop-token-ids"""
    eval_input_key: Annotated[str | None, ReadBy("--eval-prompt-data")] = None
    """row field with the prompt in held-out data; default: --input-key"""
    eval_label_key: Annotated[str | None, ReadBy("--eval-prompt-data")] = None
    """row field with the reference answer in held-out data; default: --label-key"""
    eval_sets: Annotated[dict[str, Any], ReadBy("--eval-prompt-data")] = {}
    """settings of single held-out sets: name -> n_samples, temperature, top_p, top_k, max_response_len, stop,
    stop_token_ids, input_key, label_key, metadata_key, tool_key, apply_chat_template, chat_template_path, rm_type; in a
    recipe [eval.eval_sets.NAME]"""
    eval_max_in_flight: Annotated[Count | None, ReadBy("--eval-prompt-data")] = None
    """most rollouts of an evaluation under way at a time, so that training keeps its engines; default: all"""
    eval_function_path: Annotated[str | None, ReadBy("--eval-prompt-data")] = None
    """function that evaluates on its own, with slime's interface: (args, rollout_id, data_source, evaluation=True) ->
    rewards by data set"""
    eval_engines: Annotated[Natural, ReadBy("--eval-prompt-data")] = 0
    """engines that the run starts for evaluations alone; 0 = evaluations share the engines of the rollouts"""
    eval_external_engine_addrs: Annotated[tuple[str, ...], ReadBy("--eval-prompt-data")] = ()
    """engines that run already and serve evaluations alone, as http://host:port"""
    eval_deadline_s: Annotated[Positive, ReadBy("--eval-prompt-data")] = 300.0
    """give up on an evaluation after this many seconds"""
    skip_eval_before_train: Annotated[bool, ReadBy("--eval-prompt-data")] = False
    """no evaluation of the first weights"""

    @property
    def apart(self) -> bool:
        """Whether evaluations have engines of their own."""
        return bool(self.eval_engines or self.eval_external_engine_addrs)

    @property
    def data_sets(self) -> tuple[tuple[str, str], ...]:
        """(Name, path) of each held-out set; without a name the file's stem is the name."""
        named = [(entry, *entry.partition("=")) for entry in self.eval_prompt_data]
        return tuple(
            (name, path) if equals and "/" not in name else (Path(entry.split("@", 1)[0]).stem, entry)
            for entry, name, equals, path in named
        )

    def own(self, name: str) -> EvalSet:
        """The settings of one held-out set alone. Raises ValidationError."""
        return msgspec.convert(self.eval_sets.get(name, {}), EvalSet)

    def of(self, name: str) -> EvalConfig:
        """What holds for one held-out set: its own settings over these. Raises ValidationError."""
        own = msgspec.structs.asdict(self.own(name))
        names = {key: f"eval_{key}" for key in own} | {"n_samples": "n_samples_per_eval_prompt"}
        fields = set(self.__struct_fields__)
        given = {names[key]: value for key, value in own.items() if value is not None and names[key] in fields}
        return msgspec.structs.replace(self, **given)


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


PACKS = "stages.agents.packs"
ToolCallParser = Literal[
    "hermes", "qwen", "qwen25", "qwen3_coder", "glm", "glm45", "glm47", "deepseekv3", "deepseekv31",
    "kimi_k2", "mistral", "gpt-oss", "llama3", "pythonic",
]  # fmt: skip


class RewardConfig(Section, frozen=True, kw_only=True):
    """Reward."""

    rm_type: str = "auto"
    """grader where a row's metadata has no rm_type: auto, exact, exact_match, contains, gsm8k, gsm8k_flex,
    math[:DIALECT], math_strict, math_hendrycks, math_verify, deepscaler, dapo, f1, gpqa, ifeval, ifbench, code,
    remote[:URL], judge[:NAME], length:N, format:REGEX, random:P, constant:X, package.module:function; boxed_ before it:
    last box"""
    custom_rm_path: str | None = None
    """import path of a grader, package.module:function"""
    reward_component: tuple[str, ...] = ()
    """instead of one grader, several with weights: name=GRADER@WEIGHT; repeatable"""
    reward_key: str | None = None
    """which number of a grader's dict is trained on; default: its 'score'"""
    group_rm: bool = False
    """--custom-rm-path takes the responses of a whole group and returns a grade for each"""
    custom_reward_post_process_path: str | None = None
    """import path of a function that turns a group's rewards into its advantages"""
    custom_convert_samples_to_train_data_path: str | None = None
    """function that chooses what of a group is trained, with slime's interface: (args, samples) -> dict of lists"""
    math_equivalence: Annotated[Literal["either", "compat", "verify"], ReadBy("the grader math")] = "either"
    """how the grader math compares: string rules (compat), math-verify (verify), or its own reading, then
    math-verify (either)"""
    overlong_buffer_len: NonNegative = 0.0
    """overlong shaping: number of tokens before the limit that are penalised, or below 1 their share of the limit;
    0 = off"""
    overlong_penalty_factor: Annotated[NonNegative, ReadBy("--overlong-buffer-len above 0")] = 1.0
    """overlong shaping: penalty at the limit, linear from 0 at the start of the buffer"""
    mask_truncated: bool = False
    """truncated responses count in their group but are not trained"""
    rm_url: str | None = None
    """address of the reward model of rm_type 'remote'"""
    rm_concurrency: Annotated[Count, ReadBy("a remote grader or a judge")] = 64
    """concurrent requests to the reward model or the judge"""
    rm_timeout_s: Annotated[Positive, ReadBy("a remote grader or a judge")] = 120.0
    """deadline of one request to the reward model or judge"""
    rm_retries: Annotated[Natural, ReadBy("a remote grader or a judge")] = 10
    """retries of such a request after a transient fault"""
    judge_engine: str | None = None
    """frozen engine that judges with rm_type 'judge', by its name in --frozen-engine"""
    judge_prompt_path: Annotated[str | None, ReadBy("a judge")] = None
    """file with the judge's prompt; {prompt}, {response} and {label} are replaced"""
    judge_max_tokens: Annotated[Count, ReadBy("a judge")] = 512
    """most tokens of the judge's answer"""
    reward_workers: Natural = 1
    """grader processes per reward replica; 0 = in the stage"""
    reward_deadline_s: Positive = 10.0
    """seconds after which a grader is killed"""
    reward_retries: Natural = 1
    """retries after a grader crashed or hung"""
    reward_on_error: Literal["fail_sample", "zero"] = "fail_sample"
    """what a failed grading (after its retries) does: fail the sample, or reward 0"""


class FilterConfig(Section, frozen=True, kw_only=True):
    """Filter of groups."""

    dynamic_sampling_filter: tuple[str, ...] = ()
    """group filters, applied in order: nonzero_std, nonzero_std_fallback, pass_rate:LOW_HIGH, reward:LOW_HIGH,
    length:MIN_MAX, staleness:N, max_failed:SHARE, duplicate_prompt; the dropped are refilled"""
    dynamic_sampling_filter_path: str | None = None
    """import path of one more group filter, package.module:function"""
    rollout_sample_filter_path: str | None = None
    """function that removes rollouts from the loss, with slime's interface: (args, groups), sets remove_sample"""
    rollout_all_samples_process_path: str | None = None
    """function that sees complete groups, filtered ones too, with slime's interface: (args, groups, data_source)"""
    over_sampling_batch_size: Annotated[
        Count | None, ReadBy("--dynamic-sampling-filter or --dynamic-sampling-filter-path")
    ] = None
    """groups in flight towards one rollout batch while filters are on; default: --rollout-batch-size"""
    dynamic_sampling_early_after: Annotated[
        Count | None, ReadBy("--dynamic-sampling-filter or --dynamic-sampling-filter-path")
    ] = None
    """judge a group already when this many of its rollouts have ended: if the filters drop these, the others are not
    generated to their end; default: only whole groups"""
    max_filter_rounds: Count = 50
    """give up when this many batches were filtered without one being trained"""


class ToolsConfig(Section, frozen=True, kw_only=True):
    """Tools."""

    tools: tuple[str, ...] = ()
    """tools offered: calculator, or package.module:function"""
    tool_call_open: Annotated[str, ReadBy("--tools or an [[environment]]")] = "<tool_call>"
    """text that opens a tool call"""
    tool_call_close: Annotated[str, ReadBy("--tools or an [[environment]]")] = "</tool_call>"
    """text that closes a tool call; generation stops there"""
    tool_result_template: Annotated[str, ReadBy("--tools")] = "<tool_response>{result}</tool_response>"
    """text put after a tool call; {result} is replaced"""
    tool_deadline_s: Annotated[Positive, ReadBy("--tools")] = 10.0
    """seconds after which a tool call is abandoned"""
    tool_memory_gb: Annotated[NonNegative, ReadBy("--tools")] = 4.0
    """most memory of the process of a custom tool, GiB; 0 = no limit"""
    tool_call_parser: Annotated[ToolCallParser | None, ReadBy("an [[environment]]")] = None
    """how environments read the model's tool calls; default: as its chat template writes them"""


class EnvironmentConfig(Section, frozen=True, kw_only=True):
    """Environments.

    One environment. A row of the data chooses one by its metadata's `environment`; else it gets the first.
    """

    name: str
    path: str = ""
    """import path of the class; default: the built-in pack of this name"""
    options: dict[str, Any] = {}
    """keyword arguments of the class"""
    workers: Count = 1
    """worker processes per replica of the agents stage"""
    python: str | None = None
    """Python interpreter of the workers, for packages of their own; default: the run's"""
    step_deadline_s: Positive = 60.0
    """seconds for one reset or step"""
    concurrency: Natural = 0
    """resets, steps and agents at a time per replica of the agents stage; 0 = no limit"""
    tool_concurrency: dict[str, Count] = {}
    """turns at a time that call the tool of this name, per replica of the agents stage"""
    episode_deadline_s: Positive = 1800.0
    """seconds that an episode may spend in its environment, from its start; then its rollout fails. For an agent
    they bound the whole run, which is then graded as it is"""
    ignore_reasoning: bool = False
    """continue an agent's conversation although its client leaves reasoning out of earlier turns"""
    memory_gb: NonNegative = 4.0
    """most memory of one worker process, GiB; 0 = no limit"""
    retries: Natural = 3
    """fresh starts of an episode after infrastructure failed"""
    outage_s: NonNegative = 1800.0
    """seconds of an outage after which rollouts fail instead of waiting"""

    @property
    def class_path(self) -> str:
        """Import path of the class. A pack's class is its module's name in capitals: guess_number, GuessNumber."""
        pack = "".join(word.capitalize() for word in self.name.split("_"))
        return self.path or f"{PACKS}.{self.name}:{pack}"
