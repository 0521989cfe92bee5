"""Frozen engines before and at the start: where they are placed, under which topic, what is checked of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.schema import Config
from configs.schema.rollout import EngineConfig
from models.engines.serve import EngineServer
from models.tiny import make_tiny_checkpoint
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.graph import build
from pipeline.preflight.data import check_frozen, prepare, vocabulary
from pipeline.replica_specs import Placement
from stages.base import GenerateOptions, TrainOptions
from stages.chat.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("policy") / "model")


def make(policy: Path, *engines: str, **sections: Any) -> Config:
    values: dict[str, Any] = {"distill": {"use_opd": True}, "train": {"hf_checkpoint": str(policy)}, **sections}
    values["engine"] = {"frozen_engine": engines, **values.get("engine", {})}
    return msgspec.convert(values, Config)


async def check(config: Config) -> None:
    await check_frozen(config, load_tokenizer(config.train.hf_checkpoint))


def changed(source: Path, target: Path, change: Any) -> Path:
    """A copy of a checkpoint with another tokenizer.json."""
    shutil.copytree(source, target)
    content = json.loads((target / "tokenizer.json").read_text())
    change(content)
    (target / "tokenizer.json").write_text(json.dumps(content))
    return target


async def test_a_teacher_with_the_same_tokenizer_passes(policy: Path, tmp_path: Path) -> None:
    await check(make(policy, f"a={make_tiny_checkpoint(tmp_path / 'other', seed=3)}"))


async def test_a_teacher_may_know_more_tokens(policy: Path, tmp_path: Path) -> None:
    def more(content: Any) -> None:
        added = content["added_tokens"]
        added.append({**added[0], "id": 264, "content": "<|more|>"})

    await check(make(policy, f"a={changed(policy, tmp_path / 'more', more)}"))


async def test_a_teacher_that_reads_a_token_otherwise_is_refused(policy: Path, tmp_path: Path) -> None:
    def swap(content: Any) -> None:
        vocab = content["model"]["vocab"]
        first, second = sorted(vocab, key=vocab.__getitem__)[65:67]
        vocab[first], vocab[second] = vocab[second], vocab[first]

    other = changed(policy, tmp_path / "swapped", swap)
    with pytest.raises(UsageError, match=r"2 of 264 tokens differ, token 65 is 'A' to the policy, there 'B'") as error:
        await check(make(policy, f"a={other}"))
    assert f"--frozen-engine a={other}" in str(error.value)
    assert "choose a teacher with the same tokenizer" in str(error.value)
    await check(make(policy, f"a={other}", distill={"use_opd": False}))  # a judge may read as it likes
    await check(make(policy, f"a={other}", f"b={policy}", distill={"use_opd": True, "opd_teacher": ["b"]}))


async def test_a_teacher_that_lacks_tokens_is_refused(policy: Path, tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path / "characters", tokenizer="arithmetic")
    with pytest.raises(UsageError, match="its tokenizer is not the policy's"):
        await check(make(policy, f"a={other}"))


def test_vocabularies_of_other_forms(tmp_path: Path) -> None:
    assert vocabulary(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": [["<unk>", 0], ["a", -1.5]]}}')
    assert vocabulary(tmp_path) == {0: "<unk>", 1: "a"}
    (tmp_path / "tokenizer.json").write_text("{broken")
    assert vocabulary(tmp_path) is None


async def test_an_address_where_nothing_answers_is_one_sentence(policy: Path) -> None:
    with pytest.raises(UsageError, match=r"--frozen-engine far=http://127.0.0.1:9: no healthy engine answers there"):
        await check(make(policy, "far=http://127.0.0.1:9", distill={"use_opd": False}))


@pytest.mark.parametrize("engine", ["embedded", "simulated"])
async def test_a_running_engine_is_asked_how_it_splits_text(policy: Path, tmp_path: Path, engine: Any) -> None:
    settings = EngineConfig(engine=engine, engine_slots=4, engine_device="cpu")
    other = make_tiny_checkpoint(tmp_path / "characters", tokenizer="arithmetic")
    async with (
        EngineServer(settings, str(policy), max_context_len=None, seed=0) as same,
        EngineServer(settings, str(other), max_context_len=None, seed=0) as different,
    ):
        await check(
            make(policy, f"a={same.url}", f"b={different.url}", distill={"opd_teacher": ["a"], "use_opd": True})
        )
        with pytest.raises(UsageError, match=r"it splits a text into \[2, 3.*, the policy into \[49, 50"):
            await check(make(policy, f"b={different.url}"))


def test_checkpoints_get_paths_and_addresses_stay(policy: Path, tmp_path: Path) -> None:
    config = make(policy, "t=tiny", f"own={policy}", "far=http://localhost:1", data={"prompt_data": ["arithmetic"]})
    made = prepare(config, tmp_path).engine.frozen_engine
    assert made == (f"t={tmp_path / 'tiny'}", f"own={policy}", "far=http://localhost:1")
    assert (tmp_path / "tiny" / "config.json").is_file()
    with pytest.raises(UsageError, match=r"--frozen-engine t=no/such/dir: the checkpoint is 'no/such/dir'"):
        prepare(make(policy, "t=no/such/dir"), tmp_path)


def placed(config: Config, tmp_path: Path) -> Placement:
    rollout = msgspec.structs.replace(config.rollout, rollout_max_context_len=77)
    config = msgspec.structs.replace(config, rollout=rollout)
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        graph, train = build(config), TrainOptions()
        return Placement(config, rundir, graph, "id", model_path="m", train=train, vocab_size=None)


def test_engines_are_added_as_far_as_there_are_gpus(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = placed(make(policy), tmp_path)
    assert placement.lacks_gpus(9) is None, "on a CPU nobody has any"
    placement.engines = [msgspec.structs.replace(placement.engines[0], gpus=("0",))]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert placement.lacks_gpus(2) is None
    assert placement.lacks_gpus(-1) is None, "fewer engines"
    why = placement.lacks_gpus(3)
    assert why is not None
    assert "there is no GPU for another engine: 1 of the visible GPUs have one" in why


def test_frozen_engines_are_placed_beside_those_that_generate(policy: Path, tmp_path: Path) -> None:
    config = make(
        policy, "t=one", "far=http://localhost:1", "j=two", engine={"engine_port": 7000}, run={"scale": {"engine": 2}}
    )
    placement = placed(config, tmp_path)
    assert [(spec.name, spec.frozen, spec.port) for spec in placement.engines] == [
        ("engine-0", "", 7000),
        ("engine-1", "", 7001),
    ]
    running, *started = placement.frozen
    assert (running.name, running.frozen, running.external) == ("frozen-far", "far", "http://localhost:1")
    assert [(spec.name, spec.frozen, spec.model_path, spec.max_context) for spec in started] == [
        ("frozen-t", "t", "one", 77),
        ("frozen-j", "j", "two", 77),
    ]
    assert not {spec.port for spec in placement.frozen} & {7000, 7001}
    [generate] = [spec for spec in placement.replicas() if spec.stage == "generate"]
    assert generate.built_in == GenerateOptions(max_context=77)


def test_a_supervised_phase_starts_none(policy: Path, tmp_path: Path) -> None:
    placement = placed(make(policy, "t=one", train={"loss_type": "sft_loss"}), tmp_path)
    assert placement.frozen == []
