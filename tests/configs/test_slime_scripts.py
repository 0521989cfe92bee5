"""Command lines and launch scripts of slime: every option has an answer, and a script is read as a shell reads it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import launch
from configs.command_line import read as read_flags
from configs.flags import flags
from configs.layers import ConfigError
from configs.load import MODELS, load
from configs.migrate.convert import main as convert
from configs.migrate.shell_script import read_launch
from configs.rules.files import differences
from configs.slime_options import ALIASES, MODEL_ARGS, NOT_HERE, TAKEN
from configs.translate import grouped, translate
from models.slime_arguments import slime_arguments
from tests.configs.config_rig import BASE, faults_of, settled

PAGE = Path(__file__).parents[2] / "docs" / "slime.md"
# Every option of slime's 38 launch scripts, with a value that one of them gives.
OPTIONS = (Path(__file__).parent / "slime_options.txt").read_text().splitlines()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """With all that a shell has to work out. Its first commands must not be run."""
    return shutil.copytree(Path(__file__).parent / "slime_script", tmp_path / "script") / "run.sh"


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize("line", OPTIONS)
def test_no_option_of_slimes_scripts_is_unknown(line: str) -> None:
    """Taken, or refused in a sentence that says what to do. No answer guesses at another name."""
    for fault in read_flags(line.split()).faults:
        assert "resembles no" not in fault
        assert "did you mean" not in fault


def test_the_tables_name_flags_that_are_here_and_no_flag_of_ours() -> None:
    known = {flag.name for flag in flags() if flag.name}
    tables = [*MODEL_ARGS, *ALIASES, *TAKEN, *NOT_HERE]
    assert len(tables) == len(set(tables))
    assert not known & set(tables)
    for text in [*NOT_HERE.values(), *(reason for _, reason in TAKEN.values())]:
        named = set(re.findall(r"--([a-z][a-z0-9-]+)", text)) - set(ALIASES)
        assert named <= known | {"sglang-"}, text
    assert {name for name in ALIASES.values() if not name.startswith(("megatron-", "sglang-"))} <= known


@pytest.mark.parametrize(("argv", "wanted"), [
    ("--save runs/a", ["--run-dir", "runs/a"]),
    ("--save runs/a --load runs/a", ["--run-dir", "runs/a"]),
    ("--save runs/a --run-dir runs/b", ["--run-dir", "runs/b"]),
    ("--use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl", []),
    ("--use-kl-loss --kl-loss-coef 0.01", ["--use-kl-loss", "--kl-loss-coef", "0.01"]),
    ("--eval-prompt-data aime /a.jsonl gpqa /g.jsonl", ["--eval-prompt-data", "aime=/a.jsonl", "gpqa=/g.jsonl"]),
    ("--eval-prompt-data arithmetic arithmetic-tools", ["--eval-prompt-data", "arithmetic", "arithmetic-tools"]),
    ("--eval-prompt-data a.jsonl b.jsonl", ["--eval-prompt-data", "a.jsonl", "b.jsonl"]),
    ("--sglang-router-ip 10.0.0.1 --sglang-router-port 30000", ["--router-address", "http://10.0.0.1:30000"]),
    ("--update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir /d",
     ["--update-weight-transport", "delta", "--update-weight-delta-dir", "/d"]),
    ("--rollout-function-path slime.rollout.sft_rollout.generate_rollout --debug-train-only "
     "--disable-compute-advantages-and-returns", ["--loss-type", "sft_loss"]),
    ("--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async", ["--mode", "async"]),
    ("--data-source-path slime.rollout.data_source.RolloutDataSourceWithBuffer", []),
    ("--data-source-path mine.Source", ["--data-source-path", "mine.Source"]),
    ("--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
     ["--dynamic-sampling-filter", "nonzero_std"]),
    ("--custom-rm-path slime.rollout.on_policy_distillation.reward_func --rm-url http://h:1/generate --opd-type sglang",
     ["--frozen-engine", "teacher=http://h:1"]),
    ("--custom-rm-path mine.score --rm-url http://h:1", ["--custom-rm-path", "mine.score", "--rm-url", "http://h:1"]),
    ("--optimizer adam --hidden-dropout 0 --attention-dropout 0.0 --use-fault-tolerance --seq-length 4096", []),
    ("--calculate-per-token-loss --tis-threshold 2 --bf16",
     ["--loss-aggregation", "token_mean", "--tis-clip", "2", "--train-dtype", "bfloat16"]),
    ("--no-rope-fusion --no-masked-softmax-fusion",
     ["megatron.megatron_args.apply_rope_fusion=false", "megatron.megatron_args.masked_softmax_fusion=false"]),
    ("--dump-details /d", ["--save-debug-rollout-data", "/d/rollout_data/{rollout_id}.msgpack",
                           "--save-debug-train-data", "/d/train_data/{rollout_id}.parquet"]),
    ("--start-rollout-id 0 --lr 1", ["--lr", "1"]),
    ("--use-pytorch-profiler --profile-step-start 2 --profile-target train_overall --tensorboard-dir /t",
     ["--use-pytorch-profiler", "--profile-step-start", "2", "--tensorboard-dir", "/t"]),
    ("--record-memory-history --memory-recorder torch --memory-snapshot-dir /s --memory-snapshot-num-steps 3",
     ["--record-memory-history", "--memory-snapshot-num-steps", "3"]),
    ("--sglang-cuda-graph-max-bs 64", ["--sglang-cuda-graph-max-bs-decode", "64"]),
    ("--num-layers 36 --swiglu", ["model.model_args.num-layers=36", "model.model_args.swiglu=true"]),
    ("--optimizer adam run.seed=3", ["run.seed=3"]),
    ("--use-flash-attn --use-mlflow", ["--megatron-attention-backend", "flash", "--report-to", "mlflow"]),
    ("--rm-type=remote_rm --lr=1e-6 run.seed=3", ["--rm-type", "remote", "--lr=1e-6", "run.seed=3"]),
])  # fmt: skip
def test_what_an_option_becomes(argv: str, wanted: list[str]) -> None:
    assert list(translate(argv.split()).argv) == wanted


@pytest.mark.parametrize(("argv", "fault"), [
    ("--optimizer sgd", "--optimizer is no flag: the optimizer is AdamW, so sgd cannot be had; leave it out"),
    ("--hidden-dropout 0.1", "--hidden-dropout is no flag: there is no dropout, so 0.1 cannot be had; leave it out"),
    ("--ci-test --ci-disable-kl-checker",
     "--ci-test, --ci-disable-kl-checker are no flags: it is for slime's own tests; leave it out"),
    ("--fp16", "--fp16 is no flag: training is in bfloat16 or float32; write --train-dtype; leave it out"),
    ("--disable-compute-advantages-and-returns", "a policy loss needs advantages; it is for --loss-type sft_loss"),
    ("--sglang-router-ip 10.0.0.1", "give --sglang-router-ip and --sglang-router-port"),
    ("--dump-details", "--dump-details is no flag: it takes one directory"),
    ("--profile-target train_actor", "a profile has all that the trainer does, so train_actor cannot be had"),
    ("--update-weight-mode some", "versions are sent in full, or as differences"),
])  # fmt: skip
def test_what_cannot_be_had_is_refused_once_for_each_reason(argv: str, fault: str) -> None:
    (found,) = read_flags(argv.split()).faults
    assert fault in found


SETS = """
eval:
  defaults: {max_response_len: 64, top_p: 0.7}
  datasets:
    - {name: aime, path: /a.jsonl, rm_type: deepscaler, n_samples_per_eval_prompt: 16}
    - {name: retail-dev, path: /r.jsonl, top_p: 1.0, prompt_key: question}
