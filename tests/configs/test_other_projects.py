"""Configurations of verl, TRL and prime-rl: each key has an answer, batches are counted, and the command is taken.

The inputs have the keys of configurations that these projects publish (named beside each), with values of our own.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import launch
from configs.command_line import read as read_flags
from configs.flags import flags
from configs.layers import ConfigError
from configs.migrate.convert import main as convert
from configs.migrate.other_projects import flat, projects
from configs.migrate.other_rules import RULES
from configs.translate import grouped
from tests.configs.config_rig import faults_of

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"

# run_qwen2-7b_math.sh and run_qwen2_5-3b_gsm8k_grpo_lora.sh of examples/grpo_trainer
VERL_MATH = r"""
train=/data/math/train.parquet
both="['/data/gsm8k/train.parquet', '$train']"
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo data.train_files="$both" data.val_files=/data/gsm8k/test.parquet \
    data.train_batch_size=64 data.max_prompt_length=100 data.max_response_length=200 \
    data.filter_overlong_prompts=True data.truncation='error' data.prompt_key=messages data.shuffle=False \
    actor_rollout_ref.model.path=tiny actor_rollout_ref.model.use_shm=True \
    actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora_alpha=16 \
    actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.layered_summon=True \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False \
    trainer.critic_warmup=0 trainer.logger=['console','wandb'] trainer.project_name='mine' \
    trainer.experiment_name='first' trainer.n_gpus_per_node=4 trainer.nnodes=1 trainer.save_freq=20 \
    trainer.test_freq=5 trainer.total_epochs=3 $@
"""

# examples/ppo_trainer/run_qwen2-7b_seq_balance.sh and grpo_trainer/run_qwen2-7b_seq_balance.sh
VERL_PPO = r"""
mode="async"
if [ "$mode" = "async" ]; then raw=True; fi
python3 -m verl.trainer.main_ppo \
    data.train_files=$HOME/train.parquet data.val_files=$HOME/test.parquet data.return_raw_chat=$raw \
    data.train_batch_size=512 data.val_batch_size=13 data.max_prompt_length=64 data.max_response_length=64 \
    actor_rollout_ref.model.path=tiny actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000 \
    actor_rollout_ref.actor.fsdp_config.grad_offload=False actor_rollout_ref.rollout.mode=$mode \
    actor_rollout_ref.rollout.multi_turn.format=hermes actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.log_prob_micro_batch_size=256 actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    critic.optim.lr=2e-5 critic.model.use_remove_padding=True critic.model.path=/models/critic \
    critic.model.enable_gradient_checkpointing=True critic.ppo_micro_batch_size=256 \
    critic.model.fsdp_config.param_offload=False algorithm.kl_ctrl.kl_coef=0.003 algorithm.use_kl_in_reward=True \
    trainer.logger=['console'] trainer.project_name=mine trainer.n_gpus_per_node=2 +trainer.val_before_train=False \
    trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=2
"""

# recipe/dapo/run_dapo_qwen2.5_32b.sh
VERL_DAPO = r"""
prompts=96
long=$((256 * 4))
ray job submit --no-wait -- python3 -m recipe.dapo.src.main_dapo \
    data.train_files="/data/dapo.parquet" data.val_files="/data/aime.parquet" data.prompt_key=prompt \
    data.truncation='left' data.max_prompt_length=128 data.max_response_length=${long} \
    data.gen_batch_size=$((prompts * 3)) data.train_batch_size=${prompts} actor_rollout_ref.rollout.n=8 \
    algorithm.adv_estimator=grpo algorithm.kl_ctrl.kl_coef=0.0 actor_rollout_ref.actor.kl_loss_coef=0.0 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 \
    algorithm.filter_groups.metric=acc actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2000 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=2000 actor_rollout_ref.model.path="tiny" \
    +actor_rollout_ref.model.override_config.attention_dropout=0. \
    +actor_rollout_ref.model.override_config.embd_pdrop=0. actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.actor.grad_clip=1.0 \
    actor_rollout_ref.actor.use_token_level_loss=True actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.rollout.enable_chunked_prefill=True actor_rollout_ref.rollout.max_num_batched_tokens=2000 \
    actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k="-1" \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.7 actor_rollout_ref.rollout.val_kwargs.top_p=0.9 \
    actor_rollout_ref.rollout.val_kwargs.top_k=-1 actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.n=1 actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 \
    reward_model.reward_manager=dapo custom_reward_function.overlong_buffer.enable=True \
    custom_reward_function.overlong_buffer.len=100 custom_reward_function.overlong_buffer.penalty_factor=0.5 \
    trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.test_freq=5 trainer.save_freq=5 trainer.total_epochs=1 \
    trainer.default_local_dir="/runs/dapo" trainer.resume_mode=auto
