"""Whole runs on real SGLang servers behind the real sglang-router: what they train, and what a lost engine costs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from launching import SIMULATED_TRAINER, SMALL, alive, check_token, files_with, finish, sevens, start, succeed_here
from test_kill import pids, steps_done, wait_for_steps, wait_until

from models.engines.access_token import read_token
from models.engines.client import EngineClient
from models.engines.launch.command import RUNNER
from models.engines.protocol import EXPECTED_SGLANG, GenerateRequest, SamplingParams
from models.errors import EngineError
from pipeline.record.metrics import read_metrics
from pipeline.supervise.engine_servers import refusal
from stages.chat.tokenizer import load_tokenizer
from tests.models.engines.forward_reference import by_one, by_pieces
from tests.sglang_server import ON_SGLANG, RealServer, needs_sglang

EXPECTED_ROUTER = "0.3.2"

MODES = [
    pytest.param(mode, marks=ON_SGLANG if mode == "retract" else [*ON_SGLANG, pytest.mark.full])
    for mode in ("in_place", "retract", "abort")
]


def on_servers_of_its_own(test: Any) -> Any:
    """Two servers per run: one such run after the other."""
    return pytest.mark.slow(pytest.mark.xdist_group("runs with sglang")(test))


TAP = """
import json
from stages.base import MapStage


class Tap(MapStage):
    async def process(self, message):
        with open(self.context.run_dir / "tap.jsonl", "a") as file:
            for s in message.samples:
                row = {"group": message.group.group_id, "index": s.index, "begin": s.prompt_length, "turns": s.turns,
                       "tokens": s.token_ids.tolist(), "mask": s.loss_mask.tolist(), "versions": s.versions.tolist(),
                       "runs": [[r.version, r.n_tokens] for r in s.version_runs[1:]], "reused": s.reused_tokens,
                       "all_log_probs": s.log_probs.tolist(), "cached": s.cached_tokens, "resumed": s.resumed}
                file.write(json.dumps(row) + "\\n")
        return message
"""
TAP_RECIPE = '[[stage]]\nname = "tap"\npath = "tap:Tap"\nafter = "reward"\nreplicas = 1\nconcurrency = 4\n'
LONG = ["--rollout-max-response-len", "200", "--rollout-stop-token-ids", "31"]  # 31 is what ends a response anyway


@pytest.fixture
def tap(tmp_path: Path) -> Path:
    (tmp_path / "tap.py").write_text(TAP)
    (tmp_path / "tap.toml").write_text(TAP_RECIPE)
    return tmp_path


def tapped(run_dir: Path) -> list[dict[str, Any]]:
    """Rollouts as they were graded: what stands behind the prompt, and the whole."""
    rows = [json.loads(line) for line in (run_dir / "tap.jsonl").read_text().splitlines()]
    for row in rows:
        row["prompt"], row["ids"] = row["tokens"][: row["begin"]], row["tokens"][row["begin"] :]
        row["log_probs"] = row["all_log_probs"][row["begin"] :]
    return rows


@pytest.mark.full
@on_servers_of_its_own
def test_a_run_on_two_servers_behind_the_router_learns(tap: Path) -> None:
    """The defaults of --engine sglang: two servers, the real router, weights swapped while they generate."""
    python = needs_sglang()
    run_dir = tap / "run"
    process = start(
        run_dir, *SMALL, *sevens(tap), "--engine", "sglang", "--sglang-python", str(python), "--scale", "engine=2",
        "--rollout-max-context-len", "128", "--check-weight-update-equal", cwd=tap,
    )  # fmt: skip
    try:
        token = check_token(
            run_dir, process.pid, engine_0="/server_info", engine_1="/model_info", router="/workers"
        ).token
    finally:
        done = finish(process, run_dir, timeout_s=400).check()
    assert files_with(run_dir, token.text) == [], "SGLang writes its options into its log"
    summary = done.summary
    assert summary["reward"]["last"] > summary["reward"]["first"] + 0.3, summary["reward"]
    engine = summary["engine"]
    assert (engine["kind"], engine["version"], engine["count"]) == ("sglang", EXPECTED_SGLANG, 2)
    assert engine["restarts"] == engine["reused_tokens"] == 0
    assert summary["router"] == {"kind": "sglang", "version": EXPECTED_ROUTER}
    assert summary["groups"]["trained"] == 40 * 8
    assert "engine-1: up after" in done.out
    for name in ("engine-0", "engine-1"):
        log = (tap / "run" / "logs" / f"{name}.log").read_text()
        assert log.count("Prefill batch") > 20, f"{name} got few requests"


def client_of(run_dir: Path, name: str) -> EngineClient:
    """Of an engine, from the command line of its process."""
    [pid] = pids(run_dir, name)
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    url = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
    token = read_token(Path(words[words.index(RUNNER) + 2])).token
    return EngineClient(url, connect_timeout_s=2.0, control_timeout_s=5.0, token=token)


async def serving(run_dir: Path, name: str) -> str | None:
    """The version that an engine generates with just now; None if it does not."""
    async with client_of(run_dir, name) as client:
        try:
            running = sum(load.num_running_reqs for load in await client.loads())
            return (await client.model_info()).weight_version if running else None
        except EngineError:
            return None


def wait_serving(process: object, run_dir: Path, name: str, oldest: int, timeout_s: float = 300) -> None:
    """Until the engine generates with weights of version `oldest` or later."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended too early"  # type: ignore[attr-defined]
        with contextlib.suppress(OSError, ValueError):  # the process is between two lives
            label = asyncio.run(serving(run_dir, name))
            if label is not None and int(label.rpartition(".")[2]) >= oldest:
                return
        time.sleep(0.2)
    raise AssertionError(f"{name} does not serve version {oldest} or later within {timeout_s:g} s")