"""


def test_a_file_of_evaluations_becomes_settings_of_each_set(tmp_path: Path) -> None:
    (tmp_path / "sets.yaml").write_text(SETS)
    found = read_flags(["--eval-config", str(tmp_path / "sets.yaml")]).layer.values
    assert found["eval.eval_prompt_data"] == ("aime=/a.jsonl", "retail-dev=/r.jsonl")
    assert found["eval.eval_sets"] == {
        "aime": {"max_response_len": 64, "top_p": 0.7, "rm_type": "deepscaler", "n_samples": 16},
        "retail-dev": {"max_response_len": 64, "top_p": 1.0, "input_key": "question"},
    }
    (tmp_path / "sets.yaml").write_text(SETS.replace("top_p: 0.7", "min_p: 0.7"))
    (fault,) = read_flags(["--eval-config", str(tmp_path / "sets.yaml")]).faults
    assert "min_p cannot be set for a single data set" in fault
    for text in ("eval: 3", "[", "eval: {datasets: [{path: x}]}"):
        (tmp_path / "sets.yaml").write_text(text)
        (fault,) = read_flags(["--eval-config", str(tmp_path / "sets.yaml")]).faults
        assert "cannot be read as eval: with datasets:, each with name and path" in fault


def test_a_run_that_is_continued_counts_on(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    (fault,) = read_flags(["--load", str(tmp_path), "--start-rollout-id", "0"]).faults
    assert "to begin with other weights give --hf-checkpoint RUN/checkpoints/step-N/hf" in fault


def test_functions_of_slime_itself_are_not_looked_for_on_the_path() -> None:
    (fault, *_) = faults_of(BASE, "--custom-rm-path slime.rollout.rm_hub.deepscaler.get_deepscaler_rule_based_reward")
    assert "slime's own functions are not here; see docs/slime.md" in fault
    assert "PYTHONPATH" not in fault


def test_a_file_of_custom_settings_becomes_values_of_args(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("depth: 3\nnames: [a, b]\nbound: null\n")
    argv = ["--custom-config-path", str(tmp_path / "mine.yaml")]
    assert read_flags(argv).layer.values["rollout.custom_args"] == {"depth": 3, "names": ["a", "b"], "bound": "none"}
    args = slime_arguments(load([*argv, "--lr", "1e-3"]).config)
    assert (args.depth, args.names, args.lr, args.bound) == (3, ["a", "b"], 1e-3, None)
    (tmp_path / "mine.yaml").write_text("[1, 2]")
    assert "cannot be read as YAML with names and values" in read_flags(argv).faults[0]
    settings = """--custom-args '{"use_tis": true, "tis_mode": "truncate", "depth": 3}'"""
    faults = faults_of(f"{BASE} --mode sync", settings)
    assert faults == tuple(
        f"--custom-args gives {name}, which is a setting of the run; write --{name.replace('_', '-')} instead"
        for name in ("use_tis", "tis_mode")
    )
    # A function that makes the weights has names of its own for them; what says the same hides nothing.
    weights = f"{BASE} --mode sync --use-tis --custom-tis-function-path json:loads {settings}"
    config, _ = settled(weights)
    assert slime_arguments(config).tis_mode == "truncate"
    (fault,) = faults_of(weights.replace("truncate", 'truncate", "lr": "x'))
    assert fault == "--custom-args gives lr, which is a setting of the run; write --lr instead"


def test_a_run_that_is_there_is_continued_and_other_weights_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").touch()
    assert translate(["--load", str(run), "--save", str(run)]).argv == ("--resume", str(run))
    other = translate(["--load", "elsewhere", "--save", str(run), "--ref-load", "models/A_torch_dist/"])
    assert other.argv == ("--run-dir", str(run))
    assert [note.split(";")[0] for note in other.notes] == [
        "--load elsewhere holds no run of Sluice",
        "--ref-load models/A_torch_dist is a checkpoint of Megatron-LM",
    ]
    assert translate(["--ref-load", "models/A"]).argv == ("--ref-load", "models/A")
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "latest_checkpointed_iteration.txt").write_text("40")
    (note,) = translate(["--load", str(saved), "--save", str(saved)]).notes
    assert f"to begin with its weights: python -m models.convert megatron-to-hf --megatron {saved} --hf" in note


@given(st.lists(st.sampled_from([f"--{flag.name}" for flag in flags() if flag.name] + ["1", "a=b", "run.seed=1", "x"])))
def test_a_command_line_of_ours_passes_unchanged(argv: list[str]) -> None:
    """But for flags of both that slime's scripts give together with others."""
    both = {"use-kl-loss", "kl-loss-coef", "kl-loss-type", "eval-prompt-data", "debug-train-only"}
    kept = [token for token in argv if token.removeprefix("--") not in both]
    assert list(translate(kept).argv) == kept
    assert [token for _, _, tokens in grouped(argv) for token in tokens] == argv


