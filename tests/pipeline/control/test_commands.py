"""Commands to a running run: the endpoint and its client, the table of `status`, and settings that `set` may change."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import launch
from configs.layers import ConfigError
from configs.load import dump_toml, load
from configs.plan.goodput import Workload, lognormal_lengths
from configs.rules.validate import checked
from configs.schema import AsyncConfig, Config
from configs.schema.run import DebugConfig
from models.errors import UserFault
from models.fault_injection import injected
from pipeline.control import endpoint as module
from pipeline.control.client import NotRunning, ask, table
from pipeline.control.endpoint import (
    CONTROL_FILE,
    MOST_BYTES,
    Command,
    ControlAddress,
    EngineStatus,
    Kill,
    Pause,
    QueueStatus,
    Reply,
    Request,
    RunStatus,
    Scale,
    Status,
    endpoint,
)
from pipeline.control.run_control import SETTABLE, RunControl, keep, with_flags, with_settings
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.facts.stats import Changed, LedgerCounts, RunSnapshot, StageRow


class Run:
    """What answers, and what it was asked."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.asked: list[Command] = []

    async def answer(self, command: Command) -> Reply:
        self.asked.append(command)
        if isinstance(command, Pause):
            raise ValueError("it cannot pause")
        return Reply(True, ("done",))

    @property
    def address(self) -> ControlAddress:
        return msgspec.json.decode((self.run_dir / CONTROL_FILE).read_bytes(), type=ControlAddress)

    async def send(self, data: bytes) -> Reply:
        """What is answered to these bytes."""
        reader, writer = await asyncio.open_unix_connection(self.address.socket)
        writer.write(data)
        reply = msgspec.json.decode(await reader.readline(), type=Reply)
        writer.close()
        return reply


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path)
    with tempfile.TemporaryDirectory(prefix="sluice-") as sockets:  # tmp_path may be too long for a socket
        async with endpoint(tmp_path, Path(sockets), run.answer):
            yield run


def line(token: str, command: Command | None = None) -> bytes:
    return msgspec.json.encode(Request(token, msgspec.Raw(msgspec.json.encode(command or Status())))) + b"\n"


