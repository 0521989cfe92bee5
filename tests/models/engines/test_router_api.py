"""The worker API of a router, and what it loses of a request: sglang-router 0.3.2 itself, and a stand-in for faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from models.engines.access_token import Token, run_token
from models.engines.client import EngineClient
from models.engines.http_client import DROPPED, ROUTING_KEY_HEADER, Role, RouterClient, RouterWorker, lost_fields, urls
from models.engines.protocol import GenerateRequest, SamplingParams
from models.errors import EngineProtocolError, EngineRefused, EngineUnauthorized, EngineUnreachable
from tests.models.engines.harness import until
from tests.models.engines.real_router import Recorder, router_process
from tests.stages.faults import FakeRouter

# Every field with another value than its default. What excludes each other stands in different requests.
SAMPLING: dict[str, Any] = dict(
    temperature=0.7, top_p=0.8, top_k=11, min_p=0.1, max_new_tokens=33, min_new_tokens=2, stop=["end"],
    stop_token_ids=[7, 9], ignore_eos=True, skip_special_tokens=False, spaces_between_special_tokens=False,
    no_stop_trim=True, n=3, sampling_seed=77, frequency_penalty=0.3, presence_penalty=0.2, repetition_penalty=1.1,
    logit_bias={"5": 1.5}, stop_regex="a+", json_schema="{}", custom_params={"a": 1}, stream_interval=4,
)  # fmt: skip
TOP: dict[str, Any] = dict(
    input_ids=[1, 2, 3], rid="rid-1", return_logprob=True, logprob_start_len=1, top_logprobs_num=2,
    token_ids_logprob=[4], stream=True, extra_key="0.3", priority=5, routing_key="k", return_routed_experts=True,
    routed_experts_start_len=1, return_hidden_states=True, input_logprob_temperature=0.5,
)  # fmt: skip
ELSEWHERE = {"text", "sampling_params", "regex", "ebnf", "structural_tag", "beam_width"}
# What the generate stage sends in every request; none of it may get lost.
RELIED_ON = ("input_ids", "rid", "return_logprob", "extra_key", "stream", "sampling_params")


@pytest.fixture(scope="module")
def router_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with router_process(tmp_path_factory.mktemp("router"), "manual") as url:
        yield url


async def listed(router: RouterClient, *recorders: Recorder) -> None:
    """Wait until these are the router's workers, and well."""

    async def there() -> bool:
        workers = await router.workers()
        return urls(workers) == urls(workers, healthy=True) == {recorder.url for recorder in recorders}

    await until(there, timeout_s=60)


@asynccontextmanager
async def serving(url: str, *recorders: Recorder) -> AsyncIterator[RouterClient]:
    """The recorders as the router's only workers."""
    async with RouterClient(url) as router:
        for recorder in recorders:
            assert await router.add(recorder.url)
        await listed(router, *recorders)
        yield router
        for worker in await router.workers():
            await router.remove(worker)
        await listed(router)


@pytest.mark.slow
async def test_the_router_wants_the_token_and_passes_on_that_of_the_worker(tmp_path: Path) -> None:
    """sglang-router 0.3.2 sends a worker its own key, and behind it what the request brought."""
    token, theirs = run_token(tmp_path / "token"), Token("of-the-worker")
    request = GenerateRequest(input_ids=[1])
    with router_process(tmp_path, token=token) as url:
        async with Recorder() as recorder:
            async with RouterClient(url, token=token.token) as router, EngineClient(url, token=token.token) as client:
                assert await router.add(recorder.url, token=theirs)
                await listed(router, recorder)
                await client.generate(request)
                assert recorder.tokens[-1][0] == theirs.header
            for wrong in (None, theirs):
                async with RouterClient(url, token=wrong) as router, EngineClient(url, token=wrong) as client:
                    assert await router.health()
                    with pytest.raises(EngineUnauthorized):
                        await router.add("http://127.0.0.1:9")
                    with pytest.raises(EngineUnauthorized):
                        await router.workers()
                    with pytest.raises(EngineUnauthorized):
                        await client.generate(request)
        assert token.token.text not in (tmp_path / "router.log").read_text()


def test_every_field_of_a_request_is_judged() -> None:
    assert set(TOP) | ELSEWHERE >= set(GenerateRequest.__struct_fields__)
    assert set(SAMPLING) | ELSEWHERE >= set(SamplingParams.__struct_fields__)


@pytest.mark.slow
async def test_fields_that_the_router_drops(router_url: str) -> None:
    """sglang-router 0.3.2. A change here changes `models/engines/http_client.py`, and what must be sent directly. What
    an answer has of its own passes."""
    request = msgspec.convert({**TOP, "sampling_params": SAMPLING}, GenerateRequest)
    sent = msgspec.to_builtins(request)
    assert set(sent) == {*TOP, "sampling_params"}
    assert set(sent["sampling_params"]) == set(SAMPLING)
    async with Recorder() as recorder, serving(router_url, recorder), EngineClient(router_url) as client:
        await client.call("POST", "/generate", request, 30.0)
        answer = await client.call("POST", "/generate", GenerateRequest(input_ids=[1]), 30.0)
    assert answer == recorder.answer.encode()
    body = recorder.bodies[0]
    lost = [name for name in TOP if body.get(name) != sent[name]]
    lost += [f"sampling_params.{n}" for n in SAMPLING if body["sampling_params"].get(n) != sent["sampling_params"][n]]
    assert sorted(lost) == sorted(lost_fields("sglang", request))
    of_sampling = "custom_params logit_bias spaces_between_special_tokens stop_regex stream_interval"
    assert sorted(lost) == [
        *("input_logprob_temperature", "return_routed_experts", "routed_experts_start_len", "routing_key"),
        *(f"sampling_params.{name}" for name in of_sampling.split()),
    ]