# ---------------------------------------------------------------------- the model


def architecture(preset: str) -> dict[str, object]:
    return tomllib.loads((MODELS / f"{preset}.toml").read_text())["model"]["architecture"]


# What slime's files say of these models.
ARGS = {
    "qwen3-4b": "swiglu num-layers=36 hidden-size=2560 ffn-hidden-size=9728 num-attention-heads=32 num-query-groups=8 "
    "disable-bias-linear normalization=RMSNorm norm-epsilon=1e-6 vocab-size=151936 kv-channels=128 qk-layernorm",
    "qwen2.5-0.5b": "num-layers=24 hidden-size=896 ffn-hidden-size=4864 num-attention-heads=14 num-query-groups=2 "
    "add-qkv-bias vocab-size=151936",
    "qwen3-30b-a3b": "num-layers=48 hidden-size=2048 num-experts=128 moe-ffn-hidden-size=768 moe-router-topk=8 "
    "untie-embeddings-and-output-weights kv-channels=128",
    "moonlight-16b-a3b": "num-layers=27 hidden-size=2048 multi-latent-attention kv-lora-rank=512 qk-head-dim=128 "
    "qk-pos-emb-head-dim=64 v-head-dim=128 num-experts=64 moe-ffn-hidden-size=1408 moe-router-topk=6 kv-channels=128 "
    "moe-shared-expert-intermediate-size=2816 moe-layer-freq=$MOE_LAYER_FREQ qk-layernorm",
}