"""

# recipes/Qwen2.5-1.5B-Instruct, Qwen2.5-Math-7B and DeepSeek-R1-Distill-Qwen-1.5B of open-r1, which TRL's trainer reads
TRL_DEMO = """
model_name_or_path: tiny
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: someone/questions
dataset_configs: [all]
num_processes: 2
bf16: true
use_vllm: true
vllm_device: auto
vllm_gpu_memory_utilization: 0.7
do_eval: true
eval_strategy: steps
eval_steps: 100
gradient_accumulation_steps: 8
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
hub_model_id: mine
hub_strategy: every_save
learning_rate: 2e-5
log_completions: true
log_level: info
logging_first_step: true
logging_steps: 1
logging_strategy: steps
lr_scheduler_type: cosine
max_prompt_length: 128
max_completion_length: 256
max_steps: -1
num_generations: 4
num_train_epochs: 1
output_dir: runs/mine
overwrite_output_dir: true
per_device_eval_batch_size: 4
per_device_train_batch_size: 4
push_to_hub: true
report_to: [wandb]
save_strategy: epoch
save_total_limit: 1
seed: 7
warmup_ratio: 0.1
"""
TRL_SIMPLE = """
dataset_name: someone/questions
dataset_config: default
system_prompt: Think first.
model_name_or_path: tiny
wandb_project: mine
learning_rate: 1.5e-6
reward_weights: [1.0, 0.5]
reward_funcs: [accuracy, format]
use_vllm: true
vllm_mode: colocate
gradient_accumulation_steps: 4
steps_per_generation: 8
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
chat_template: "{{ messages }}"
num_generations: 4
max_steps: 100
per_device_train_batch_size: 2
report_to: none
save_strategy: steps
save_steps: 20
beta: 0.01
"""
# docs of TRL's command line, and fields of GRPOConfig
TRL_SMALL = """
model_name_or_path: tiny
dataset_name: someone/questions
reward_funcs: [accuracy_reward]
loss_type: dr_grpo
scale_rewards: false
use_peft: true
lora_r: 8
epsilon_high: 0.28
num_iterations: 1
temperature: 0.9
mask_truncated_completions: true
num_processes: 1
"""

# configs/basic of prime-rl: reverse-text, wiki-search, hendrycks-sanity; and an earlier one, alphabet_sort
PRIME_TEXT = """
max_steps = 20
seq_len = 512
[deployment]
num_train_gpus = 1
num_infer_gpus = 2
[model]
name = "tiny"
[wandb]
project = "mine"
name = "text"
[orchestrator]
batch_size = 64
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 128
[[orchestrator.train.env]]
name = "text"
taskset = { id = "reverse-text" }
harness = { id = "null" }
[trainer.optim]
lr = 3e-6
[ckpt]
[inference]
[orchestrator.renderer]
name = "default"
"""
PRIME_SEARCH = """
max_steps = 10
seq_len = 1024
[deployment]
num_train_gpus = 1
num_infer_gpus = 1
[model]
name = "tiny"
[trainer.optim]
lr = 1e-5
weight_decay = 0.0
[trainer.model.lora]
rank = 8
dropout = 0.0
target_modules = ["q_proj", "v_proj"]
[trainer.model.ac]
freq = 1
[orchestrator]
batch_size = 64
group_size = 8
oversampling_factor = 2
max_off_policy_steps = 4
[orchestrator.train.sampling]
max_completion_tokens = 200
temperature = 0.8
[[orchestrator.train.env]]
name = "search"
env.taskset = { id = "wiki-search" }
[orchestrator.eval]
interval = 25
[[orchestrator.eval.env]]
name = "search"
env.taskset = { id = "wiki-search" }
[ckpt]
interval = 100
[weight_broadcast]
type = "filesystem"
[inference.model]
tool_call_parser = "hermes"
[inference.parallel]
tp = 1
[log]
level = "debug"
"""
PRIME_MATH = """
max_steps = 50
[deployment]
num_train_gpus = 1
num_infer_gpus = 1
[model]
name = "tiny"
[orchestrator]
batch_size = 128
group_size = 8
seq_len = 800
[[orchestrator.train.env]]
name = "math"
taskset = { id = "math-env", dataset_subset = "default" }
harness = { id = "null", runtime = { type = "subprocess" } }
[trainer.model]
seq_len = 1600
[inference.model]
max_model_len = 800
[orchestrator.renderer]
name = "default"
reasoning_parser = "think"
"""
PRIME_EARLIER = """
max_steps = 10
async_level = 1
inference_gpu_ids = [0, 1, 2]
trainer_gpu_ids = [3]
[model]
name = "tiny"
[trainer.model]
impl = "liger_kernel"
[trainer.model.experimental.lora]
rank = 16
alpha = 64
[trainer.weight_broadcast]
adapter_only = true
[orchestrator]
batch_size = 512
rollouts_per_example = 8
seq_len = 2048
lora_name = "r16"
[orchestrator.sampling]
max_tokens = 768
[[orchestrator.env]]
id = "someone/alphabet-sort"
args = { min_turns = 3 }
[inference]
enable_lora = true
"""
ALL = {
    "verl-math.sh": VERL_MATH, "verl-ppo.sh": VERL_PPO, "verl-dapo.sh": VERL_DAPO,
    "trl-demo.yaml": TRL_DEMO, "trl-simple.yaml": TRL_SIMPLE, "trl-small.yaml": TRL_SMALL,
    "prime-text.toml": PRIME_TEXT, "prime-search.toml": PRIME_SEARCH, "prime-math.toml": PRIME_MATH,
    "prime-earlier.toml": PRIME_EARLIER,
}  # fmt: skip
KINDS = {"verl": "verl", "trl": "TRL", "prime": "prime-rl"}


@pytest.fixture(params=ALL)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / str(request.param)
    path.write_text(ALL[path.name])
    return path


Output = tuple[list[str], str]  # the words of the command, and the report


def result(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> Output:
    assert convert([str(path), *flags]) == 0
    out, report = capsys.readouterr()
    return shlex.split(out.replace("\\\n", " "))[2:], report


def of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str) -> Output:
    (tmp_path / name).write_text(text)
    return result(tmp_path / name, capsys)


def values(words: list[str], flag: str) -> list[str] | None:
    """Of the last giving of a flag; None without it."""
    return {name: list(given) for name, given, _ in grouped(words)}.get(flag)


def test_no_key_is_unknown_and_the_command_is_taken(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, report = result(file, capsys)
    kind = KINDS[file.name.partition("-")[0]]
    assert report.splitlines()[0].startswith(f"{file}: {kind}, ")
    assert "left out, unknown" not in report
    assert "rows and rewards: " in report
    # What is wrong with it is that its data is not on this machine, its critic, or a tracker's package.
    files = r"--(eval-)?prompt-data is '[^']+', but there is no file|--report-to wandb needs a package|"
    files += r"--critic-load is '/models/critic', but there is no such directory"
    assert [fault for fault in faults_of(shlex.join(words)) if not re.match(files, fault)] == []


def test_a_command_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRL_SMALL.replace("someone/questions", "arithmetic").replace("use_peft: true\n", "")
    words, _ = of_text(tmp_path, capsys, "grpo.yaml", text)
    assert launch.main([*words, "--input-key", "input", "--label-key", "label", "--dry-run"]) == 0
    assert "rollout" in capsys.readouterr().out


@pytest.mark.parametrize("name", KINDS.values())
def test_every_flag_of_the_tables_is_one(name: str) -> None:
    project = projects()[name]
    known = {flag.name: flag for flag in flags() if flag.name}
    named = [flag.removesuffix("?") for text in project.flags.values() for flag in text.split()]
    assert [flag for flag in named if flag not in known and not flag.startswith("sglang-")] == []
    chosen = [text for table in project.choices.values() for text in table.values()]
    given = [*map(list, project.added), *(list(guard.flags) for guard in project.only_if)]
    for words in (*map(str.split, chosen), *given):
        assert not read_flags(words).faults, words
    sentences = [*project.not_here.values(), project.rewards]
    for flag in re.findall(r"--(?:no-)?([a-z][a-z0-9-]*)", " ".join(sentences)):
        assert flag in known or flag.startswith(("sglang-", "megatron-")), flag
    for page in re.findall(r"docs/[\w/]+\.md", " ".join(sentences)):
        assert (PAGE.parents[1] / page).is_file(), page


@pytest.mark.parametrize("name", KINDS.values())
def test_a_key_has_one_answer_and_a_default_is_of_a_key(name: str) -> None:
    project = projects()[name]
    ruled = [key for keys in RULES[name] for key in keys if keys.count(key) == 1]
    tables = [*project.flags, *project.choices, *ruled]
    assert len(tables) == len(set(tables)), sorted(key for key in set(tables) if tables.count(key) > 1)
    assert set(project.defaults) <= {*tables, *project.taken}
    assert set(project.renamed.values()) <= {*tables, *project.not_here, "orchestrator.train.env"}
    for guard in project.only_if:
        plain = {key for key in guard.keys if "*" not in key}
        assert plain <= {*tables, *project.taken, *project.not_here}, guard


@pytest.mark.parametrize(("name", "text", "wanted"), [
    # 64 prompts, 16 in each step; prompts and not rollouts are counted
    ("a.sh", VERL_MATH, {"rollout-batch-size": ["64"], "num-steps-per-rollout": ["4"], "n-samples-per-prompt": ["4"]}),
    # 2 x 4 x 8 = 64 completions of 4 for each prompt, in one step
    ("a.yaml", TRL_DEMO, {"rollout-batch-size": ["16"], "num-steps-per-rollout": ["1"]}),
    # 2 x 8 completions are generated, 2 x 4 are in a step: two steps on four groups; 100 steps are 50 batches
    ("a.yaml", TRL_SIMPLE, {"rollout-batch-size": ["4"], "num-steps-per-rollout": ["2"], "num-rollout": ["50"],
                            "save-interval": ["10"]}),
    ("a.yaml", TRL_SIMPLE + "generation_batch_size: 32\n", {"rollout-batch-size": ["8"], "num-rollout": ["25"]}),
    # 64 rollouts of 16 for each prompt; as many in flight as in a batch are one batch ahead
    ("a.toml", PRIME_TEXT, {"rollout-batch-size": ["4"], "n-samples-per-prompt": ["16"], "async-buffer-size": ["1"]}),
    # 2 x 64 in flight are two batches, within 4 versions
    ("a.toml", PRIME_SEARCH, {"rollout-batch-size": ["8"], "async-buffer-size": ["2"]}),
    ("a.toml", PRIME_SEARCH.replace("= 4\n[orch", "= 1\n[orch"), {"async-buffer-size": ["1"]}),
    ("a.toml", PRIME_MATH, {"rollout-max-context-len": ["800"], "max-tokens-per-gpu": ["1600"],
                            "rollout-max-response-len": ["799"]}),
    ("a.toml", PRIME_EARLIER, {"async-buffer-size": ["1"], "rollout-max-response-len": ["768"], "lora-alpha": ["64"]}),
    # KL in the loss, or in the reward; a critic for gae alone; clip ranges; devices that are shared on one machine
    ("a.sh", VERL_MATH, {"use-kl-loss": [], "kl-loss-coef": ["0.002"], "kl-coef": None, "critic-lr": None,
                         "colocate": [], "rollout-num-gpus": ["4"], "lora-rank": ["8"], "report-to": ["wandb"]}),
    ("a.sh", VERL_PPO, {"use-kl-loss": None, "kl-coef": ["0.003"], "critic-lr": ["2e-5"], "report-to": None,
                        "max-tokens-per-gpu": ["9000"], "no-use-dynamic-batch-size": None, "save-interval": None}),
    ("a.sh", VERL_DAPO, {"eps-clip": ["0.2"], "eps-clip-high": ["0.28"], "colocate": None, "rollout-num-gpus": ["16"],
                         "rollout-max-response-len": ["1024"], "eval-temperature": ["0.7"], "rollout-top-k": None}),
    ("a.yaml", TRL_SMALL, {"loss-aggregation": ["constant"], "disable-grpo-std-normalization": [], "engine": None,
                           "use-tis": None, "kl-loss-coef": None, "num-epoch": ["3"]}),
    ("a.yaml", TRL_SMALL + "save_strategy: 'no'\n", {"save-interval": None}),
    ("a.yaml", TRL_SMALL, {"save-interval": ["500"], "rm-type": None, "label-key": ["solution"]}),
    ("a.sh", VERL_MATH.replace("main_ppo ", "main_ppo --config-name ppo_megatron_trainer.yaml "),
     {"train-backend": ["megatron"]}),
    ("a.yaml", TRL_SIMPLE, {"kl-loss-coef": ["0.01"], "num-epoch": None, "use-tis": [], "project": None}),
], ids=lambda value: value if isinstance(value, str) and len(value) < 12 else "")  # fmt: skip
def test_what_the_settings_become(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, wanted: dict[str, list[str] | None]
) -> None:
    words, _ = of_text(tmp_path, capsys, name, text)
    assert {flag: values(words, flag) for flag in wanted} == wanted


@pytest.mark.parametrize(("name", "text", "line"), [
    ("a.sh", VERL_MATH.replace("adv_estimator", "adv_estimater"),
     "left out, unknown: algorithm.adv_estimater; did you mean 'algorithm.adv_estimator'?"),
    ("a.yaml", TRL_SMALL + "epsilon_hihg: 1\n", "left out, unknown: epsilon_hihg; did you mean 'epsilon_high'?"),
    ("a.toml", f"colour = 1\n{PRIME_TEXT}", "left out, unknown: colour"),
    ("a.sh", VERL_MATH.replace("size=16", "size=24"),
     "left out, not here: data.train_batch_size=64, actor_rollout_ref.actor.ppo_mini_batch_size=24: optimizer steps of "
     "a batch would be 64 / 24, but must be a whole number; change one of them"),
    ("a.sh", VERL_MATH.replace("train_batch_size=64", "train_batch_size=$SIZE"), "_size is $SIZE, but must"),
    ("a.sh", VERL_MATH.replace("=low_var_kl", "=abs"), "left out, not here: actor_rollout_ref.actor.kl_loss_type=abs"),
    ("a.sh", VERL_MATH.replace("$@", "custom_reward_function.path=mine.py"),
     "left out, not here: custom_reward_function.path=mine.py: a grader here takes (response, label, metadata); wrap"),
    ("a.sh", VERL_MATH.replace("$@", "actor_rollout_ref.actor.ppo_epochs=2"), "ppo_epochs=2: it can only be 1 here"),
    ("a.sh", VERL_PPO, "check raw: set under a condition"),
    ("a.yaml", TRL_SMALL.replace("accuracy_reward", "mine.brevity"), "not here: reward_funcs=mine.brevity: such"),
    ("a.yaml", TRL_SMALL.replace("processes: 1", "processes: 3"),
     "changed: num_processes=3 -> --rollout-batch-size 3 --num-steps-per-rollout 1 --actor-num-gpus-per-node 3"),
    ("a.yaml", TRL_SMALL + "num_generations_eval: 4\n",
     "no --eval-prompt-data: --eval-temperature 0.9 --n-samples-per-eval-prompt 4"),
    ("a.toml", PRIME_TEXT, "left out, not here: orchestrator.train.env="),
    ("a.toml", PRIME_TEXT, "note: tokens are at most 1 versions old; with --max-staleness 8"),
    ("a.toml", PRIME_TEXT, "left out, for it is so anyway: "),
    ("a.yaml", TRL_DEMO, "save_strategy=epoch: it is counted in batches; write --save-interval N"),
    ("a.yaml", TRL_DEMO.replace("generations: 4", "generations: 4.5"), "num_generations is 4.5, but must"),
    ("a.yaml", TRL_SMALL + "save_strategy: 'no'\n", "left out, for it is so anyway: save_strategy"),
], ids=lambda value: value if len(value) < 12 else "")  # fmt: skip
def test_what_the_report_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, line: str
) -> None:
    assert line in of_text(tmp_path, capsys, name, text)[1]


def test_a_file_of_nested_keys_says_the_same_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = """
data: {train_batch_size: 64, max_prompt_length: 99, max_response_length: 50}
actor_rollout_ref:
  actor: {ppo_mini_batch_size: 32}
  rollout: {max_model_len: "${data.max_prompt_length}", top_k: null}