async def test_the_owner_alone_may_ask_and_is_answered(tmp_path: Path) -> None:
    async with served(tmp_path) as run:
        for path in (tmp_path / CONTROL_FILE, Path(run.address.socket)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        reply = await asyncio.to_thread(ask, tmp_path, Scale({"reward": 4}))
        assert reply == Reply(True, ("done",))
        assert run.asked == [Scale({"reward": 4})]
        first = run.address.token
        for token in ("", "x", first[:-1], first + "x", "ä"):
            for command in (line(token), b'{"token":%s,"command":{"type":"nothing"}}\n' % msgspec.json.encode(token)):
                assert await run.send(command) == module.REFUSED, "whatever it requests"
        assert len(run.asked) == 1
    assert not (tmp_path / CONTROL_FILE).exists()
    with pytest.raises(NotRunning, match="holds no run"):
        ask(tmp_path, Status())
    async with served(tmp_path) as run:
        assert run.address.token != first, "each run has a token of its own"


async def test_an_invalid_request_is_refused_and_the_next_one_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_S", 0.2)
    async with served(tmp_path) as run:
        token = run.address.token.encode()
        wrong = {
            b"\xff\n": "one line of JSON with token and command",
            b'{"token":"' + token + b'","command":{"type":"explode"}}\n': "the command cannot be read",
            b"x" * (MOST_BYTES + 2): f"at most {MOST_BYTES} bytes",
            b"[" * 30_000 + b"\n": "one line of JSON with token and command",
            b'{"token":"' + token + b'","command":' + b'{"a":' * 10_000 + b"\n": "one line of JSON with token",
            b'{"token":"' + token + b'","command":' + b"[" * 30_000 + b"]" * 30_000 + b"}\n": "one line of JSON",
            b"half a line": "no request came within 0.2 s",
            line(run.address.token, Pause()): "ValueError: it cannot pause",
        }
        for data, words in wrong.items():
            reply = await run.send(data)
            assert not reply.ok
            assert words in reply.lines[0]
        assert (await run.send(line(run.address.token))).ok


async def test_connections_beyond_the_bound_are_turned_away_and_block_no_other(tmp_path: Path) -> None:
    async with served(tmp_path) as run:
        silent = [await asyncio.open_unix_connection(run.address.socket) for _ in range(module.MOST_CONNECTIONS)]
        reply = await run.send(line(run.address.token))
        assert "requests are being answered" in reply.lines[0]
        for _, writer in silent:
            writer.close()
        async with asyncio.timeout(120):
            while not (await run.send(line(run.address.token))).ok:  # noqa: ASYNC110  (a place that is free announces nothing)
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("change", ["reward", "reward=", "=4", "reward=many", "reward=-1"])
def test_a_count_that_is_none_is_refused(change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["scale", str(tmp_path), change]) == 2
    assert f"{change!r} is no STAGE=COUNT; write for example reward=4" in capsys.readouterr().err


STAGES = (
    StageRow("generate", 2, 0.921, 0.05, 0.01, 0.019, 3, 12, 56.84, 900.0, 1490, 0, 0),
    StageRow("reward", 4, 1.0, 0.0, 0.0, 0.0, 123_456, 1000, 123_456.0, 0.0, 10, 12_345, 0),
)
SNAPSHOT = RunSnapshot(
    mode="async", step=198, total_steps=4000, elapsed_s=17.0, eta_s=228.0, version=197, in_flight=12,
    may_enter=4, stages=STAGES, ledger=LedgerCounts(admitted=804, trained=792, open=12), reward_mean=0.5,
    reward_recent=0.5, evals={}, staleness_mean=1.79, staleness_max=2, staleness_bound=2, trained_tokens=1,
    trained_tokens_per_s=1.0, wasted_tokens=0, wasted_share=0.0, busiest=None,
)  # fmt: skip
STATUS = RunStatus(
    run="/home/somebody/" + "runs/" * 20,
    state="running",
    snapshot=SNAPSHOT,
    engines=(
        EngineStatus("engine-0", "serving", 197, 21, 3, 512, 0.27),
        EngineStatus("engine-1", "starting", None, 0, 0, 0, None),
    ),
    queues=(QueueStatus("generate", 1, 4, 2),),
    replicas={"generate": 2, "reward": 2},
    changes=(Changed(150, "scale reward", "2"),),
)  # fmt: skip


def test_the_table() -> None:
    lines = table(STATUS).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1:6] == [
        "state      running, async, 0:17, ETA 3:48",
        "step       198/4000, reward 0.500, engines carry version 197",
        "in flight  12 groups, 4 more may enter",
        "staleness  mean 1.79, max 2, bound 2",
        "groups     804 admitted: 792 trained, 0 filtered, 0 stale, 0 failed, 0 discarded",
    ]
    cells = {cells[0]: cells[1:] for line in lines[6:] if (cells := line.split())}
    assert cells["generate"] == ["1", "4", "2"], "its queue stands below its stage"
    assert cells["reward"][:6] == ["4>2", "100%", "0%", "0%", "0%", "123456"], "two replicas finish what they hold"
    assert cells["engine-0"] == ["serving", "197", "21", "3", "512", "27%"]
    assert cells["engine-1"] == ["starting", "-", "0", "0", "-", "-"]
    assert lines[-1] == "step 150: scale reward 2"
    seven = tuple(Changed(step, "scale reward", "2") for step in range(7))
    lines = table(msgspec.structs.replace(STATUS, changes=seven)).splitlines()
    assert lines[-6:-4] == ["2 changes before, see --json", "step 2: scale reward 2"]
    advice = "reward is the bottleneck; reward 1 -> 2 would make about 2 rollouts/s of 1 (+100%), then engine is next"
    advised = msgspec.structs.replace(STATUS, snapshot=dataclasses.replace(SNAPSHOT, advice=advice))
    assert table(advised).splitlines()[6:8] == [
        "advice     reward is the bottleneck; reward 1 -> 2 would make about 2 rollouts/s",
        "           of 1 (+100%), then engine is next",
    ]


FLAGS = ["--prompt-data", "arithmetic", "--hf-checkpoint", "tiny-arithmetic", "--label-key", "label", "--lr", "1e-4"]


def run_of(tmp_path: Path, *flags: str) -> tuple[RunDir, Config]:
    rundir = RunDir(tmp_path / "run")
    loaded = load([*FLAGS, *flags, "--run-dir", str(rundir.path), "--num-rollout", "10"])
    config, _ = checked(loaded.config, loaded.given)
    rundir.path.mkdir()
    rundir.write_config(dump_toml(config))
    return rundir, config