def model_args(text: str) -> dict[str, object]:
    argv = [f"model.model_args.{word}" if "=" in word else f"model.model_args.{word}=true" for word in text.split()]
    return dict(read_flags(argv).layer.values["model.model_args"])


@pytest.mark.parametrize("preset", ARGS)
def test_what_slimes_files_say_of_a_model_agrees_with_its_config(preset: str) -> None:
    model, args = architecture(preset) | {"rms_norm_eps": 1e-6}, model_args(ARGS[preset])
    assert differences(model, args) == []
    for name, value in args.items():
        if isinstance(value, bool | str) or (name == "kv_channels" and "kv_lora_rank" in model):
            continue
        (found,) = differences(model, args | {name: value * 2 + 1})
        assert found.startswith(f"--{name.replace('_', '-')} "), found


def test_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    model = architecture("qwen3-4b") | {"rope_parameters": {"rope_theta": 1_000_000}, "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps(model))
    base = f"--prompt-data arithmetic --num-rollout 1 --hf-checkpoint {tmp_path}"
    (fault,) = faults_of(base, "--num-layers 28 --hidden-size 2560 --rotary-base 5000000 --no-position-embedding")
    assert fault.startswith("--num-layers 28 (config.json: 36), --rotary-base 5000000 (config.json: 1000000): what the")
    assert "correct --hf-checkpoint, or leave these options out" in fault


# ---------------------------------------------------------------------- scripts


def test_a_script_is_read_without_being_run(script: Path) -> None:
    found = read_launch(script)
    assert found.program == "train.py"
    assert found.conditional == ("NUM_GPUS",)
    assert list(found.arguments) == [
        "--actor-num-gpus-per-node", "8",
        "--update-weight-buffer-size", "536870912",
        "--swiglu", "--num-layers", "36", "--hidden-size", "2560", "--normalization", "RMSNorm",
        "--rotary-base", "5000000", "--moe-layer-freq", "$KINDS",
        "--hf-checkpoint", "/models/Qwen3-4B", "--ref-load", "/models/Qwen3-4B_torch_dist",
        "--load", "/runs/mine/", "--save", "/runs/mine/",
        "--prompt-data", "${DATA_DIR}/train.jsonl", "--rollout-stop", 'a "quoted" name',
        "--rollout-batch-size", "32", "--rm-type", "math", "--num-rollout", "10",
        "--eval-prompt-data", "aime", "/data/aime.jsonl", "--eval-interval", "5",
        "--sglang-cuda-graph-bs", "1", "2", "4", "6",
    ]  # fmt: skip


WORDS = st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), max_size=6)


