"""Engines that run already: checked, dropped while they are away, taken back, never ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from fake_servers import Told, configured, eventually, outside
from msgspec.structs import replace

from configs.schema import Config
from configs.schema.rollout import EngineConfig
from models.engines.access_token import Token, TokenFile
from models.engines.protocol import ModelInfo
from models.engines.serve import EngineServer
from models.errors import EngineError, EngineRefused, EngineTimeout
from models.tiny import TinyRecipe, make_tiny_checkpoint
from pipeline.errors import UsageError
from pipeline.facts.run_directory import EngineSpec, RunDir, read_fleet
from pipeline.facts.stats import outage_text
from pipeline.graph import Placement
from pipeline.hosts.local_launcher import LocalLauncher
from pipeline.preflight.data import check_frozen, prepare, vocabulary
from pipeline.record.recorder import Recorder
from pipeline.supervise import external_servers
from pipeline.supervise.external_servers import ExternalEngine, ExternalRouter, PolicyConfig, differs
from pipeline.supervise.lifecycle import Lifecycle
from pipeline.supervise.restarts import Restarts, Supervision
from pipeline.supervise.servers import Servers
from stages.base import GenerateOptions, TrainOptions
from stages.chat.tokenizer import load_tokenizer
from stages.topic_values import Complaint, EngineEntry, RouterAddress, addresses
from tests.other_programs import served_app
from tests.transport.memory_link import MemoryNetwork, MemoryNode


def external(reported: Told, port: int, model: Path, **health: float) -> ExternalEngine:
    config = configured(**health)
    spec = EngineSpec("engine-0", config.engine, str(model), None, 0, 0, external=f"http://127.0.0.1:{port}")
    return ExternalEngine(spec, reported, config.health)


def frozen_spec(config: Config, name: str, address: str) -> EngineSpec:
    return EngineSpec(f"frozen-{name}", config.engine, "", None, 0, 0, frozen=name, external=address)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["Tiny"], "vocab_size": 32}')
    return tmp_path


@contextlib.asynccontextmanager
async def watched(run: Callable[[], Coroutine[None, None, None]]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run())
        yield
        task.cancel()


@pytest.mark.slow
async def test_an_external_engine_is_dropped_while_it_is_away_and_taken_back(
    fake: Path, policy: Path, port: int
) -> None:
    reported = Told()
    async with watched(external(reported, port, policy).run):
        async with outside(fake, port) as process:
            assert (await reported.until("up"))[3:] == ("0", "9.9")
            os.kill(process.pid, signal.SIGSTOP)
            away = await reported.until("away")
            assert "2 failed health checks in a row (/model_info gave no answer" in away[2]
            assert process.returncode is None, "it is not ours to end"
            os.kill(process.pid, signal.SIGCONT)
            assert (await reported.until("up", 2))[3] == "1"
        await reported.until("away", 2)
        async with outside(fake, port, "Other"):
            await eventually(lambda: any("it is left out" in line for line in reported.lines))
            assert [e[0] for e in reported.events] == ["up", "away", "up", "away"]
        async with outside(fake, port):
            assert (await reported.until("up", 3))[3] == "2"
    left_out = [line for line in reported.lines if "left out" in line]
    assert left_out == [
        f"engine-0: http://127.0.0.1:{port} is back, but it serves a Other, the policy is a Tiny; it is left out"
    ]


async def test_an_external_engine_that_takes_no_weights_counts_as_away_and_is_tried_again(
    fake: Path, policy: Path, port: int
) -> None:
    reported = Told()
    async with outside(fake, port) as process, watched(external(reported, port, policy).run):
        await reported.until("up")
        reported.complaints["engine-0", 0] = "5 failures in a row: no room for them"
        assert (await reported.until("away"))[2] == "5 failures in a row: no room for them"
        assert (await reported.until("up", 2))[3] == "1"
        assert process.returncode is None, "it is not ours to end"
    assert any("answers again" in line for line in reported.lines)


async def test_an_external_engine_that_answers_late_is_asked_again(policy: Path) -> None:
    """A busy server that says too late what it serves does not serve another model for that."""
    asked = Counter[str]()

    async def answer(request: web.Request) -> web.Response:
        asked[request.path] += 1
        if request.path == "/server_info" and asked[request.path] <= 3:
            await asyncio.sleep(60)
        return web.json_response({"architectures": ["Tiny"], "vocab_size": 32, "version": "9.9"})

    app = web.Application()
    app.router.add_get("/{page}", answer)
    async with served_app(app, shutdown_timeout=0.1, handler_cancellation=True) as url:
        reported = Told()
        engine = external(reported, int(url.rpartition(":")[2]), policy, rollout_health_check_timeout=0.3)
        async with watched(engine.run):
            assert await reported.until("up") == ("up", "engine-0", url, "0", "9.9")
    assert asked["/server_info"] >= 4


async def test_an_external_engine_of_another_model_is_refused(fake: Path, policy: Path, port: int) -> None:
    async with outside(fake, port, "Other"):
        with pytest.raises(UsageError, match="serves a Other, the policy is a Tiny; start it with the checkpoint"):
            await external(Told(), port, policy).run()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("engine", "--rollout-external-engine-addrs .* no healthy engine answers .* start it"),
        ("frozen", "--frozen-engine judge=http://127.0.0.1:PORT: no healthy engine answers there .* give a checkpoint"),
        ("router", "--router-address .*: no router answers there .* one starts with the run"),
    ],
)
async def test_what_is_not_there_is_reported_with_its_own_flag_and_the_cure(
    kind: str, words: str, policy: Path, port: int
) -> None:
    config = configured(rollout_health_check_first_wait=0.3)
    address = f"http://127.0.0.1:{port}"
    frozen = ExternalEngine(frozen_spec(config, "judge", f"{address}/"), Told(), config.health)
    watched = {
        "engine": external(Told(), port, policy, rollout_health_check_first_wait=0.3),
        "frozen": frozen,
        "router": ExternalRouter("sglang", address, Told(), config.health),
    }[kind]
    with pytest.raises(UsageError, match=words.replace("PORT", str(port))):
        await watched.run()


def test_models_are_distinguished_by_what_is_known() -> None:
    policy, tiny = PolicyConfig(("Tiny",), 32, 64, 2), ModelInfo(architectures=["Tiny"])
    assert differs(policy, tiny, None) is differs(policy, ModelInfo(), None) is None
    wide = msgspec.structs.replace(tiny, vocab_size=64)
    assert differs(policy, wide, None) == "its vocab_size is 64, the policy's is 32"
    other = PolicyConfig(("Tiny",), 32, hidden_size=128)
    assert differs(policy, tiny, other) == "its hidden_size is 128, the policy's is 64"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "path"), [("frozen", "/model_info"), ("router", "/health")])
async def test_what_is_given_by_address_is_dropped_while_it_is_away_and_comes_back_anew(
    kind: str, path: str, fake: Path, port: int
) -> None:
    """A frozen engine may serve any model; a router that comes back may have lost its workers."""
    reported, config = Told(), configured()
    address = f"http://127.0.0.1:{port}"
    frozen = ExternalEngine(frozen_spec(config, "judge", address), reported, config.health)
    router = ExternalRouter("smg", address + "/", reported, config.health)
    watch, up = {
        "frozen": (frozen.run, ("up", "frozen-judge", address, "0", "9.9")),
        "router": (router.run, ("router", "smg", address, "0", "")),
    }[kind]
    async with outside(fake, port, "Other") as process, watched(watch):
        assert await reported.until(up[0]) == up
        reported.is_loading = True  # nobody gives it weights: that is no excuse for its scheduler
        os.kill(process.pid, signal.SIGSTOP)
        assert f"{path} gave no answer" in (await reported.until("away"))[2]
        assert process.returncode is None, "it is not ours to end"
        os.kill(process.pid, signal.SIGCONT)
        assert (await reported.until(up[0], 2))[3] == "1"
    assert kind == "frozen" or reported.lines == [f"router: {address} answers again"]


def with_addresses(config: Config) -> Config:
    return replace(
        config,
        engine=replace(config.engine, frozen_engine=("judge=http://j:1", "own=/models/own")),
        router=replace(config.router, router="smg", router_address="http://r:2"),
    )


async def test_what_was_given_by_address_is_watched_by_the_fleet(rundir: RunDir) -> None:
    config = with_addresses(configured())
    restarts = Restarts(Told(), 0)
    specs = [frozen_spec(config, "judge", "http://j:1")]
    token = TokenFile("f", Token("of-others"))
    placement: Any = SimpleNamespace(config=config, external_token=token, engines=[])
    none: Any = None  # nothing here needs topic or entry
    shared = Supervision(placement, none, LocalLauncher(rundir), restarts, none)
    found = await Servers(shared, in_process=False).supervisors(specs)
    engine, router = found.values()
    assert isinstance(engine, ExternalEngine)
    assert (engine.spec.name, engine.spec.frozen, engine.url) == ("frozen-judge", "judge", "http://j:1")
    assert isinstance(router, ExternalRouter)
    assert (router.kind, router.url, router.token) == ("smg", "http://r:2", Token("of-others"))


async def test_an_engines_gpus_are_told_by_their_places_among_the_visible_ones(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the engines stage, which sees them all, counts them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-x,7,GPU-y")
    async with MemoryNode("run", "test", MemoryNetwork()) as node:
        topic, config = await node.topic_server("topic"), configured()
        announcer = Lifecycle(topic, {}, Recorder(config, rundir))
        for index, gpus in enumerate([("7", "GPU-x"), ()]):
            spec = EngineSpec(f"engine-{index}", config.engine, "", None, 0, 0, gpus=gpus)
            announcer.engine_up(spec, "http://e:3", 0, "0.5.23")
        assert [address.gpus for address in addresses(topic).values()] == [(2, 1), ()]


async def test_what_is_away_leaves_the_topic_and_the_words_say_what_follows(rundir: RunDir) -> None:
    config = with_addresses(configured())
    lines: list[str] = []
    async with MemoryNode("run", "test", MemoryNetwork()) as node:
        topic = await node.topic_server("topic")
        recorder = Recorder(config, rundir)
        recorder.lines = lines.append
        announcer = Lifecycle(topic, {}, recorder)
        spec = frozen_spec(config, "judge", "http://j:1")
        announcer.engine_up(spec, "http://j:1", 0, "0.5.23")
        announcer.router_up(RouterAddress("smg", "http://r:2", 0), "", "")
        assert sorted(topic.items("")) == ["engine/frozen-judge", "router"]
        assert addresses(topic, "judge")["frozen-judge"].url == "http://j:1"
        assert read_fleet(rundir)["frozen-judge"].role == "frozen"
        announcer.away("frozen", spec.name, spec.external, "2 failed health checks in a row (refused)")
        topic.publish("router_state", b"")
        announcer.away("router", "router", "http://r:2", "a failed health check (refused)")
        assert sorted(topic.items("")) == []
        engine = EngineSpec("engine-0", config.engine, "", None, 0, 0, external="http://e:3")
        announcer.engine_up(engine, "http://e:3", 0, "0.5.23")
        assert list(addresses(topic, "policy")) == ["engine-0"]
        complaint = Complaint("engine-0", 0, "5 failures in a row")
        topic.publish("complaint/engine-0", msgspec.msgpack.encode(complaint))
        assert announcer.complaint("engine-0", 0) == "5 failures in a row"
        assert announcer.complaint("engine-0", 1) is None, "a later life is not blamed"
        entry = EngineEntry("engine-0", "http://e:3", 0, state="serving", run_generation=0, version=0, limit=8)
        for fetching, loads in ((-1, False), (0, True), (5, True)):
            known = replace(entry, fetching=fetching)
            topic.publish("directory/engine-0", msgspec.msgpack.encode(known))
            assert announcer.loading("engine-0") == loads
        assert announcer.loading("engine-1"), "it has no weights yet"
        topic.publish("device/engine-0", b"")
        announcer.away("engine", engine.name, engine.external, "a failed health check (refused)")
        assert sorted(topic.items("")) == []
        announcer.router_up(RouterAddress("sglang", "http://r:4", 0), "", "")
        announcer.lost("router", "router", "exit code 1")
        assert sorted(topic.items("")) == [], "it is told of before another one is started"
    assert lines == [
        "frozen-judge: http://j:1 is lost after 2 failed health checks in a row (refused); its requests wait "
        "until it is back",
        "router: http://r:2 is lost after a failed health check (refused); new requests wait for it, its "
        "pending requests continue at the engines directly",
        "engine-0: http://e:3 is lost after a failed health check (refused); its work waits until it is back",
        "router ended with exit code 1; restarting it, new requests wait for it, its pending requests continue "
        "at the engines directly",
    ]


@pytest.mark.parametrize(
    ("scale", "kind", "words"),
    [
        ({}, "engine", "its work waits until it is back"),
        ({"engine": 2}, "engine", "its work goes to others"),
        ({"generate": 2}, "generate", "its work goes to others"),
        ({"generate": 1}, "generate", "its work waits until it is back"),
        ({"engine": 2}, "frozen", "its requests wait until it is back"),
        ({"engine": 2}, "engines", "the engines keep their weights until it is back"),
    ],
)
def test_work_goes_to_others_only_where_there_are_others(scale: dict[str, int], kind: str, words: str) -> None:
    assert outage_text(msgspec.convert({"run": {"scale": scale}}, Config), kind) == words


# Frozen engines before and at the start: where they are placed, under which topic, what is checked of them.


@pytest.fixture(scope="module")
def policy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("policy") / "model")


def make(policy_model: Path, *engines: str, **sections: Any) -> Config:
    values: dict[str, Any] = {"distill": {"use_opd": True}, "train": {"hf_checkpoint": str(policy_model)}, **sections}
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


async def test_a_teacher_with_the_same_tokenizer_passes_and_may_know_more_tokens(
    policy_model: Path, tmp_path: Path
) -> None:
    def more(content: Any) -> None:
        added = content["added_tokens"]
        added.append({**added[0], "id": 264, "content": "<|more|>"})

    await check(make(policy_model, f"a={make_tiny_checkpoint(tmp_path / 'other', TinyRecipe(seed=3))}"))
    await check(make(policy_model, f"a={changed(policy_model, tmp_path / 'more', more)}"))


async def test_a_teacher_that_reads_a_token_otherwise_or_lacks_tokens_is_refused(
    policy_model: Path, tmp_path: Path
) -> None:
    def swap(content: Any) -> None:
        vocab = content["model"]["vocab"]
        first, second = sorted(vocab, key=vocab.__getitem__)[65:67]
        vocab[first], vocab[second] = vocab[second], vocab[first]

    other = changed(policy_model, tmp_path / "swapped", swap)
    with pytest.raises(UsageError, match=r"2 of 264 tokens differ, token 65 is 'A' to the policy, there 'B'") as error:
        await check(make(policy_model, f"a={other}"))
    assert f"--frozen-engine a={other}" in str(error.value)
    assert "choose a teacher with the same tokenizer" in str(error.value)
    await check(make(policy_model, f"a={other}", distill={"use_opd": False}))  # a judge may read as it likes
    await check(make(policy_model, f"a={other}", f"b={policy_model}", distill={"use_opd": True, "opd_teacher": ["b"]}))
    lacks = make_tiny_checkpoint(tmp_path / "characters", TinyRecipe(tokenizer="arithmetic"))
    with pytest.raises(UsageError, match="its tokenizer is not the policy's"):
        await check(make(policy_model, f"a={lacks}"))


def test_vocabularies_of_other_forms(tmp_path: Path) -> None:
    assert vocabulary(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": [["<unk>", 0], ["a", -1.5]]}}')
    assert vocabulary(tmp_path) == {0: "<unk>", 1: "a"}
    (tmp_path / "tokenizer.json").write_text("{broken")
    assert vocabulary(tmp_path) is None


async def test_a_running_engine_shows_how_it_splits_text(policy_model: Path, tmp_path: Path) -> None:
    settings = EngineConfig(engine="simulated", engine_slots=4, engine_device="cpu")
    other = make_tiny_checkpoint(tmp_path / "characters", TinyRecipe(tokenizer="arithmetic"))
    async with (
        EngineServer(settings, str(policy_model), max_context_len=None, seed=0) as same,
        EngineServer(settings, str(other), max_context_len=None, seed=0) as different,
    ):
        await check(
            make(policy_model, f"a={same.url}", f"b={different.url}", distill={"opd_teacher": ["a"], "use_opd": True})
        )
        with pytest.raises(UsageError, match=r"it splits a text into \[2, 3.*, the policy into \[49, 50"):
            await check(make(policy_model, f"b={different.url}"))


def test_checkpoints_get_paths_and_addresses_stay(policy_model: Path, tmp_path: Path) -> None:
    config = make(
        policy_model, "t=tiny", f"own={policy_model}", "far=http://localhost:1", data={"prompt_data": ["arithmetic"]}
    )
    made = prepare(config, tmp_path).engine.frozen_engine
    assert made == (f"t={tmp_path / 'tiny'}", f"own={policy_model}", "far=http://localhost:1")
    assert (tmp_path / "tiny" / "config.json").is_file()
    with pytest.raises(UsageError, match=r"--frozen-engine t=no/such/dir: the checkpoint is 'no/such/dir'"):
        prepare(make(policy_model, "t=no/such/dir"), tmp_path)


def placed(config: Config, tmp_path: Path) -> Placement:
    rollout = msgspec.structs.replace(config.rollout, rollout_max_context_len=77)
    config = msgspec.structs.replace(config, rollout=rollout)
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        return Placement(config, rundir, TrainOptions(), GenerateOptions(max_context=77))


def test_engines_are_added_as_far_as_there_are_gpus(
    policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = placed(make(policy_model), tmp_path)
    assert placement.lacks_gpus(9) is None, "on a CPU nobody has any"
    placement.engines = [msgspec.structs.replace(placement.engines[0], gpus=("0",))]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert placement.lacks_gpus(2) is None
    assert placement.lacks_gpus(-1) is None, "fewer engines"
    why = placement.lacks_gpus(3)
    assert "there is no GPU for another engine: 1 of the visible GPUs have one" in why


def test_frozen_engines_are_placed_beside_those_that_generate(policy_model: Path, tmp_path: Path) -> None:
    others = {"engine": {"engine_port": 7000, "engine_checkpoint": "float8"}, "run": {"scale": {"engine": 2}}}
    placement = placed(make(policy_model, "t=one", "far=http://localhost:1", "j=two", **others), tmp_path)
    engines = [(spec.name, spec.frozen, spec.port, spec.model_path) for spec in placement.engines]
    assert engines == [("engine-0", "", 7000, "float8"), ("engine-1", "", 7001, "float8")]
    running, *started = placement.beside
    assert (running.name, running.frozen, running.external) == ("frozen-far", "far", "http://localhost:1")
    frozen = [(spec.name, spec.frozen, spec.model_path, spec.max_context) for spec in started]
    assert frozen == [("frozen-t", "t", "one", 77), ("frozen-j", "j", "two", 77)]
    assert not {spec.port for spec in placement.beside} & {7000, 7001}
    generate = placement.replica(placement.graph.node("generate"), 0, 1)
    assert generate.built_in == GenerateOptions(max_context=77)
    supervised = make(policy_model, "t=one", train={"loss_type": "sft_loss"})
    assert placed(supervised, tmp_path / "supervised").beside == []


class Late:
    """A server whose /server_info comes in time at the third request, or never."""

    def __init__(self, *answers: EngineError | str) -> None:
        self.answers = list(answers)

    async def server_info(self) -> SimpleNamespace:
        answer = self.answers.pop(0)
        if isinstance(answer, EngineError):
            raise answer
        return SimpleNamespace(version=answer)


@pytest.mark.parametrize(
    ("answers", "version"),
    [
        ([EngineTimeout("http://e", 0.5), EngineTimeout("http://e", 0.5), "9.9"], "9.9"),
        ([EngineTimeout("http://e", 0.5)] * 20, ""),
        ([EngineRefused("http://e", 404, "no such page"), "9.9"], ""),
    ],
)
async def test_a_server_that_answers_late_is_not_taken_for_one_of_another_kind(
    answers: list[EngineError | str], version: str
) -> None:
    client: Any = Late(*answers)
    assert await external_servers._version(client) == version