"""
    words, _ = of_text(tmp_path, capsys, "verl.yaml", yaml)
    assert values(words, "num-steps-per-rollout") == ["2"]
    assert values(words, "rollout-max-context-len") == ["99"], "what the file refers to"
    assert values(words, "rollout-top-k") is None
    found = {"data": {"train_batch_size": 64}, "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 32}}}
    assert values(of_text(tmp_path, capsys, "verl.json", json.dumps(found))[0], "num-steps-per-rollout") == ["2"]
    assert flat({"a": {"b": {"c": 1}, "d": {}}, "e": [1]}) == {"a.b.c": 1, "a.d": {}, "e": [1]}


@pytest.mark.parametrize(("name", "text", "fault"), [
    ("rl.toml", "[model\n", "rl.toml cannot be read as TOML ("),
    ("grpo.yaml", "a: [1\n", "grpo.yaml cannot be read as YAML ("),
    ("grpo.json", "{", "grpo.json cannot be read as JSON ("),
    ("grpo.yaml", "colour: 1\n", "grpo.yaml has no key by which a configuration is known (of prime-rl orchestrator"),
    ("grpo.yaml", "- 1\n", "grpo.yaml has no key by which a configuration is known"),
    ("run.sh", "echo 1\n", "run.sh starts no train.py or train_async.py and no verl.trainer.main_ppo"),
])  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str, fault: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(fault)):
        convert([str(tmp_path / name)])


# ---------------------------------------------------------------------- the page


def rows(name: str) -> dict[str, str]:
    """Key -> flags, as the page has them."""
    section = PAGE.read_text().partition(f"\n## From {name}\n")[2].partition("\n## ")[0]
    return {key: flags for key, flags in re.findall(r"^\| `([^`|]+)` \| (.*?) \|$", section, re.MULTILINE)}


def wanted_rows(name: str) -> dict[str, str]:
    project = projects()[name]
    plain = {key: text.replace("?", "").split() for key, text in project.flags.items()}
    flags = {key: [word for text in table.values() for word in text.split() if word.startswith("--")]
             for key, table in project.choices.items()}  # fmt: skip
    named = {key: [f"--{flag}" for flag in found] for key, found in plain.items()} | flags
    return {key: " ".join(f"`{flag}`" for flag in dict.fromkeys(found)) for key, found in named.items()}


@pytest.mark.parametrize("name", KINDS.values())
def test_the_page_has_each_key_with_its_flags(name: str) -> None:
    wanted = wanted_rows(name)
    assert rows(name) == wanted, "\n".join(f"| `{key}` | {flags} |" for key, flags in wanted.items())


def test_the_example_of_the_page_prints_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = re.search(r"```yaml\n(# grpo.yaml\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert text is not None
    Path("grpo.yaml").write_text(text[1])
    assert convert(["grpo.yaml"]) == 0
    out, report = capsys.readouterr()
    assert f"```text\n{report}{out}```" in PAGE.read_text()