@given(st.lists(WORDS, max_size=5), st.sampled_from(["${A[@]}", '"${A[@]}"', "${A[@]} end", 'x"${A[@]}"']))
def test_words_are_those_of_bash(tmp_path_factory: pytest.TempPathFactory, words: list[str], use: str) -> None:
    """Quotes, escapes, splitting. A pattern would be matched with files by bash; no script asks for that."""
    if use[0] != '"' and any(set("*?[") & set(word) for word in words):
        return
    path = tmp_path_factory.mktemp("script") / "run.sh"
    path.write_text(f"A=({shlex.join(words)})\npython3 train.py {use}\n")
    stub = 'python3() { for word in "${@:2}"; do printf \'%s\\0\' "$word"; done; }\n'
    bash = subprocess.run(["bash", "-c", stub + path.read_text()], capture_output=True, text=True, check=True)
    assert list(read_launch(path).arguments) == bash.stdout.split("\0")[:-1]


@pytest.mark.parametrize(("text", "wanted"), [
    ('B=${A:-5}; C="${B}x"\npython train.py --a "$C" --b ${D:-${B}} --c $((B+2))', "--a 5x --b 5 --c 7"),
    ("A=1\nif true; then A=2; else A=3; fi\npython train.py --a $A", "--a 3"),
    ("A=(--x 1)\npython train.py \\\n  --b 1\n${A[@]} \\\n --c 2", "--b 1 --x 1 --c 2"),
    ("python train.py --key ${KEY} --n $(date +%s) --m $((N / 2))", "--key ${KEY} --n $(date +%s) --m $((N / 2))"),
    ("python train.py --a x${NONE[@]} --b", "--a x --b"),
    ("export A=7 # seven\npython3 -u some/where/train_async.py --a=$A", "--a=7"),
])  # fmt: skip
def test_small_scripts(tmp_path: Path, text: str, wanted: str) -> None:
    (tmp_path / "run.sh").write_text(text)
    assert " ".join(read_launch(tmp_path / "run.sh").arguments) == wanted