def test_what_is_set_is_what_a_resume_would_have_and_begins_with(tmp_path: Path) -> None:
    rundir, config = run_of(tmp_path, "--dynamic-sampling-filter", "nonzero_std", "reward:0.1_0.9")
    for name in ("temperature", "rollout_temperature", "--rollout-temperature", "rollout.rollout_temperature"):
        assert with_settings(rundir, {name: "0.7"}, config)[1] == {"rollout.rollout_temperature": 0.7}
    changes = {"max_staleness": "4", "train.lr": "5e-6", "dynamic-sampling-filter": "nonzero_std,reward:0.2_0.8"}
    after, changed = with_settings(rundir, changes, config)
    assert changed == {
        "asynchrony.max_staleness": 4,
        "train.lr": 5e-6,
        "filter.dynamic_sampling_filter": ("nonzero_std", "reward:0.2_0.8"),
    }
    keep(rundir, after, config)
    assert with_settings(rundir, changes, config)[1] == {}, "it is kept"
    resumed = load(["--resume", str(rundir.path), "--max-staleness", "3"]).config
    assert (resumed.asynchrony.max_staleness, resumed.train.lr) == (3, 5e-6), "a flag of the resume outranks it"


@pytest.mark.parametrize(
    ("flags", "change", "words"),
    [
        ("", "max_staleness=-1", "max-staleness"),
        ("", "max_staleness=many", "many"),
        ("--max-staleness 0", "max_staleness=2", "max_staleness"),  # a bound without a correction, as of any run (I4)
        ("", "lr=-1", "--lr"),
        ("--lr-decay-style linear --min-lr 1e-5", "lr=2e-4", "lr decays to --min-lr 1e-05"),
        ("", "temperature=0", "rollout-temperature"),
        ("", "top_p=0.7", "--rollout-top-p is 0.7 with TIS or bypass, but must be 1"),
        # Others go by the sampling of the start.
        ("--rollout-function-path tests.stages.slime.user_code:whole_batch", "temperature=0.7",
         "--rollout-function-path goes by the temperature and top-p with which"),
        ("", "rollout_batch_size=8", "cannot be set in a running run"),
        ("", "max_stalenes=3", "max_staleness"),
        ("", "dynamic_sampling_filter=nonzero_std", "the numbers can be changed, not which there are"),
        ("", "dynamic_sampling_filter=reward:0.9_0.1", "the lower bound 0.9 is above the upper bound 0.1"),
    ],
)  # fmt: skip
def test_what_cannot_be_set_is_refused_with_the_reason(flags: str, change: str, words: str, tmp_path: Path) -> None:
    rundir, config = run_of(tmp_path, "--dynamic-sampling-filter", "reward:0.1_0.9", *flags.split())
    before = rundir.config.read_bytes()
    name, _, value = change.partition("=")
    with pytest.raises((ConfigError, UsageError, UserFault), match=words):
        with_settings(rundir, {name: value}, config)
    assert rundir.config.read_bytes() == before


def test_a_learning_rate_of_zero_is_a_pause_that_ends(tmp_path: Path) -> None:
    rundir, running = run_of(tmp_path)
    for text in ("0", "1e-6", "0", "1e-4"):
        after, changed = with_settings(rundir, {"lr": text}, running)
        assert changed == {"train.lr": float(text)}
        keep(rundir, after, running)
    still = msgspec.structs.replace(running, train=msgspec.structs.replace(running.train, lr=0.0))
    with pytest.raises(UsageError, match=r"started with --lr 0, of which no finite factor makes 1e-06; .* --lr 1e-06"):
        with_settings(rundir, {"lr": "1e-6"}, still)
    with pytest.raises(UsageError, match=r"no finite factor makes 1e\+307"):
        with_settings(rundir, {"lr": "1e307"}, running)


NUMBERS = (
    *("nan", "inf", "-inf", "0", "-0.0", "-1", "1", "3", "0.5", "1e-400", "1e-6", "1e308"),
    *("9" * 25, "9" * 5000, "1_0", "", " ", "x"),
)


@pytest.fixture(scope="module")
def filtering(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, Config]:
    return run_of(tmp_path_factory.mktemp("filtering"), "--dynamic-sampling-filter", "reward:0.1_0.9")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([*SETTABLE]), st.sampled_from(NUMBERS) | st.floats().map(repr) | st.integers().map(str))