def strike(run_dir: Path, name: str, number: signal.Signals) -> None:
    """Send a signal to an engine and all that it started."""
    os.killpg(os.getpgid(*pids(run_dir, name)), number)


def check_spans(rows: list[dict[str, Any]]) -> None:
    """Every token has a version, versions only rise, and no rollout came twice."""
    for row in rows:
        versions = [version for version, _ in row["runs"]]
        assert versions == sorted(set(versions)), row["runs"]
        assert sum(n for _, n in row["runs"]) == len(row["ids"]) == len(row["log_probs"])
    names = [(row["group"], row["index"]) for row in rows]
    assert len(names) == len(set(names)), "a rollout was generated twice"


@pytest.mark.full
@on_servers_of_its_own
def test_engines_killed_and_stopped_in_mid_generation(tap: Path) -> None:
    """Two servers behind the real router. One is killed, later the other hangs: no group is lost or doubled, partial
    output is used, and each comes back at the current version."""
    python = needs_sglang()
    run_dir = tap / "run"
    flags = [
        *SMALL, *LONG, "--config", str(tap / "tap.toml"), "--engine", "sglang", "--sglang-python", str(python),
        "--scale", "engine=2", "--num-rollout", "100000", "--rollout-max-context-len", "512", "--stream-interval", "4",
        "--rollout-health-check-interval", "1", "--rollout-health-check-timeout", "5",
        "--rollout-health-check-failures", "2", "--log-interval", "50",
        # a trainer that takes its time leaves the processors to the servers that start
        "--train-backend", "simulated", "--simulated-step-s", "0.4", "--server-concurrency", "8",
    ]  # fmt: skip
    process = start(run_dir, *flags, cwd=tap)
    wait_for_steps(process, run_dir, 3, timeout_s=300)
    before = 1
    for name, number in (("engine-0", signal.SIGKILL), ("engine-1", signal.SIGSTOP)):
        wait_serving(process, run_dir, name, before)
        strike(run_dir, name, number)
        before = steps_done(run_dir) + 5
        wait_for_steps(process, run_dir, before)
        wait_serving(process, run_dir, name, before)
    process.send_signal(signal.SIGINT)
    summary = finish(process, run_dir).check(130).summary
    assert summary["groups"]["failed"] == 0
    engine = summary["engine"]
    assert (engine["kind"], engine["version"], engine["count"]) == ("sglang", EXPECTED_SGLANG, 2)
    assert engine["restarts"] == 2
    assert summary["router"] == {"kind": "sglang", "version": EXPECTED_ROUTER}
    rows = tapped(run_dir)
    check_spans(rows)
    saved = sum(row["reused"] for row in rows)
    assert 0 < saved <= engine["reused_tokens"], "tokens of discarded groups count too"