@pytest.mark.parametrize(("text", "words"), [
    ("echo hello", "starts no train.py or train_async.py"),
    ("source models/none.sh\npython train.py", "reads models/none.sh, which is not there"),
    ("source run.sh\npython train.py", "reads itself"),
])  # fmt: skip
def test_a_script_that_cannot_be_read_says_why(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_launch(tmp_path / "run.sh")


# ---------------------------------------------------------------------- the command


def test_a_script_becomes_a_command_and_the_report_says_what_changed(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(["convert", str(script), "--seed", "7"]) == 0
    out, report = capsys.readouterr()
    words = shlex.split(out.replace("\\\n", " "))
    assert words[:2] == ["python", "launch.py"]
    found = {name: list(given) for name, given, _ in grouped(words[2:])}
    assert found["run-dir"] == ["/runs/mine/"]
    assert found["prompt-data"] == ["${DATA_DIR}/train.jsonl"]
    assert '"${DATA_DIR}/train.jsonl"' in out, "for the shell to put in"
    assert found["eval-prompt-data"] == ["aime=/data/aime.jsonl"]
    assert found["seed"] == ["7"]
    # slime's own defaults, where they are others
    assert found["train-backend"] == ["megatron"]
    assert (found["mode"], found["engine"], found["no-partial-rollout"]) == (["sync"], ["sglang"], [])
    assert (found["weight-decay"], found["n-samples-per-prompt"], found["eval-temperature"]) == (
        ["0.01"],
        ["1"],
        ["1.0"],
    )
    assert not {"num-layers", "swiglu", "load", "ref-load"} & set(found)
    assert not read_flags(words[2:]).faults
    assert f"```text\n{report.replace(str(script), 'run.sh')}```" in PAGE.read_text(), "the page shows what is printed"


@pytest.mark.parametrize(("line", "there", "absent"), [
    ("--use-kl-loss --kl-loss-coef 0.1", "--kl-loss-type k1", "--async"),
    ("--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3", "--kl-loss-type k3", "k1"),
    ("--use-dynamic-batch-size", "--weight-decay 0.01", "--no-use-dynamic"),
    ("--weight-decay 0.5", "--no-use-dynamic-batch-size", "0.01"),
    ("--loss-type sft_loss", "--train-backend megatron", "--engine"),
    ("--colocate --actor-num-gpus-per-node 4 --rollout-num-gpus 2", "--rollout-num-gpus 2", "num-gpus 4"),
])  # fmt: skip
def test_slimes_defaults_are_added_where_the_script_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, there: str, absent: str
) -> None:
    (tmp_path / "run.sh").write_text(f"python3 train.py --hf-checkpoint m {line}")
    assert convert([str(tmp_path / "run.sh")]) == 0
    out = capsys.readouterr().out
    assert there in out
    assert absent not in out.replace(there, "")


def test_a_script_becomes_a_recipe(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=re.escape("'${DATA_DIR}/train.jsonl' holds a variable of the shell")):
        convert([str(script), "--toml"])
    script.write_text(script.read_text().replace("${DATA_DIR}", "/data"))
    capsys.readouterr()
    assert launch.main(["convert", str(script), "--toml"]) == 0
    tables = tomllib.loads(capsys.readouterr().out)
    assert tables["data"]["prompt_data"] == ["/data/train.jsonl"]
    assert tables["rollout"]["rollout_batch_size"] == 32
    assert tables["sglang"]["sglang_args"] == {"cuda_graph_bs_decode": ["1", "2", "4", "6"]}


def test_a_recipe_has_what_recipes_and_environments_on_the_command_line_say(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read back as a recipe; null, which TOML has not, is refused."""
    script.write_text(script.read_text().replace("${DATA_DIR}", "/data"))
    given = ["--config", "guess_number", "environment.guess_number.workers=3"]
    assert launch.main(["convert", str(script), "--toml", *given, "stage.x.options={}"]) == 2
    capsys.readouterr()
    assert launch.main(["convert", str(script), "--toml", *given]) == 0
    (script.parent / "mine.toml").write_text(capsys.readouterr().out)
    config = load(["--config", str(script.parent / "mine.toml")]).config
    assert (config.environment[0].name, config.environment[0].workers) == ("guess_number", 3)
    assert config.data.prompt_data == ("/data/train.jsonl",)
    for null in (
        'environment=[{"name":"e","path":"a:B","options":{"a":[null]}}]',
        'environment.guess_number.options={"a":null}',
    ):
        assert launch.main(["convert", str(script), "--toml", *given, null]) == 2
        assert "options hold no null" in capsys.readouterr().err


def test_options_that_are_not_here_are_left_out_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what has no effect: settings of an evaluation that has no data, splits where there is nothing to split."""
    (tmp_path / "run.sh").write_text(
        "python3 train_async.py --hf-checkpoint m --use-wandb --wandb-project p --wandb-key secret "
        "--multimodal-keys {} --n-samples-per-eval-prompt 4 "
        "--custom-rm-path my_code.score --rollout-temperature 0.8 --tensor-model-parallel-size 1 --sequence-parallel "
        "--actor-num-nodes 2 --actor-num-gpus-per-node 4 --colocate"
    )
    assert launch.main(["convert", str(tmp_path / "run.sh")]) == 0
    out, report = capsys.readouterr()
    assert "--report-to wandb" in out
    assert "--project p" in out
    assert "secret" not in out
    assert "eval" not in out
    assert "--async-buffer-size 1" in out
    assert "--rollout-num-gpus 8" in out
    assert "--runner ray" in out, "its trainer is on two machines"
    assert "left out, not here: --multimodal-keys is no flag: prompts are text" in report
    assert "left out, not here: --wandb-key is no flag: everyone on a machine can read" in report
    assert "no effect beside the other options: --n-samples-per-eval-prompt --sequence-parallel" in report
    assert "see docs/slime.md: my_code.score" in report