def test_whatever_number_is_set_is_refused_or_can_be_set_back(
    filtering: tuple[RunDir, Config], name: str, text: str
) -> None:
    rundir, running = filtering
    value = f"reward:0.1_{text}" if name == "dynamic_sampling_filter" else text
    before = str(rundir.config.read_text())
    try:
        after, changed = with_settings(rundir, {name: value}, running)
    except (ConfigError, UsageError, UserFault):
        assert rundir.config.read_text() == before
        return
    assert all(math.isfinite(number) for number in changed.values() if isinstance(number, float | int))
    assert math.isfinite(after.train.lr / running.train.lr)
    keep(rundir, after, running)
    old = running
    for part in SETTABLE[name].split("."):
        old = getattr(old, part)
    texts = ",".join(old) if isinstance(old, tuple) else repr(old)
    back, _ = with_settings(rundir, {name: texts}, running)
    keep(rundir, back, running)
    assert rundir.config.read_text() == before


@pytest.mark.parametrize("stage", ["reward", "engine", "train", "nobody"])
def test_whatever_count_is_scaled_to_is_refused_in_words(stage: str, filtering: tuple[RunDir, Config]) -> None:
    for count in (-1, 0, 1025, 1 << 62, 1 << 80):
        with pytest.raises((ConfigError, UsageError), match=stage):
            with_flags(filtering[0], ["--scale", f"{stage}={count}"])


async def test_a_choice_of_n_that_is_refused_is_said_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change is checked as a resume is, so a file that the user has moved meanwhile refuses it."""
    work = Workload(lengths=lognormal_lengths(460, 1.0, 3200), slots=64, groups=8, members=8)
    said: list[str] = []
    spoken = asyncio.Event()

    def say(line: str) -> None:
        said.append(line)
        spoken.set()

    control: Any = RunControl.__new__(RunControl)
    control._one_at_a_time, control._steps_at_change = asyncio.Lock(), 0
    control.runner = SimpleNamespace(config=Config(asynchrony=AsyncConfig(async_buffer_size="auto", max_staleness=1)))
    control.stage = SimpleNamespace(gate=SimpleNamespace(max_staleness=1), steps=9, draining=None)
    control.recorder = SimpleNamespace(changes=[], goodput=SimpleNamespace(take_workload=lambda: work), say=say)
    control.adviser = SimpleNamespace(autoscale=None)

    async def refused(changes: object, by: str) -> None:
        raise ConfigError(["there is no file or directory 'moved.jsonl'"])

    control._set = refused
    monkeypatch.setattr("pipeline.control.run_control.AUTOSCALE_LOOK_S", 0.0)
    following = asyncio.create_task(control.follow_lengths())
    heard = asyncio.create_task(spoken.wait())
    await asyncio.wait({following, heard}, return_when=asyncio.FIRST_COMPLETED)
    assert not following.done()
    assert "N 1 to 8" in said[0]
    assert "but there is no file or directory 'moved.jsonl'" in said[0]
    following.cancel()
    heard.cancel()


class Process:
    """A process that a launcher started."""

    def __init__(self, *, alive: bool = True) -> None:
        self.alive = alive

    async def kill(self) -> int:
        self.alive = False
        return -9


@pytest.mark.parametrize(
    ("faults", "replica", "words"),
    [
        ((), "reward-0", "this run is not disturbed on purpose; start one with --fault-inject"),
        (("reward:0.1:kill",), "reward-9", "there is no process reward-9; choose one of engine-0, reward-0"),
        (("reward:0.1:kill",), "gone-0", "there is no process gone-0"),
        (("reward:0.1:kill",), "reward-0", ""),
    ],
)
async def test_only_a_run_that_is_disturbed_on_purpose_lets_a_process_be_killed(
    faults: tuple[str, ...], replica: str, words: str, tmp_path: Path
) -> None:
    changes: list[tuple[str, str]] = []
    handles = {"reward-0": Process(), "engine-0": Process(), "gone-0": Process(alive=False)}
    control: Any = RunControl.__new__(RunControl)
    control._one_at_a_time, control.rundir = asyncio.Lock(), RunDir(tmp_path)
    control.runner = SimpleNamespace(config=Config(debug=DebugConfig(fault_inject=faults)))
    control.launcher, control.stage = SimpleNamespace(handles=handles), SimpleNamespace(draining=None)
    control.recorder = SimpleNamespace(changed=lambda what, value: changes.append((what, value)))
    control.adviser = SimpleNamespace(autoscale=None)
    reply = await control.answer(Kill(replica))
    assert reply.ok == (not words)
    assert words in reply.lines[0]
    assert handles["engine-0"].alive
    assert handles["reward-0"].alive == bool(words)
    assert changes == ([] if words else [("kill", "reward-0")])
    assert injected(tmp_path) == ({} if words else {"reward kill": 1})