@pytest.mark.slow
async def test_requests_of_one_key_stay_together(router_url: str) -> None:
    async with Recorder() as a, Recorder() as b, serving(router_url, a, b), EngineClient(router_url) as client:
        for key in [*range(32)] * 3:  # with 8 one run in a hundred had all of them at one engine
            request = GenerateRequest(input_ids=[key + 1])
            await client.generate(request, headers={ROUTING_KEY_HEADER: str(key)})
        keys = [{body["input_ids"][0] for body in worker.bodies} for worker in (a, b)]
    assert keys[0].isdisjoint(keys[1])
    assert all(keys), "and both engines have some"
    assert len(a.bodies) + len(b.bodies) == 96


@pytest.mark.slow
async def test_workers_come_and_go(router_url: str) -> None:
    async with Recorder() as recorder:
        async with serving(router_url, recorder) as router, EngineClient(router_url) as client:
            [worker] = await router.workers()
            assert (worker.url, worker.is_healthy) == (recorder.url, True)
            assert await router.health()
            await client.generate(GenerateRequest(input_ids=[1]))
        async with RouterClient(router_url) as router, EngineClient(router_url) as client:
            assert await router.workers() == []
            await router.remove(worker)  # it has gone: no error
            with pytest.raises(EngineUnreachable, match="answered 503: No available workers"):
                await client.generate(GenerateRequest(input_ids=[1]))


@pytest.mark.slow
async def test_prefill_and_decode_workers_are_taken_out_and_added_again_in_their_roles(tmp_path: Path) -> None:
    """sglang-router 0.3.2 lists a worker's role, takes it at POST /workers, and sends a request to one of each."""
    async with Recorder() as prefill, Recorder() as decode, asyncio.timeout(90):
        roles = {prefill.url: Role("prefill", 8998), decode.url: Role("decode")}
        pair = ["--pd-disaggregation", "--prefill", prefill.url, "8998", "--decode", decode.url]
        starting = router_process(tmp_path, "round_robin", *pair)
        url = await asyncio.to_thread(starting.__enter__)
        try:
            async with RouterClient(url) as router, EngineClient(url) as client:
                for _ in range(2):
                    await listed(router, prefill, decode)
                    workers = await router.workers()
                    assert {w.url: Role(w.worker_type, w.bootstrap_port) for w in workers} == roles
                    request = msgspec.convert({**TOP, "stream": False, "sampling_params": SAMPLING}, GenerateRequest)
                    await client.call("POST", "/generate", request, 30.0)
                    for worker in workers:
                        await router.remove(worker)
                    await listed(router)
                    for worker in workers:
                        assert await router.add(worker.url, worker)
        finally:
            starting.__exit__(None, None, None)
        for bodies in (prefill.bodies, decode.bodies):
            assert len(bodies) == 2
            assert {name for name in RELIED_ON if bodies[1].get(name) is None} == set()
            assert bodies[1]["bootstrap_room"] is not None


async def test_a_worker_that_is_not_forgotten_yet_is_not_added_and_no_error() -> None:
    async with FakeRouter(kind="smg") as fake, RouterClient(fake.url) as router:
        fake.conflict.add("http://e")
        assert not await router.add("http://e")
        fake.conflict.clear()
        assert await router.add("http://e")
        fake.lingering.add("http://e")
        await router.remove((await router.workers())[0])
        assert [w.is_healthy for w in await router.workers()] == [False]
        assert urls(await router.workers()) == {"http://e"}
        assert urls(await router.workers(), healthy=True) == frozenset()


async def test_errors_of_the_router_are_those_of_an_engine() -> None:
    async with FakeRouter() as fake, RouterClient(fake.url) as router:
        fake.broken = True
        with pytest.raises(EngineUnreachable, match="/workers answered 500: broken"):
            await router.workers()
    async with RouterClient(fake.url) as router:
        with pytest.raises(EngineUnreachable):
            await router.add("http://e")
        assert not await router.health()


async def test_odd_answers_of_a_router_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(client: RouterClient, method: str, *args: object) -> bytes:
        if method == "DELETE":
            raise EngineRefused("http://r", 400, "no such id")
        return b'{"workers": [3]}'

    monkeypatch.setattr(RouterClient, "call", call)
    async with RouterClient("http://r") as router:
        with pytest.raises(EngineProtocolError, match=r"/workers answered .*, which does not decode"):
            await router.workers()
        with pytest.raises(EngineRefused, match="no such id"):
            await router.remove(RouterWorker(id="1", url="http://e"))


@pytest.mark.parametrize(("kind", "fields", "lost"), [
    ("sglang", {}, ()),
    ("sglang", {"extra_key": "0.1", "rid": "r", "return_logprob": True}, ()),
    ("sglang", {"return_routed_experts": True}, ("return_routed_experts",)),
    ("smg", {"return_routed_experts": True, "input_logprob_temperature": 0.5}, ()),
    ("sglang", {"sampling_params": SamplingParams(logit_bias={"1": 2.0})}, ("sampling_params.logit_bias",)),
    ("smg", {"sampling_params": [SamplingParams(stop_regex="a")] * 2}, ("sampling_params.stop_regex",)),
    ("smg", {"sampling_params": SamplingParams(custom_params={"a": 1})}, ()),
])  # fmt: skip
def test_only_fields_that_are_set_are_lost(kind: str, fields: dict[str, Any], lost: tuple[str, ...]) -> None:
    assert lost_fields(kind, GenerateRequest(**fields)) == lost
    assert set(DROPPED) == {"sglang", "smg"}
