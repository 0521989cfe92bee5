"""Mistakes that people make, planted one at a time: a plan refuses each, or says that it has not looked.

All in one process, by the function behind the command line.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

import launch
from models.tiny import TinyRecipe, make_tiny_checkpoint
from pipeline.facts.run_directory import RunDir
from tests.other_programs import free_port

GOOD = {
    "--hf-checkpoint": "model", "--prompt-data": "rows.jsonl", "--label-key": "label", "--rm-type": "exact",
    "--num-rollout": "4", "--rollout-batch-size": "4", "--n-samples-per-prompt": "4", "--lr": "1e-4",
    "--rollout-max-response-len": "6", "--run-dir": "runs/one",
}  # fmt: skip
ROW = '{"input": "1+1=", "label": "2"}\n'
CHAT = '{"input": [{"role": "user", "content": "1+1="}], "label": "2"}\n'
INDEX = '{"weight_map": {"model.embed_tokens.weight": "model-00001.safetensors"}}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("made") / "model", TinyRecipe(tokenizer="arithmetic", seed=1))


@pytest.fixture
def place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which GOOD can be planned."""
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("SLUICE_SGLANG_PYTHON", str(tmp_path / "none" / "python"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


@pytest.fixture
def port() -> Iterator[int]:
    """A port in use, behind one that is free: both below those that the system gives to connections."""
    while True:
        before = free_port()
        with suppress(OSError), socket.create_server(("127.0.0.1", before + 1)):
            yield before + 1
            return


Plan = Callable[..., tuple[int, Any]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    def planned(*flags: str) -> tuple[int, Any]:
        capsys.readouterr()
        good = [text for flag, value in GOOD.items() if flag not in flags for text in (flag, value)]
        code = launch.main([*good, *flags, "--dry-run", "--json"])
        shown = capsys.readouterr()
        assert "RuntimeWarning" not in shown.err
        return code, json.loads(shown.out)

    return planned


def test_without_a_mistake_it_is_planned_and_nothing_is_left(place: Path, plan: Plan) -> None:
    before = sorted(place.rglob("*"))
    code, found = plan()
    assert (code, found["left_out"]) == (0, [])
    assert sorted(place.rglob("*")) == before


def write(name: str, text: str) -> Callable[[Path], None]:
    def do(place: Path) -> None:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)

    return do


def remove(*names: str) -> Callable[[Path], None]:
    return lambda place: [(place / name).unlink() for name in names] and None


def spoil(change: Callable[[bytearray], Any]) -> Callable[[Path], None]:
    """The bytes of the weights."""

    def do(place: Path) -> None:
        data = bytearray((place / "model" / "model.safetensors").read_bytes())
        change(data)
        (place / "model" / "model.safetensors").write_bytes(data)

    return do


def flip(at: int, mask: int) -> Callable[[Path], None]:
    return spoil(lambda data: data.__setitem__(at, data[at] ^ mask))


def says(**keys: object) -> Callable[[Path], Any]:
    """Other values in the model's config.json."""

    def do(place: Path) -> None:
        file = place / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return do


def both(**keys: object) -> Callable[[Path], Any]:
    """A second checkpoint, with other values in its config.json."""

    def do(place: Path) -> None:
        shutil.copytree(place / "model", place / "other")
        file = place / "other" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return do


def without_a_matrix(place: Path) -> None:
    file = place / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)


def adapter(place: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (place / "model" / name).rename(place / "model" / f"adapter_{name}")


def other_model(place: Path) -> None:
    make_tiny_checkpoint(place / "other", TinyRecipe(tokenizer="bytes", seed=1))


def other_tokenizer(place: Path) -> None:
    other_model(place)
    shutil.copy(place / "other" / "tokenizer.json", place / "model" / "tokenizer.json")


def environment(name: str, rest: str = "") -> Callable[[Path], Any]:
    table = f'[[environment]]\nname = "e"\npath = "my_code:{name}"\n{rest}\n'
    return lambda place: (write("my_code.py", CODE)(place), write("a.toml", table)(place))


def stage(name: str, after: str) -> Callable[[Path], Any]:
    table = f'[[stage]]\nname = "mine"\npath = "my_code:{name}"\nafter = "{after}"\n'
    return lambda place: (write("my_code.py", CODE)(place), write("a.toml", table)(place))


def used(place: Path) -> Any:
    return RunDir(place / "runs" / "one").open(resume=False)


def nothing(_: Path) -> None:
    return None


TOML = '[train]\nlr = "fast"\n'
STAGE = '[[stage]]\nname = "broken"\npath = "no_such_module:Stage"\nafter = "reward"\n'
CODE = """
def pair(response, label):
    return 1.0

def tool(x):
    return x

class NoStep:
    async def reset(self, task): ...

class Sums(NoStep):
    async def step(self, turn): ...

class Model:
    def __init__(self, path): ...
"""
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
LONG = '{"input": "1+1+1+1+1+1+1+1+1+1=", "label": "10"}\n'
NO_SERVER = "http://127.0.0.1:1"

# What is done, the flags, and words of the refusal: the key, the value, the rule or the cure.
MISTAKES: dict[str, tuple[Callable[[Path], Any], str, list[str]]] = {
    # weights and tokenizer
    "weights missing": (remove("model/model.safetensors"), "", ["--hf-checkpoint model", "holds no *.safetensors"]),
    "weights cut": (spoil(lambda d: d.__delitem__(slice(-100, None))), "", ["--hf-checkpoint model", "fetch"]),
    "weights cut in the header": (spoil(lambda d: d.__delitem__(slice(40, None))), "", ["--hf-checkpoint", "fetch"]),
    "a byte flipped in the length": (flip(7, 0x40), "", ["--hf-checkpoint model", "header too large", "fetch"]),
    "a byte flipped in the header": (flip(8, 0x40), "", ["--hf-checkpoint model", "invalid JSON", "fetch"]),
    "a file of the index missing": (
        lambda p: (remove("model/model.safetensors")(p), write("model/model.safetensors.index.json", INDEX)(p)),
        "", ["--hf-checkpoint model", "lacks model-00001.safetensors", "give a complete checkpoint"],
    ),
    "a file of the index cut": (
        lambda p: (
            spoil(lambda d: d.__delitem__(slice(-100, None)))(p),
            write("model/model.safetensors.index.json", INDEX.replace("-00001", ""))(p),
        ),
        "", ["--hf-checkpoint model", "model.safetensors cannot be read", "fetch the checkpoint again"],
    ),
    "index is no JSON": (
        write("model/model.safetensors.index.json", "{"), "", ["--hf-checkpoint model", "fetch the checkpoint again"],
    ),
    "weights of the reference missing": (
        lambda p: (shutil.copytree(p / "model", p / "ref"), remove("ref/model.safetensors")(p)),
        "--use-kl-loss --kl-loss-coef 0.1 --ref-load ref", ["--ref-load ref", "holds no *.safetensors"],
    ),
    "no tokenizer": (
        remove("model/tokenizer.json", "model/tokenizer_config.json"), "", ["hf_checkpoint 'model'", "no tokenizer"],
    ),
    "tokenizer broken": (write("model/tokenizer.json", "{"), "", ["tokenizer.json", "save the tokenizer again"]),
    "tokenizer's configuration broken": (
        write("model/tokenizer_config.json", "{"), "", ["tokenizer_config.json", "is not valid JSON"],
    ),
    "no model there": (nothing, "--hf-checkpoint ./modle", ["--hf-checkpoint", "./modle", "correct the path"]),
    "a model of the hub": (nothing, "--hf-checkpoint nobody/nothing", ["left out", "nobody/nothing", "at the start"]),
    "no chat template for chats": (
        write("rows.jsonl", CHAT), "", ["chat template", "rows.jsonl", "--chat-template-path"],
    ),
    "no chat template to apply": (
        nothing, "--apply-chat-template --prompt-data arithmetic", ["apply_chat_template", "--chat-template-path"],
    ),
    "template is no Jinja": (
        write("bad.jinja", "{% for %}"), "--chat-template-path bad.jinja", ["bad.jinja", "--chat-template-path"],
    ),
    # data
    "no data there": (nothing, "--prompt-data rwos.jsonl", ["--prompt-data", "rwos.jsonl", "correct the path"]),
    "rows are no JSON": (write("rows.jsonl", '{"input": "x"\n'), "", ["no usable prompt in rows.jsonl"]),
    "prompts under another key": (
        write("rows.jsonl", '{"prompt": "1+1=", "label": "2"}\n'), "", ["no usable prompt", "'input'"],
    ),
    "labels under another key": (nothing, "--label-key lable", ["label_key is 'lable'", "label"]),
    "a grader that a row names": (
        write("rows.jsonl", ROW.replace("}", ', "metadata": {"rm_type": "mathh"}}')), "",
        ["rm_type 'mathh'", "did you mean 'math'?"],
    ),
    "a slice of nothing": (nothing, "--prompt-data rows.jsonl@[5:9]", ["rows.jsonl@[5:9]"]),
    "two held-out sets of one name": (
        nothing, "--eval-interval 1 --eval-prompt-data h=rows.jsonl h=rows.jsonl", ["--eval-prompt-data", "'h'"],
    ),
    # the run directory
    "a file in place of the run directory": (nothing, "--run-dir file", ["/file cannot be used", "--run-dir"]),
    "a file above the run directory": (nothing, "--run-dir file/a/b", ["/file/a/b cannot be used", "--run-dir"]),
    "a run directory with too long a name": (
        nothing, f"--run-dir {300 * 'x'}", ["cannot be used: ", "File name too long", "--run-dir"],
    ),
    "a place where nothing can be made": (nothing, "--run-dir /proc/run", ["/proc/run cannot be used", "--run-dir"]),
    "a run is there": (
        write("runs/one/config.toml", "[run]\n"), "", ["--run-dir", "a run is already there", "--resume"],
    ),
    "another run has it": (used, "", ["--run-dir", "in use by another run", "choose another"]),
    "nothing to resume": (nothing, "--resume nowhere", ["--resume", "nowhere"]),
    # devices, addresses, ports
    "no such device": (nothing, "--train-device cuda", ["--train-device is cuda", "0 GPUs", "auto or cpu"]),
    "no such device of the engine": (nothing, "--engine-device cuda:3", ["--engine-device is cuda:3", "auto or cpu"]),
    "a device that is none": (nothing, "--train-device gpu", ["--train-device", "'gpu'", "cuda:N"]),
    "no cluster there": (
        nothing, "--runner ray --ray-address 127.0.0.1:1", ["--ray-address 127.0.0.1:1", "no server answers"],
    ),
    "no engine there": (
        nothing, f"--engine sglang --rollout-external-engine-addrs {NO_SERVER}",
        ["--rollout-external-engine-addrs", NO_SERVER, "start it first"],
    ),
    "no router there": (
        nothing, f"--engine sglang --router-address {NO_SERVER}", ["--router-address", NO_SERVER, "start it first"],
    ),
    "no frozen engine there": (
        nothing, f"--frozen-engine j={NO_SERVER} --judge-engine j --rm-type judge",
        ["--frozen-engine", NO_SERVER, "start it first"],
    ),
    "no SGLang here": (nothing, "--engine sglang", ["left out", "SGLang"]),
    "the engines' port is taken": (nothing, "--engine-port {port}", ["--engine-port", "{port}", "choose another port"]),
    "the second engine's port is taken": (
        nothing, "--engine-port {before} --scale engine=2", ["--engine-port", "{port}", "choose another port"],
    ),
    "the port of the metrics is taken": (
        nothing, "--prometheus-port {port}", ["--prometheus-port", "{port}", "choose another port"],
    ),
    # functions
    "a module that is not there": (
        nothing, "--custom-rm-path nowhere:score", ["--custom-rm-path", "'nowhere'", "PYTHONPATH"],
    ),
    "a function of another signature": (
        write("my_code.py", CODE), "--custom-rm-path my_code:pair", ["my_code:pair", "response, label, metadata"],
    ),
    "a module with a mistake": (
        write("my_code.py", "def score(:\n"), "--custom-rm-path my_code:score", ["my_code", "SyntaxError"],
    ),
    "an import path that is none": (
        nothing, "--custom-rm-path my/code.py", ["--custom-rm-path", "my/code.py", "package.module:name"],
    ),
    "a stage that is nowhere": (write("a.toml", STAGE), "--config a.toml", ["stage.broken.path", "no_such_module"]),
    # what the weights are
    "no config.json": (remove("model/config.json"), "", ["--hf-checkpoint is 'model'", "directory with config.json"]),
    "config.json is no JSON": (write("model/config.json", "{"), "", ["--hf-checkpoint model", "is not JSON"]),
    "config.json is a list": (write("model/config.json", "[]"), "", ["--hf-checkpoint model", "holds no object"]),
    "a model that the engine does not know": (
        says(architectures=["GPT2LMHeadModel"]), "", ["--hf-checkpoint model", "GPT2LMHeadModel", "with SGLang"],
    ),
    "quantised weights": (
        says(quantization_config={"quant_method": "fp8"}), "",
        ["--hf-checkpoint model", "quantization_config", "with SGLang"],
    ),
    "a policy in float8": (
        says(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}), "",
        ["--hf-checkpoint is 'model'", "in float8", "give the checkpoint in bfloat16, and this one as --engine"],
    ),
    "engines with another model": (
        both(hidden_size=64), "--engine-checkpoint other", ["--engine-checkpoint is 'other'", "hidden (64, not 96)"],
    ),
    "engines with weights that cannot be read": (
        both(quantization_config={"quant_method": "awq"}), "--engine-checkpoint other",
        ["--engine-checkpoint other", "quantization_config", "float8 by blocks"],
    ),
    "engines with a checkpoint that is nowhere": (
        nothing, "--engine-checkpoint ./none", ["--engine-checkpoint is './none'", "no such directory"],
    ),
    "config.json of another width": (
        says(hidden_size=64), "",
        ["--hf-checkpoint model", "embed_tokens.weight has shape [32, 96] instead of [32, 64]"],
    ),
    "config.json of other heads": (
        says(num_attention_heads=3), "",
        ["q_proj.weight has shape [96, 96] instead of [72, 96]", "give the config.json"],
    ),
    "config.json of fewer layers": (
        says(num_hidden_layers=2), "", ["it says 2 layers, and they have more", "give the config.json"],
    ),
    "config.json of more layers": (
        says(num_hidden_layers=4), "", ["model.layers.3.self_attn.q_proj.weight is missing", "fetch the checkpoint"],
    ),
    "a matrix missing": (without_a_matrix, "", ["model.layers.1.mlp.up_proj.weight is missing"]),
    "a pointer of Git LFS": (write("model/model.safetensors", POINTER), "", ["--hf-checkpoint model", "fetch"]),
    "weights of torch for the embedded engine": (
        lambda p: (p / "model" / "model.safetensors").rename(p / "model" / "pytorch_model.bin"),
        "", ["--hf-checkpoint model", "holds no *.safetensors"],
    ),
    "an adapter in place of a model": (adapter, "", ["--hf-checkpoint is 'model'", "directory with config.json"]),
    "a file in place of the directory": (
        nothing, "--hf-checkpoint model/model.safetensors", ["--hf-checkpoint", "is a directory with config.json"],
    ),
    "the tokenizer of another model": (
        other_tokenizer, "", ["--hf-checkpoint model", "tokens up to 255", "vocab_size 32", "tokenizer"],
    ),
    "a reference with another tokenizer": (
        other_model, "--use-kl-loss --kl-loss-coef 0.1 --ref-load other",
        ["--ref-load is 'other'", "whose token 0 is", "policy's tokenizer"],
    ),
    "no critic there": (
        nothing, "--advantage-estimator ppo --critic-load ./critc", ["--critic-load is './critc'", "correct the path"],
    ),
    "no teacher there": (
        nothing, "--frozen-engine t=./teachr --use-opd", ["--frozen-engine t is './teachr'", "correct the path"],
    ),
    "a teacher with another tokenizer": (
        other_model, "--frozen-engine t=other --use-opd", ["--frozen-engine t=other", "same tokenizer"],
    ),
    "a teacher of the hub": (
        nothing, "--frozen-engine t=nobody/nothing --use-opd", ["left out", "nobody/nothing", "at the start"],
    ),
    "adapters of no module": (
        nothing, "--train-backend fsdp --lora-rank 4 --lora-target-modules q_porj",
        ["--lora-target-modules", "'q_porj'", "did you mean q_proj?"],
    ),
    "heads that do not divide": (
        nothing, "--train-backend megatron --tensor-model-parallel-size 3 --actor-num-gpus-per-node 3",
        ["--tensor-model-parallel-size is 3", "4 attention heads", "set it to 2"],
    ),
    # more of the data
    "an empty file": (write("rows.jsonl", ""), "", ["'rows.jsonl'", "no rows"]),
    "a CSV file": (write("a.csv", "input,label\n"), "--prompt-data a.csv", ["'a.csv'", "'.csv'", "JSONL"]),
    "a list of rows": (
        write("a.json", f"[{ROW.strip()}]"), "--prompt-data a.json",
        ["no usable prompt in a.json", "the row is a list"],
    ),
    "a prompt that is no text": (write("rows.jsonl", '{"input": 3, "label": "2"}\n'), "", ["'input' is a number"]),
    "metadata that is no object": (
        write("rows.jsonl", ROW.replace("}", ', "metadata": 3}')), "", ["'metadata' is a number", "must be an object"],
    ),
    "no held-out set there": (
        nothing, "--eval-interval 1 --eval-prompt-data h=evl.jsonl", ["--eval-prompt-data", "evl.jsonl", "correct"],
    ),
    "a held-out set without labels": (
        write("eval.jsonl", '{"input": "1+2="}\n'), "--eval-interval 1 --eval-prompt-data h=eval.jsonl",
        ["label_key is 'label'", "eval.jsonl"],
    ),
    "prompts longer than the context": (
        write("rows.jsonl", LONG), "--rollout-max-context-len 12",
        ["no prompt of rows.jsonl", "at most 11 tokens", "--rollout-max-context-len"],
    ),
    "prompts longer than their bound": (
        write("rows.jsonl", LONG), "--rollout-max-prompt-len 9", ["at most 9 tokens", "--rollout-max-prompt-len"],
    ),
    "code in the data": (
        write("rows.jsonl", ROW.replace("}", ', "metadata": {"rm_type": "my_code:pair"}}')), "",
        ["metadata.rm_type", "'my_code:pair'", "--trust-data-code"],
    ),
    "saved batches that are not there": (
        nothing, "--load-debug-rollout-data b-{{rollout_id}}.bin", ["--load-debug-rollout-data", "no b-0.bin"],
    ),
    "saved batches that are none": (
        write("b.bin", "?"), "--load-debug-rollout-data b.bin", ["--load-debug-rollout-data", "b.bin", "save it again"],
    ),
    # what is written later
    "copies of checkpoints where nothing can be written": (
        nothing, "--save-interval 1 --save-hf file/a/{{step}}", ["--save-hf is 'file/a/{{step}}'", "another place"],
    ),
    "batches saved where nothing can be written": (
        nothing, "--save-debug-rollout-data file/{{rollout_id}}",
        ["--save-debug-rollout-data is 'file'", "another place"],
    ),
    "training data saved where nothing can be written": (
        nothing, "--save-debug-train-data file/{{rollout_id}}", ["--save-debug-train-data is 'file'", "another place"],
    ),
    "differences where nothing can be written": (
        nothing, "--update-weight-transport delta --update-weight-delta-dir /proc/w",
        ["--update-weight-delta-dir is '/proc/w'", "another place"],
    ),
    # more of addresses
    "one port for two": (
        nothing, "--engine-port {before} --prometheus-port {before}",
        ["--prometheus-port is {before}", "--engine-port", "choose another port"],
    ),
    "an address of a cluster that is none": (
        nothing, "--runner ray --ray-address head", ["--ray-address is 'head'", "auto or host:port"],
    ),
    "no file with the token": (
        nothing, f"--engine sglang --router-address {NO_SERVER} --rollout-external-engine-token-file no.token",
        ["no.token", "name the file"],
    ),
    # more of functions
    "a class in place of a function": (
        write("my_code.py", CODE), "--custom-rm-path my_code:Model",
        ["my_code:Model", "is a class", "mine = Model(...).METHOD"],
    ),
    "a file without the function": (
        write("my_code.py", CODE), "--custom-rm-path my_code.py", ["--custom-rm-path is my_code.py", "FILE.py:NAME"],
    ),
    "an environment without step": (
        environment("NoStep"), "--config a.toml --prompt-data e", ["environment.e", "NoStep has no 'async def step'"],
    ),
    "an environment of other options": (
        environment("Sums", "options = { size = 3 }"), "--config a.toml --prompt-data e",
        ["environment.e", "Sums does not take these options", "size"],
    ),
    "no interpreter for an environment": (
        environment("Sums", 'python = "no/python"'), "--config a.toml --prompt-data e",
        ["environment.e.python is 'no/python'", "give the path"],
    ),
    "a tool that is not there": (write("my_code.py", CODE), "--tools my_code:tol", ["'tol'", "check the name"]),
    "a tool that is not async": (write("my_code.py", CODE), "--tools my_code:tool", ["my_code:tool", "make it 'async"]),
    "a class that is no stage": (
        stage("Model", "reward"), "--config a.toml", ["[[stage]]", "'my_code:Model'", "derive Model from stages.base"],
    ),
    "a stage behind none": (stage("Model", "rewards"), "--config a.toml", ["stage.mine.after", "did you mean reward?"]),
    "no prompt for the judge": (
        nothing, "--frozen-engine j=model --judge-engine j --rm-type judge --judge-prompt-path no.txt",
        ["--judge-prompt-path is 'no.txt'", "correct the path"],
    ),
    "a reward model without address": (nothing, "--rm-type remote", ["rm_type remote", "--rm-url"]),
    # more of settings
    "a batch that does not divide": (nothing, "--global-batch-size 5", ["--global-batch-size 5", "16 rollouts"]),
    "a group of one": (nothing, "--n-samples-per-prompt 1", ["--n-samples-per-prompt is 1", "at least 2"]),
    "evaluations of nothing": (nothing, "--eval-interval 1", ["--eval-interval is 1", "--eval-prompt-data"]),
    "a context beyond the model's": (
        nothing, "--rollout-max-context-len 99999", ["--rollout-max-context-len is 99999", "1024 tokens", "lower it"],
    ),
    # settings
    "a flag with a typo": (nothing, "--num-rolout 3", ["--num-rolout", "did you mean --num-rollout?"]),
    "a recipe with a typo": (nothing, "--config quickstrat", ["--config", "'quickstrat'", "quickstart"]),
    "a key with a typo in a recipe": (
        write("a.toml", "[train]\nlrr = 1\n"), "--config a.toml", ["train.lrr in a.toml", "did you mean train.lr"],
    ),
    "a value of another kind in a recipe": (write("a.toml", TOML), "--config a.toml", ["train.lr in a.toml", "'fast'"]),
    "a recipe that is no TOML": (write("a.toml", "[train\n"), "--config a.toml", ["a.toml"]),
    "a number below its bound": (nothing, "--lr -1", ["--lr is '-1'", "a number >= 0"]),
    "batches that do not come out": (
        nothing, "--global-batch-size 7 --num-steps-per-rollout 3", ["global_batch_size", "num_steps_per_rollout"],
    ),
    "a bound against the mode": (nothing, "--mode sync --max-staleness 3", ["--max-staleness", "3", "--mode async"]),
    "a filter with a typo": (
        nothing, "--dynamic-sampling-filter nonzero_sd", ["--dynamic-sampling-filter", "nonzero_sd", "nonzero_std"],
    ),
    "a stage that is not there is scaled": (nothing, "--scale rewards=2", ["--scale rewards=2", "reward"]),
    "responses longer than the context": (
        nothing, "--rollout-max-context-len 4", ["--rollout-max-response-len", "--rollout-max-context-len 4"],
    ),
}  # fmt: skip


# transformers is asked for a tokenizer, or Python is started.
SLOW = (
    "no tokenizer", "an environment of other options", "no interpreter for an environment", "a tool that is not async",
    "an environment without step", "a class that is no stage", "a teacher with another tokenizer",
)  # fmt: skip


@pytest.mark.parametrize("mistake", [pytest.param(m, marks=pytest.mark.slow if m in SLOW else []) for m in MISTAKES])
def test_each_mistake_is_refused_with_its_cure(mistake: str, place: Path, plan: Plan, port: int) -> None:
    do, flags, words = MISTAKES[mistake]
    held = do(place)
    numbers = {"port": str(port), "before": str(port - 1)}
    try:
        code, found = plan(*flags.format(**numbers).split())
    finally:
        if mistake == "another run has it":
            held.close()
    if words[0] == "left out":
        assert code == 0, found
        [shown] = found["left_out"]
        words = words[1:]
    else:
        assert (code, found["error"]["exit_code"]) == (2, 2)
        shown = " | ".join(fault["message"] for fault in found["error"]["faults"])
        assert len(found["error"]["faults"]) <= 2, shown
    for word in words:
        assert word.format(**numbers) in shown, (word, shown)
    assert not (place / "runs" / "one" / "logs").exists() or mistake == "another run has it"


def test_the_text_of_a_plan_says_what_was_left_out(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [text for pair in (GOOD | {"--hf-checkpoint": "nobody/nothing"}).items() for text in pair]
    assert launch.main([*flags, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "\n\nnot looked at\n  weights and tokenizer of nobody/nothing: " in text


def test_weights_that_other_readers_take_or_nobody_reads_are_no_fault(place: Path, plan: Plan) -> None:
    (place / "model" / "model.safetensors").rename(place / "model" / "pytorch_model.bin")
    assert plan("--engine", "sglang")[0] == 0
    (place / "model" / "pytorch_model.bin").unlink()
    assert plan("--engine", "sglang")[0] == 2
    code, found = plan("--train-backend", "simulated", "--engine", "simulated", "--loss-type", "policy_loss")
    assert (code, found["left_out"]) == (0, [])
