"""Each refusal in its words, each warning, options that nothing reads, and that all come at once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from configs.layers import ConfigError
from configs.load import dump_toml
from configs.resolve import resolve
from configs.rules.validate import Findings, findings, unread_faults
from tests.configs.config_rig import BASE, WORK, faults_of, one_says, read, recipe, resolved, settled, warnings_of

HELD = "--eval-interval 1 --eval-prompt-data sums=arithmetic"
JUDGE = '"path": "json:JSONDecoder"'


def stage(*tables: str) -> str:
    return f"'stage=[{', '.join(f'{{{table}}}' for table in tables)}]'"


@pytest.mark.parametrize(("argv", "words"), [
    ("--no-use-tis", "so that stale tokens are trained, but no correction is on"),
    ("--no-use-tis --policy-mode decoupled", "leave --no-use-tis and --policy-mode onpolicy out"),
    ("--policy-mode onpolicy", "--use-rollout-logprobs (bypass), choose --mode sync, or accept"),
    ("--update-weights-interval 4 --async-buffer-size 0 --no-use-tis", "update_weights_interval 4"),
    ("--otel-endpoint 127.0.0.1:4318", "is '127.0.0.1:4318', but must begin with http:// or https://; such as"),
    ("--use-pytorch-profiler", "--profile-step-end is 12, but the run has 3 rollout batches; set it to at most 3"),
    ("--use-pytorch-profiler --profile-step-start 3 --profile-step-end 3",
     "--profile-step-start is 3 and must be below --profile-step-end 3"),
    ("--use-pytorch-profiler --train-backend simulated", "simulated: it computes nothing; leave one of them out"),
    ("--record-memory-history --train-device cpu", "is of a GPU's memory, and --train-device is cpu; leave one"),
    ("--colocate", "--colocate with max_staleness 2: engine and trainer take turns"),
    ("--colocate", "add --mode sync, or leave --colocate out"),
    ("--max-staleness 1 --update-weights-interval 3",
     "--max-staleness is 1, but weights are published every 3 batches and the gate would close for "
     "good before that; set --max-staleness to at least 2, or --update-weights-interval 2"),
    ("--n-samples-per-prompt 1", "--n-samples-per-prompt is 1, but grpo compares the rollouts of a group"),
    ("--n-samples-per-prompt 1 --advantage-estimator rloo", "but rloo compares"),
    ("--rollout-top-p 0.9", "--rollout-top-p is 0.9 with TIS or bypass, but must be 1: the engine"),
    ("--rollout-top-k 20", "--rollout-top-k is 20 with TIS or bypass, but must be -1"),
    ("--rollout-top-k 20 --policy-mode bypass", "their ratio is no importance weight"),
    ("--rollout-top-k 0", "--rollout-top-k is 0, but would keep no token"),
    ("--eval-interval 1 --eval-prompt-data arithmetic --eval-top-k 0", "--eval-top-k is 0, but would keep no token"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 5", "but only one may set the warm-up; leave one of them out"),
    ("--use-kl-loss", "--kl-loss-coef is 0, but --use-kl-loss pays for a reference forward pass"),
    ("--kl-loss-coef 0.1", "--kl-loss-coef is 0.1, but only --use-kl-loss reads it"),
    ("engine.simulated.vocab_size=32", "engine.simulated.vocab_size is 32, but only --engine simulated reads it"),
    ("--tis-clip-low 3", "--tis-clip-low is 3, but must not be above --tis-clip 2"),
    ("--min-lr 1 --lr 0.5", "--min-lr is 1, but must not be above --lr 0.5"),
    ("--use-tis --use-rollout-logprobs", "--use-tis and --use-rollout-logprobs are both on"),
    ("--policy-mode decoupled --use-rollout-logprobs", "--policy-mode is decoupled, but"),
    ("--policy-mode bypass --no-use-rollout-logprobs", "--no-use-rollout-logprobs forbids it"),
    ("--policy-mode bypass --use-tis --no-use-rollout-logprobs", "forbids it"),
    ("--policy-mode onpolicy --use-tis --mode sync", "is onpolicy, but --use-tis needs decoupled"),
    ("--policy-mode onpolicy --use-rollout-logprobs --mode sync", "means bypass"),
    ("--eval-interval 5", "--eval-interval is 5, but there is nothing to evaluate on"),
    ("--prompt-data-weights 1 2 3",
     "--prompt-data-weights has 3 numbers for 1 entries of --prompt-data; give one for each"),
    ("--num-rollout 0", "--num-rollout is 0 (evaluate only), but there is nothing to evaluate on"),
    ("--num-rollout none", "but a run needs a length; set --num-rollout or --num-epoch"),
    ("--num-epoch 2", "--num-epoch is 2 and --num-rollout is 3, but only one may set the length"),
    ("data.prompt_data=[]", "--prompt-data is empty, but a run needs prompts"),
    ("--rollout-max-context-len 512", "--rollout-max-response-len is 512, but prompt and response share"),
    ("--rollout-max-context-len 900 --rollout-max-prompt-len 900", "leaves no token for the response"),
    ("--prompt-data no.jsonl", "--prompt-data is 'no.jsonl', but there is no file or directory 'no.jsonl'"),
    ("--prompt-data arithmetics", "did you mean arithmetic?"),
    ("--prompt-data trl-lib/tldr", "or write the set of the Hugging Face hub into a directory first, with"),
    ("--prompt-data no/rows.jsonl", "correct the path, or use the built-in arithmetic or arithmetic-tools"),
    ("--prompt-data verifiers", "or add a table [[environment]] with the name verifiers, which makes its tasks"),
    ("--prompt-data a.jsonl@[1-2]", "a slice must be path@[a:b] with whole numbers"),
    ("--eval-interval 5 --eval-prompt-data x=no.jsonl@[0:5]", "no file or directory 'no.jsonl'"),
    ("--eval-interval 5 --eval-prompt-data x=arithmetic x=arithmetic-tools", "2 sets named 'x', but each"),
    ("--chat-template-path no.jinja", "--chat-template-path is 'no.jinja', but there is no such file"),
    ("--hf-checkpoint ./nowhere", "--hf-checkpoint is './nowhere', but there is no such directory"),
    ("--hf-checkpoint /no/such/model", "correct the path, or give a hub id such as Qwen/Qwen3-0.6B"),
    ("--hf-checkpoint tiny-arithmetics", "did you mean tiny-arithmetic?"),
    ("--ref-load ../nowhere", "--ref-load is '../nowhere', but there is no such directory"),
    ("--resume /no/such/run", "config.toml"),
    ("--custom-rm-path rewards", "an import path must be package.module:name"),
    ("--custom-rm-path no_such_pkg.x:score", "but no package 'no_such_pkg' is found"),
    ("--dynamic-sampling-filter-path x:", "--dynamic-sampling-filter-path is 'x:'"),
    ("--tools calculatr", "--tools is 'calculatr', but an import path must be package.module:name"),
    ("--tools calculator --tool-call-close ''", "must not be empty"),
    ("--tools calculator --tool-result-template x", "but must contain {result}"),
    ("--scale rewrad=2", "--scale rewrad=2 names no stage; did you mean reward?"),
    ("--scale zzzz=2", "the stages are prompts, generate, engine, engines, agents, reward, teacher, group, train"),
    ("--chain group+reward", "--chain group+reward names no neighbours of this run, which are in their order gene"),
    ("--chain reward", "--chain reward names no neighbours"),
    ("--chain reward+group generate+reward", "--chain names reward twice, but a stage is in one process"),
    ("--autoscale reward=4", "--autoscale 'reward=4' is no STAGE=LEAST..MOST; write for example reward=1..8"),
    ("--autoscale rewrad=1..4", "--autoscale rewrad=1..4 names no stage; did you mean reward?"),
    ("--autoscale train=1..4", "--autoscale train=1..4 cannot be, for there is only one: it is the single"),
    ("--autoscale agents=1..4", "--autoscale agents=1..4 scales a stage that this run does not have"),
    ("--autoscale reward=4..1", "must have 1 <= LEAST <= MOST <= 1024; write for example reward=1..4"),
    ("--autoscale reward=0..1", "must have 1 <= LEAST <= MOST <= 1024; write for example reward=1..2"),
    ("--autoscale reward=1..5000", "must have 1 <= LEAST <= MOST <= 1024; write for example reward=1..1024"),
    ("--scale reward=5000000", "reward=5000000 is more than 1024 replicas, the most of a stage"),
    ("--autoscale reward=1..4 reward=1..5", "--autoscale has limits of reward twice"),
    ("--autoscale reward=2..4", "does not hold the 1 replicas that --scale gives reward; widen it, or set --"),
    ("--autoscale reward=2..4 --scale reward=9", "or set --scale reward=4"),
    ("--mode sync --colocate --autoscale engine=1..2", "engine=1..2 cannot be with --colocate"),
    ("--autoscale group=1..2 --dynamic-sampling-filter duplicate_prompt",
     "--autoscale group=1..2 would share groups out"),
    ("--scale reward=0", "--scale reward=0 leaves no replica, but each stage needs at least one"),
    ("--scale train=2", "there can be only one: it is the single writer of the weights"),
    ("--scale engines=2", "it is the single owner of the engines (--scale engine=N says how many"),
    ("--scale prompts=2", "there can be only one: it is the single writer of the ledger"),
    ("--scale group=2 --dynamic-sampling-filter duplicate_prompt",
     "duplicate_prompt compares each with all before it, which must meet in one replica"),
    ("--scale evaluate=2", "there can be only one: it joins the answers of one version"),
    ("--scale tools=2", "--scale tools=2 names no stage: tools are called in the stage agents; set agents=2"),
    ("--scale agents=2", "--scale agents=2 scales a stage that this run does not have; add an"),
    ("--engine-port 65535 --scale engine=2", "the last engine would need 65536"),
    ("--engine-device gpu", "--engine-device is 'gpu', but must be auto, cpu, cuda or cuda:N"),
    ("--train-device cuda:x", "--train-device is 'cuda:x'"),
    (stage(f'"name": "a", {JUDGE}'), "stage.a has neither after nor loop, but needs exactly one"),
    (stage(f'"name": "a", {JUDGE}, "after": "reward", "loop": "generate"'), "stage.a has both after and loop"),
    (stage(f'"name": "a", {JUDGE}, "loop": "reward"'), "only generate sends unfinished rollouts round"),
    (stage(f'"name": "a", {JUDGE}, "after": "rewrad"'), "is no stage; did you mean reward?"),
    (stage(f'"name": "a", {JUDGE}, "after": "train"'), "is no place for a custom stage; choose one of generate"),
    (stage(f'"name": "reward", {JUDGE}, "after": "reward"'), "has the name of a built-in stage"),
    (stage(f'"name": "A b", {JUDGE}, "after": "reward"'), "must be small letters"),
    (stage(*[f'"name": "a", {JUDGE}, "after": "reward"'] * 2), "stage.a is there 2 times, but names must differ"),
    (stage('"name": "a", "path": "x.y", "after": "reward"'), "stage.a.path is 'x.y', but an import path must be"),
    (stage(f'"name": "a", {JUDGE}, "after": "b"', f'"name": "b", {JUDGE}, "after": "a"'),
     "that chain of stages never begins at a built-in one"),
    ("--global-batch-size 100", "does not divide into whole optimizer steps"),
])  # fmt: skip
def test_refusals(argv: str, words: str) -> None:
    faults = faults_of(BASE, argv)
    assert any(words in fault for fault in faults), faults
    assert all("\n" not in fault and ";" in fault for fault in faults), "each is one line and has a cure"


def test_a_package_of_the_user_with_a_name_of_ours_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "stages.py").touch()
    monkeypatch.chdir(tmp_path)
    for flag, path, own in (
        ("--custom-rm-path", "models.rewards:score", "models"),
        ("--tools", "stages.mine:search", "stages.py"),
    ):
        (fault,) = faults_of(BASE, flag, path)
        assert f"your own {tmp_path / own} does not replace; rename yours" in fault
    assert warnings_of(BASE, "--tools", "stages.tools.calculator:calculate") == (), "one of ours may be named"


def test_a_run_needs_prompts_and_a_model_that_the_user_names() -> None:
    (fault,) = faults_of("--num-rollout 3 --hf-checkpoint tiny")
    assert fault == "--prompt-data is empty, but a run needs prompts; give a file, or the built-in arithmetic"
    (fault,) = faults_of(WORK)
    assert fault.startswith("--hf-checkpoint is not set, but a run trains a model; give")
    assert len(faults_of(WORK, "--scale train=2")) == 2, "together with all else"


@pytest.mark.parametrize(("argv", "words"), [
    ("--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k1", "k1 has no gradient on-policy"),
    ("--eval-prompt-data arithmetic", "--eval-prompt-data is given but never used; add --eval-interval"),
    ("--max-staleness 1 --async-buffer-size 4", "max_staleness 1 outranks async_buffer_size 4"),
    ("--update-weights-interval 2 --eval-interval 5 --eval-prompt-data arithmetic",
     "--eval-interval 5 is no multiple of --update-weights-interval 2"),
    ("--mode sync --rollout-top-p 0.9", "the policy that is trained is not quite the one that samples"),
    ("--mode sync --rollout-top-k 1", "makes all rollouts of a prompt equal"),
    ("--disable-grpo-std-normalization --advantage-estimator rloo", "has no effect with"),
    ("--mode sync --tis-clip 3", "have no effect without --use-tis"),
    ("--ref-load Qwen/Qwen3-0.6B", "--ref-load is given but never used"),
    ("--tools calculator --max-turns 1", "ends a rollout at its first tool call"),
    ("--scale evaluate=1", "--scale evaluate has no effect"),
    (f"{HELD} --n-samples-per-eval-prompt 4", "for the held-out set sums, but --eval-temperature is 0 (greedy), so"),
    (f"{HELD} --n-samples-per-eval-prompt 4 --eval-temperature 1 --eval-top-k 1", "sums, but --eval-top-k is 1 (gre"),
    ("--rollout-max-context-len 600 --rollout-max-prompt-len 500", "their responses are cut short"),
    ("--loss-type sft_loss --label-key label --eval-interval 5 --eval-prompt-data arithmetic", "sft_loss"),
])  # fmt: skip
def test_warnings(argv: str, words: str) -> None:
    one_says(words, warnings_of(BASE, argv))


def test_supervised_training_needs_no_correction_but_answers(tmp_path: Path) -> None:
    assert warnings_of(BASE, "--loss-type", "sft_loss", "--n-samples-per-prompt", "1") == ()
    argv = f"--prompt-data {recipe(tmp_path, '{}', 'a.jsonl')} --num-rollout 3 --hf-checkpoint tiny"
    assert warnings_of(argv, "--loss-type sft_loss") == (), "rows may be conversations"
    assert "--label-key is not set" in faults_of(argv, "--warm-start-steps 5")[0]
    assert "--rm-type is exact, but" in faults_of(argv, "--rm-type exact")[0]
    assert warnings_of(argv, "--rm-type exact --label-key answer") == ()
    assert warnings_of(argv, "--warm-start-steps 5 --warm-start-label-key demonstration") == ()


def test_settings_of_held_out_sets_name_a_set_and_fit(tmp_path: Path) -> None:
    base = f"{BASE} {HELD}"
    given = recipe(tmp_path, "[eval.eval_sets.sums]\nn_samples = 4\ntemperature = 0.6\n")
    config = settled(base, f"--config {given}")[0].eval.of("sums")
    assert (config.n_samples_per_eval_prompt, config.eval_temperature, config.eval_top_p) == (4, 0.6, 1.0)
    assert warnings_of(base, f"--config {given}") == (), "its answers are sampled"
    one_says("is 4 for the held-out set sums", warnings_of(base, """--eval-sets '{"sums": {"n_samples": 4}}'"""))
    assert "did you mean eval.eval_sets.sums?" in faults_of(base, """--eval-sets '{"sum": {}}'""")[0]
    (fault,) = faults_of(base, """--eval-sets '{"sums": {"top_p": 2}}'""")
    assert "eval.eval_sets.sums does not fit: Expected `float` <= 1.0 - at `$.top_p`" in fault
    assert "only --eval-prompt-data reads it" in faults_of(BASE, """--eval-sets '{"sums": {}}'""")[0]


def test_a_local_checkpoint(tmp_path: Path) -> None:
    argv = f"{WORK} --hf-checkpoint {tmp_path}"
    assert "a Hugging Face checkpoint is a directory with config.json" in faults_of(argv)[0]
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 256}), encoding="utf-8")
    assert faults_of(argv) == (
        "--rollout-max-response-len is 512, but the model has positions for 256 tokens, prompt included; lower it",
    )
    assert warnings_of(argv, "--rollout-max-response-len 255") == ()
    (fault,) = faults_of(argv, "--rollout-max-response-len 64 --rollout-max-context-len 300")
    assert "--rollout-max-context-len is 300" in fault


def test_resume_and_run_dir(tmp_path: Path) -> None:
    recipe(tmp_path, "", "config.toml")
    assert "a run is already there; continue it with --resume" in faults_of(BASE, f"--run-dir {tmp_path}")[0]
    one_says("the resumed run saves when it ends or is stopped", warnings_of(BASE, f"--resume {tmp_path}"))
    assert warnings_of(BASE, f"--resume {tmp_path} --save-interval 5") == ()
    faults = faults_of(BASE, f"--resume {tmp_path} --run-dir elsewhere")
    assert "a resumed run continues in its own directory; leave --run-dir out" in faults[0]


def test_custom_stages_in_their_places() -> None:
    tables = (f'"name": "judge", {JUDGE}, "after": "reward"', f'"name": "agent", {JUDGE}, "loop": "generate"')
    assert warnings_of(BASE, stage(*tables), "--scale", "judge=2", "agent=3") == ()


def test_the_error_travels_between_processes() -> None:
    error = ConfigError(["a; b", "c; d", "a; b"])
    cls, arguments = error.__reduce__()
    assert cls(*arguments).faults == error.faults == ("a; b", "c; d")
    assert str(error) == "a; b\nc; d"
    assert ConfigError("one; two").faults == ("one; two",)


REMOTE = "--rm-type remote --rm-url http://localhost:8000/score"
BY_JUDGE = "--rm-type judge --judge-engine judge --frozen-engine judge=tiny"
PPO, MEGATRON = "--advantage-estimator ppo", "--train-backend megatron"
DISTRIBUTED = "--update-weight-transport distributed or tensor"
# What reads options in a fault's words, a command line with it, one without it, and the options.
READERS: list[tuple[str, ...]] = [
    ("--eval-prompt-data", "--eval-prompt-data arithmetic --eval-interval 1", "", "--n-samples-per-eval-prompt 2",
     "--eval-temperature 1", "--eval-max-response-len 9", "--eval-input-key question", "--eval-label-key answer",
     "--eval-deadline-s 9", "--skip-eval-before-train"),
    ("--warm-start-steps above 0", "--warm-start-steps 1", "", "--warm-start-batch-size 9",
     "--warm-start-target-loss 9", "--warm-start-lr 9", "--warm-start-data arithmetic-tools",
     "--warm-start-label-key answer"),
    ("--tools", "--tools calculator", "", "--tool-deadline-s 9", "--tool-memory-gb 9",
     "--tool-result-template {result}!"),
    ("--tools or an [[environment]]", "'environment=[{\"name\": \"maze\"}]'", "", "--tool-call-open ["),
    ("a loop stage or a function of yours that generates", "--tools calculator", "", "--max-turns 9"),
    ("a function of yours that generates or --eval-function-path", "--custom-generate-function-path json:loads", "",
     "--custom-generate-deadline-secs 9"),
    ("a remote grader or a judge", REMOTE, "", "--rm-concurrency 9", "--rm-retries 9"),
    ("a remote grader or a judge", BY_JUDGE, "", "--rm-timeout-s 9"),
    ("a judge", BY_JUDGE, REMOTE, "--judge-max-tokens 9", "--judge-prompt-path x"),
    ("the grader math", "--rm-type boxed_math", "--rm-type exact", "--math-equivalence verify"),
    ("--overlong-buffer-len above 0", "--overlong-buffer-len 1", "", "--overlong-penalty-factor 9"),
    ("--use-opd", "--use-opd --frozen-engine teacher=tiny", "", "--opd-kl-coef 9", "--opd-teacher-key math",
     "--opd-teacher teacher"),
    ("--use-kl-loss", "--use-kl-loss", "", "--kl-loss-coef 0.1", "--kl-loss-type k3", "--use-unbiased-kl"),
    ("--use-kl-loss or --kl-coef", "--use-kl-loss", "", "--ref-update-interval 5"),
    (DISTRIBUTED, "--update-weight-transport tensor --engine sglang", "", "--update-weight-buffer-size 9"),
    ("--update-weight-transport delta", "--update-weight-transport delta", "", "--update-weight-delta-dir /d"),
    ("several engines", "--scale engine=2", "", "--check-weight-update-equal"),
    ("several engines", "--autoscale engine=1..2", "", "--check-weight-update-equal"),
    ("--train-backend simulated", "--train-backend simulated", "", "--simulated-step-s 9"),
    ("--engine simulated", "--engine simulated", "", "engine.simulated.a_ms=9"),
    ("a trainer in processes of its own", "--train-backend fsdp", "", "--distributed-timeout-minutes 9"),
    ("--train-backend fsdp", "--train-backend fsdp", "", "--fsdp-shard-size 2"),
    ("--train-backend fsdp", "--train-backend fsdp", MEGATRON, "--fsdp-compile"),
    ("--train-backend fsdp or megatron", MEGATRON, "", "--async-save"),
    ("--train-backend torch, fsdp or megatron", "", "--train-backend simulated", "--actor-num-gpus-per-node 4"),
    ("--lora-rank above 0", "--train-backend fsdp --lora-rank 8", "--train-backend fsdp", "--lora-alpha 8",
     "--lora-target-modules q_proj"),
    ("--recompute-granularity full", f"{MEGATRON} --recompute-granularity full", MEGATRON,
     "--recompute-method block", "--recompute-num-layers 2"),
    ("--optimizer-cpu-offload", f"{MEGATRON} --optimizer-cpu-offload", MEGATRON, "--optimizer-offload-fraction 0.5"),
    ("--no-use-dynamic-batch-size", "--no-use-dynamic-batch-size", "", "--micro-batch-size 4"),
    ("--prometheus-port above 0", "--prometheus-port 9", "", "--prometheus-host ::"),
    ("--samples-interval above 0", "", "--samples-interval 0", "--samples-groups 9"),
    ("--advantage-estimator ppo or reinforce_plus_plus", PPO, "", "--gamma 0.9"),
    (PPO, PPO, "--advantage-estimator reinforce_plus_plus", "--lambd 0.9", "--critic-lambd 1",
     "--lambd-alpha 0.05", "--bootstrap-truncated", "--critic-lr 0.1",
     "--num-critic-only-steps 2", "--critic-load tiny"),
    ("--policy-loss ppo", "", "--policy-loss cispo", "--eps-clip-c 3"),
    *((f"--policy-loss {name}", f"--policy-loss {name}", "", *options) for name, *options in (
        ("dppo", "--dppo-threshold 0.3", "--dppo-kl-coef 9"), ("aipo", "--aipo-clip 3"), ("m2po", "--m2po-threshold 3"),
        ("kimi", "--kimi-tau 3"), ("sapo", "--tau-pos 3", "--tau-neg 3"),
        ("kl_cov", "--kl-cov-ratio 0.1", "--ppo-kl-coef 9"),
        ("clip_cov", "--clip-cov-ratio 0.1", "--clip-cov-lb 2", "--clip-cov-ub 9"))),
    ("--policy-loss dppo", "--policy-loss json:loads", "", "--dppo-kl-coef 9"),
    ("--loss-type policy_loss", "", "--loss-type custom_loss", "--custom-advantage-function-path json:loads",
     "--custom-pg-loss-reducer-function-path json:loads"),
    ("--loss-type custom_loss", "--loss-type custom_loss", "", "--custom-loss-function-path json:loads"),
    ("--prox loglinear", "--prox loglinear", "", "--prox-alpha areal"),
    ("--use-opsm", "--use-opsm", "", "--opsm-delta 0.1"),
    ("--tis-mode seq_mask", "--tis-mode seq_mask", "", "--tis-seq-low 0.5"),
    ("--use-tis", "--use-tis", "--mode sync", "--custom-tis-function-path json:loads"),
    ("--rollout-rs or --rs-veto", "--rs-veto 1e-4", "", "--rs-unit rollout", "--renormalize-after-rejection"),
    ("--dynamic-sampling-filter or --dynamic-sampling-filter-path", "--dynamic-sampling-filter nonzero_std", "",
     "--over-sampling-batch-size 64"),
    ("--curriculum pass_rate", "--curriculum pass_rate", "", "--curriculum-keep 0.5"),
]  # fmt: skip


def unread(*argv: str) -> tuple[str, ...]:
    loaded = read(BASE, *argv)
    return tuple(unread_faults(resolve(loaded.config, loaded.given), loaded.given))


@pytest.mark.parametrize(
    ("reader", "with_it", "without", "option"),
    [(*texts, option) for *texts, options in ((*row[:3], row[3:]) for row in READERS) for option in options],
)
def test_an_option_that_nothing_reads_is_refused(reader: str, with_it: str, without: str, option: str) -> None:
    (fault,) = unread(option, without)
    assert fault.startswith(f"{re.split('[ =]', option)[0]} is ")
    assert fault.endswith(f", but only {reader} reads it; choose that, or leave it out")
    assert unread(option, with_it) == ()


def test_a_default_and_what_is_derived_are_no_options() -> None:
    assert unread("--prometheus-host 127.0.0.1 --eval-label-key label --critic-load tiny-arithmetic") == ()


def test_each_fault_stands_among_the_others() -> None:
    assert len(faults_of(BASE, "--gamma 0.9 --scale train=2")) == 2
    assert any("--gamma is" in fault for fault in findings(read(BASE, "--gamma 0.9").config).faults)
    assert findings(resolved(BASE, "--mode sync")) == Findings((), ()), "a resolved configuration is checked too"


def test_a_recipe_may_keep_what_a_flag_above_it_switches_off(tmp_path: Path) -> None:
    mine = recipe(tmp_path, "[warm_start]\nwarm_start_steps = 5\nwarm_start_lr = 0.5\n")
    argv = f"--config {mine} --warm-start-steps 0"
    assert unread("--config", mine) == ()
    assert unread(argv) == ()
    assert len(unread(argv, "--warm-start-lr 0.4")) == 1
    recipe(tmp_path, dump_toml(resolved(BASE, argv)), "config.toml")
    assert unread("--resume", str(tmp_path)) == (), "a run that was started can go on"
    recipe(tmp_path, "[warm_start]\nwarm_start_lr = 0.5\n")
    assert len(unread("--config", mine)) == 1, "nothing ever reads it"