@pytest.mark.slow
@pytest.mark.xdist_group("sglang")
async def test_a_server_that_was_left_in_an_update_drops_its_requests(sglang: RealServer) -> None:
    long = GenerateRequest(input_ids=[5, 6, 7], sampling_params=SamplingParams(max_new_tokens=900, ignore_eos=True))
    async with EngineClient(sglang.url) as client, asyncio.TaskGroup() as tasks:
        await sglang.fresh(client)
        requested = tasks.create_task(client.generate(long))
        async with asyncio.timeout(60):
            while not sum(load.num_running_reqs for load in await client.loads()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await client.pause("in_place")
        assert await refusal(sglang.url, None, frozen=False) is None
        assert [output.aborted for output in await requested] == [True]
        assert (await client.model_info()).weight_version
        await client.resume()


@pytest.mark.full
@on_servers_of_its_own
def test_a_server_outlives_the_controller_and_is_given_the_weights_of_the_resumed_run(tmp_path: Path) -> None:
    """One of two servers hangs meanwhile: it is replaced, and the other one goes on."""
    run_dir = tmp_path / "run"
    process = start(
        run_dir, *SMALL, *LONG, "--engine", "sglang", "--sglang-python", str(needs_sglang()), "--scale", "engine=2",
        "--router", "none", "--num-rollout", "100000", "--save-interval", "1", "--rollout-max-context-len", "512",
        "--auto-resume", "5", "--train-backend", "simulated", "--simulated-step-s", "0.4",
    )  # fmt: skip
    wait_for_steps(process, run_dir, 3, timeout_s=300)
    wait_serving(process, run_dir, "engine-0", 2)
    before = pids(run_dir, "engine-0", "engine-1")
    children = psutil.Process(process.pid).children()
    [controller] = [child for child in children if any("launch.py" in word for word in child.cmdline())]
    strike(run_dir, "engine-1", signal.SIGSTOP)
    controller.kill()
    steps = steps_done(run_dir)
    wait_for_steps(process, run_dir, steps + 5, timeout_s=200)
    wait_serving(process, run_dir, "engine-0", 5)
    assert pids(run_dir, "engine-0") == before[:1]
    # The server that hangs is replaced only after it has not given back what it runs for some time.
    wait_until(process, lambda: pids(run_dir, "engine-1") != before[1:], "the new server of engine-1", timeout_s=200)
    assert not alive(before[1])

    async def label() -> str:
        async with client_of(run_dir, "engine-0") as client:
            return (await client.model_info()).weight_version

    assert asyncio.run(label()).startswith("1."), "weights of the second start"
    process.send_signal(signal.SIGINT)
    done = finish(process, run_dir).check(130)
    assert done.summary["groups"]["failed"] == 0
    assert "engine-0: taken over from the start before in" in done.out
    assert "engine-1: not taken over from the start before, a new one is started: " in done.out
    assert done.summary["restarts"] == {"controller": 1}
    assert not alive(before[0])


@pytest.mark.parametrize("mode", MODES)
def test_log_probs_are_those_of_the_recorded_versions(tap: Path, sglang: RealServer, mode: str) -> None:
    """A weight update after every step, long responses: each token is the recorded version's, to 1e-5."""
    run_dir = tap / "run"
    done = succeed_here(
        run_dir, *SMALL, *LONG, "--config", str(tap / "tap.toml"), "--engine", "sglang", "--hf-checkpoint",
        str(sglang.model), "--rollout-external-engine-addrs", sglang.url, "--pause-generation-mode", mode,
        "--save-interval", "1", "--keep-last-n", "99", "--num-rollout", "8", "--lr", "1e-3", cwd=tap,
    )  # fmt: skip
    rows = tapped(run_dir)
    check_spans(rows)
    mixed = [row for row in rows if len(row["runs"]) > 1]
    assert mixed, "no rollout saw a weight update"
    if mode == "abort":
        assert any(row["resumed"] for row in mixed)
    checkpoints = {int(path.name.rpartition("-")[2]): path / "hf" for path in (run_dir / "checkpoints").iterdir()}
    checkpoints[0] = sglang.model
    check = check_in_place if mode == "in_place" else check_recomputed
    for row in mixed:
        check(checkpoints, row)
    assert done.summary["engine"]["version"] == EXPECTED_SGLANG


def check_recomputed(checkpoints: dict[int, Path], row: dict[str, Any]) -> None:
    """Every token is what its version alone makes of all tokens before it."""
    begin = 0
    for version, n in row["runs"]:
        own = by_one(checkpoints[version], row["prompt"], row["ids"])[begin : begin + n]
        assert (own - torch.tensor(row["log_probs"][begin : begin + n])).abs().max() < 1e-5, row["runs"]
        begin += n


def check_in_place(checkpoints: dict[int, Path], row: dict[str, Any]) -> None:
    """Each version goes on with the keys and values that those before it left. What was cached of the prompt may be of
    versions before the first token's, of several where prompts that begin alike were there already; what stands behind
    in the cache was never made before what it stands behind.
    """
    prompt, cached, first = row["prompt"], row["cached"], row["runs"][0]
    rest = [(checkpoints[version], n) for version, n in row["runs"][1:]]
    head = (checkpoints[first[0]], len(prompt) - cached + first[1] - 1)
    best = float("inf")
    rising = itertools.combinations_with_replacement(range(first[0] + 1), cached)
    for versions in sorted(rising, key=lambda found: (len(set(found)), -sum(found))):
        begin = [(checkpoints[version], len(list(same))) for version, same in itertools.groupby(versions)]
        found = by_pieces([*begin, head, *rest], [*prompt, *row["ids"]])[len(prompt) - 1 :]
        best = min(best, float((found - torch.tensor(row["log_probs"])).abs().max()))
        if best < 1e-5:
            return
    raise AssertionError((row["runs"], cached, best))


# A recipe with an environment on a real SGLang server: turns of the model, and between them what the world says.


SMALL_WORLD = [
    "--warm-start-steps", "0", "--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
    "--eval-interval", "none", "eval.eval_prompt_data=[]", "filter.dynamic_sampling_filter=[]",
    "--rollout-max-response-len", "200", "--rollout-max-context-len", "512",
    "--no-live", "--no-use-tensorboard", "--no-use-plot", "--log-interval", "1",
    "--rollout-stop-token-ids", "31",  # what an untrained model writes now and then
]  # fmt: skip


@pytest.mark.full
@pytest.mark.xdist_group("sglang")
def test_turns_in_an_environment_have_exact_tokens(tap: Path, sglang: RealServer) -> None:
    done = succeed_here(
        tap / "run", "--config", "multi_agent", str(tap / "tap.toml"), *SMALL_WORLD, "--engine", "sglang",
        *SIMULATED_TRAINER, "--hf-checkpoint", str(sglang.model), "--rollout-external-engine-addrs", sglang.url,
        cwd=tap,
    )  # fmt: skip
    assert done.summary["engine"]["version"] == EXPECTED_SGLANG
    assert done.summary["groups"]["trained"] == 12
    assert any("env/multi_agent/answers" in row for row in read_metrics(done.run_dir / "metrics.jsonl"))
    tokenizer, checked = load_tokenizer(str(sglang.model)), 0
    for row in tapped(done.run_dir):
        ids, mask, begin = row["tokens"], row["mask"], row["begin"]
        between = [tokenizer.decode(ids[start:end]) for start, end in _observations(mask, begin)]
        assert between in ([], ["user\n:assistant\n"]), "the verifier is asked behind the answer, and nothing else is"
        log_probs, own = torch.tensor(row["all_log_probs"]), torch.tensor(mask) == 1
        assert not log_probs[~own].any()
        if max(row["versions"]) == 0:  # of the weights that the test has
            expected = by_one(sglang.model, ids[:begin], ids[begin:])
            assert (expected - log_probs[begin:])[own[begin:]].abs().max() < 1e-5
            checked += bool(between)
    assert checked, "no episode of the first version had a second turn"
    assert asyncio.run(answered_tokens(sglang.url)) == 4, "the server outlives the run, and is not left paused"


async def answered_tokens(url: str) -> int:
    """The length of a short response. Waits at most 30 s for it."""
    request = GenerateRequest(input_ids=[5, 6, 7], sampling_params=SamplingParams(max_new_tokens=4, ignore_eos=True))
    async with EngineClient(url) as client, asyncio.timeout(120):
        [output] = await client.generate(request)
    return len(output.output_ids)


def _observations(mask: list[int], begin: int) -> list[tuple[int, int]]:
    """[start, end) of what was put between two turns of the model."""
    spans, at = [], begin
    for own, run in groupby(mask[begin:]):
        end = at + len(list(run))
        if not own and end < len(mask):
            spans.append((at, end))
        at = end
    return spans
