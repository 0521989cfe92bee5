"""The client: error types, SGLang's quirks, tolerant decoding, sparse encoding, and that it stays light."""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import errors
from models.engines.access_token import Token, read_token, run_token
from models.engines.answers import check_request, later_boundaries
from models.engines.client import EngineClient
from models.engines.protocol import GenerateRequest, SamplingParams, VersionSpan
from models.engines.serve import EngineServer
from models.engines.streamed import PartialOutputs
from tests.models.engines.harness import SIMULATED

NOWHERE = "http://127.0.0.1:9"


async def test_weights_updated_without_flush_is_a_success(canned) -> None:  # type: ignore[no-untyped-def]
    words = "Weights were updated, but the cache was not flushed because requests are running."
    status = {"/update_weights_from_disk": 400}
    client, server = await canned(json.dumps({"success": False, "message": words}).encode(), status=status)
    updated = await client.update_weights_from_disk("/ckpt", "v2")
    assert not updated.cache_flushed
    assert updated.message == words
    assert json.loads(server.bodies[0])["weight_version"] == "v2"
    # The server left its own note of the label at the old one: it is set in a way that aborts nothing.
    assert json.loads(server.bodies[1]) == {"new_version": "v2", "abort_all_requests": False}
    client, _ = await canned(b'{"success":false,"message":"Failed to load"}', status=400)
    with pytest.raises(errors.EngineRefused, match="refused the call with 400: Failed to load"):
        await client.update_weights_from_disk("/ckpt", "v2")


@pytest.mark.parametrize(("status", "body", "error", "words"), [
    (400, b'{"error":"unknown field `x`"}', errors.EngineRefused, "with 400: unknown field `x`"),
    (400, b'{"error":{"message":"too long"}}', errors.EngineRefused, "with 400: too long"),
    (404, b"404: Not Found", errors.EngineRefused, "with 404: 404: Not Found"),
    (503, b"no worker", errors.EngineUnreachable, "answered 503: no worker"),
    (500, b"", errors.EngineUnreachable, "answered 500"),
    (200, b"<html>", errors.EngineProtocolError, "answered b'<html>', which does not decode"),
    (200, b'{"output_ids":"abc","meta_info":{"id":"r"}}', errors.EngineProtocolError, "broke the protocol"),
])  # fmt: skip
async def test_errors_have_types_and_the_servers_words(canned, status: int, body: bytes, error, words: str) -> None:  # type: ignore[no-untyped-def]
    client, _ = await canned(body, status=status)
    with pytest.raises(error, match=words):
        await client.generate(GenerateRequest(input_ids=[1]))


async def test_a_dead_engine_is_unreachable() -> None:
    async with EngineClient(NOWHERE) as client:
        with pytest.raises(errors.EngineUnreachable, match=r"http://127\.0\.0\.1:9 cannot be reached"):
            await client.generate(GenerateRequest(input_ids=[1]))
        assert not await client.health()
        assert not await client.ready()
        await client._session.close()
        with pytest.raises(errors.EngineUnreachable, match="being closed"):
            await client.generate(GenerateRequest(input_ids=[1]))


@asynccontextmanager
async def broken_off(body: bytes, *, closes: bool) -> AsyncIterator[EngineClient]:
    """A client of a server that promises 100 bytes, and sends these."""

    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + body)
        if closes:
            writer.close()

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, EngineClient(f"http://127.0.0.1:{port}", timeout_s=20) as client:
        yield client


async def test_a_connection_lost_in_mid_answer_is_unreachable() -> None:
    async with broken_off(b"{", closes=True) as client:
        with pytest.raises(errors.EngineUnreachable, match="ClientPayloadError"):
            await client.generate(GenerateRequest(input_ids=[1]))


async def test_a_reader_while_the_client_is_closed_has_lost_the_engine() -> None:
    """And nothing else: what reads there is in the middle of a stage."""

    class Closing(PartialOutputs):
        def take(self, raw: bytes) -> None:
            for protocol in client._session.connector._acquired:
                protocol.close()  # as the connector does when it is closed itself

    async with broken_off(b"data: {}\n\n", closes=False) as client:
        with pytest.raises(errors.EngineUnreachable, match="Connection closed"):
            await client.generate(GenerateRequest(input_ids=[1]), partial=Closing())


async def test_what_no_engine_could_serve_is_not_sent() -> None:
    async with EngineClient(NOWHERE, vocab_size=10) as client:
        with pytest.raises(ValueError, match="stream=True is not for a request to generate"):
            await client.generate(GenerateRequest(input_ids=[1], stream=True))
        for start in (0, 4):
            with pytest.raises(ValueError, match="the first token has no log-prob"):
                await client.score([1, 2, 3], start)
        with pytest.raises(errors.RequestNotSent, match=f"not sent to engine {NOWHERE}: .*input_ids contains 10"):
            await client.generate(request([10]))


def scored(entries: object, **finish: object) -> bytes:
    """The answer to a scoring, as a real server sends it."""
    meta = {"id": "r1", "finish_reason": {"type": "length", "length": 0, **finish}, "input_token_logprobs": entries}
    return json.dumps({"text": "", "output_ids": [], "meta_info": meta}).encode()


@pytest.mark.parametrize(
    ("entries", "count"),
    [(None, 0), ([], 0), ([[None, 7, None]], 0), ([[None, 7, None], [-0.5, 8, None]], 1),
     ([[None, 7, None], [-0.5, 8, None], [None, 9, None]], 1)],
)  # fmt: skip
async def test_a_scoring_with_too_few_scores_is_no_answer(canned, entries: object, count: int) -> None:  # type: ignore[no-untyped-def]
    client, _ = await canned(scored(entries))
    with pytest.raises(errors.EngineProtocolError, match=f"scores {count} of 2 prompt tokens"):
        await client.score([5, 6, 7, 8, 9], 3)


async def test_an_aborted_scoring_is_typed(canned) -> None:  # type: ignore[no-untyped-def]
    client, _ = await canned(scored([], type="abort", message="the engine has stopped"))
    with pytest.raises(errors.EngineAborted, match="aborted the request: the engine has stopped"):
        await client.score([5, 6, 7, 8, 9], 3)


# What the client refuses before it is sent, and the helpers of answers: boundaries, spans, experts.


def request(ids: object = (1, 2, 3), **params: object) -> GenerateRequest:
    return GenerateRequest(input_ids=list(ids), sampling_params=SamplingParams(**params))  # type: ignore[arg-type, call-overload]


FRACTIONS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
NO_NUMBERS = [(field, value) for field in FRACTIONS for value in (math.nan, math.inf, -math.inf, -3.0)]
NO_NUMBERS += [("top_p", 0.0), ("top_p", 1.1), ("min_p", 1.5)]
SECOND_IS_WRONG = [SamplingParams(), SamplingParams(temperature=math.nan)]


@pytest.mark.parametrize(("asked", "words"), [
    *((request(**{field: value}), rf"{field}={value} must be a finite number") for field, value in NO_NUMBERS),
    (GenerateRequest(input_ids=[[1], [2]], sampling_params=SECOND_IS_WRONG), "temperature=nan"),
    (GenerateRequest(input_ids=[[1]], sampling_params=[SamplingParams()] * 2), "2 entries for 1 prompts"),
    (request(n=0), "n=0 must be at least 1"),
    (request([1, -1]), "input_ids contains -1"),
    (request([1, 2**31]), f"input_ids contains {2**31}"),
    (request([[1], []]), "empty prompt"),
    (request(top_k=0), r"top_k=0 must be -1 \(all\) or at least 1"),
    (request(max_new_tokens=-1), "max_new_tokens=-1 must be 0 or more"),
    (request(min_new_tokens=-1), "min_new_tokens=-1 must be 0 or more"),
    (request(min_new_tokens=9, max_new_tokens=8), "min_new_tokens=9 must not exceed max_new_tokens=8"),
    (request(stream_interval=0), "stream_interval=0 must be at least 1"),
])  # fmt: skip
def test_what_must_not_be_sent_is_refused(asked: GenerateRequest, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_request(asked)


def test_what_may_be_sent_passes() -> None:
    """Without a known vocabulary ids are still numbers of the wire."""
    check_request(request([0, 2**31 - 1]))
    check_request(request([0, 1], max_new_tokens=0))
    check_request(request([0, 1], max_new_tokens=None, min_new_tokens=9))
    check_request(GenerateRequest(text="of unknown length"))


def test_how_many_answers_a_request_asks_for() -> None:
    params = SamplingParams(n=3)
    assert GenerateRequest(input_ids=[1, 2], sampling_params=params).samples == 3
    assert GenerateRequest(input_ids=[[1], [2]], sampling_params=params).samples == 6
    assert GenerateRequest(text=["a", "b"]).samples == 2
    assert GenerateRequest(text="a").samples == 1
    assert GenerateRequest(input_ids=[[1], [2]], sampling_params=[params, SamplingParams()]).samples == 4


def spans(*ends: int) -> list[VersionSpan]:
    return [VersionSpan(f"v{i}", start, end) for i, (start, end) in enumerate(pairwise([0, *ends]))]


@given(st.lists(st.integers(1, 5), max_size=6))
def test_moved_spans_still_cover_every_token_once(lengths: list[int]) -> None:
    before = spans(*np.cumsum(lengths, dtype=int).tolist())
    after = later_boundaries(before)
    owner = [span.version for span in before for _ in range(span.end - span.start)]
    moved = [span.version for span in after for _ in range(span.end - span.start)]
    assert moved == owner[:1] + owner[:-1], "every token belongs to whom the token before it was said to belong to"
    assert [span.start for span in after] == [0, *[span.end for span in after]][: len(after)]
    assert all(span.start < span.end for span in after)


# Tokens of servers: their files, what a server does without one, what a client says of a wrong one.


TOKEN = Token("a-token-of-this-run")


def test_the_token_of_a_run_is_made_once_for_its_owner_and_shown_nowhere(tmp_path: Path) -> None:
    made = run_token(tmp_path / "token")
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert len(made.token.text) >= 32
    assert run_token(tmp_path / "token") == made
    assert run_token(tmp_path / "other").token != made.token
    assert made.token.text not in f"{made} {made!r} {made.token}"


def test_token_files_that_others_know_or_that_hold_none_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    with pytest.raises(
        errors.EngineStartError, match=r"token file .* cannot be read \(No such file or directory\); name the"
    ):
        read_token(file)
    file.touch(0o600)
    for content in (b"", b"short", b"two words of it", b"x" * 5000, b"\xff" * 20):
        file.write_bytes(content)
        with pytest.raises(errors.EngineStartError, match=r"holds no token: one line of 8 to .* openssl rand"):
            read_token(file)
    file.write_text("of-other-servers\n")
    assert read_token(file).token == Token("of-other-servers")
    file.chmod(0o640)
    with pytest.raises(
        errors.EngineStartError, match=r"has mode 0640, so that other users may know the token; make a new"
    ):
        read_token(file)
    file.chmod(0o600)
    os.chown(file, 1234, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with pytest.raises(errors.EngineStartError, match=r"is owned by user \d+, who knows the token"):
        read_token(file)


def test_which_headers_have_the_token() -> None:
    text = TOKEN.text
    wrong = (None, "", "Bearer", "Bearer ", text, f"Basic {text}", f"Bearer {text}x", f"Bearer {text[:-1]}")
    assert not [header for header in (*wrong, "Bearer \udcff\udcfe") if TOKEN.is_sent_by(header)]
    assert TOKEN.is_sent_by(TOKEN.header)
    assert TOKEN.is_sent_by(f"bearer {text}")


async def statuses(url: str, headers: Mapping[str, str]) -> dict[str, int]:
    """What each route of a server answers."""
    found = {}
    async with aiohttp.ClientSession(headers=headers) as http:
        for method, path in (
            ("GET", "/health"), ("GET", "/health_generate"), ("GET", "/ready"), ("GET", "/metrics"),
            ("GET", "/server_info"), ("GET", "/v1/models"), ("GET", "/nothing/there"), ("POST", "/generate"),
            ("POST", "/abort_request"), ("POST", "/pause_generation"), ("POST", "/update_weights_from_disk"),
            ("POST", "/flush_cache"),
        ):  # fmt: skip
            async with http.request(method, url + path, data=b"{") as answer:
                found[path] = answer.status
    return found


async def test_a_server_with_a_token_does_nothing_without_it() -> None:
    async with EngineServer(SIMULATED, "none", max_context_len=None, seed=0, token=TOKEN) as server:
        open_routes = {"/health", "/health_generate", "/ready", "/metrics"}
        for sent in ("", "Bearer of-another-run", f"Basic {TOKEN.text}"):
            found = await statuses(server.url, {"Authorization": sent} if sent else {})
            assert {path for path, status in found.items() if status == 200} == open_routes
            assert {status for path, status in found.items() if path not in open_routes} == {401}
        assert 401 not in (await statuses(server.url, {"Authorization": TOKEN.header})).values()


async def test_a_client_says_whose_token_is_wrong_and_what_to_do() -> None:
    request = GenerateRequest(input_ids=[1, 2], sampling_params=SamplingParams(max_new_tokens=2))
    async with EngineServer(SIMULATED, "none", max_context_len=None, seed=0, token=TOKEN) as server:
        async with EngineClient(server.url, token=TOKEN) as client:
            [answer] = await client.generate(request)
            assert answer.output_ids
        cure = r"give the token of servers that run already in a file, with --rollout-external-engine-token-file"
        async with EngineClient(server.url) as client:
            assert await client.health()
            with pytest.raises(errors.EngineUnauthorized, match=rf"401 .*: no token was sent; {cure}") as none:
                await client.generate(request)
        async with EngineClient(server.url, token=Token("of-another-run")) as client:
            with pytest.raises(
                errors.EngineUnauthorized, match=rf"not the one that it was started with; {cure}"
            ) as wrong:
                await client.server_info()
        for raised in (none, wrong):
            assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
            assert "of-another-run" not in str(raised.value)


async def test_a_server_without_a_token_stays_on_the_loopback_address() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", ""):
        with pytest.raises(
            errors.EngineStartError, match=r"lets other machines use this server .*; name a file .*--token-file"
        ):
            async with EngineServer(SIMULATED, "none", max_context_len=None, seed=0, host=host):
                raise AssertionError("it serves")


FIRST_USES = """
import sys, threading
from msgspec import Struct, defstruct
from models.engines.protocol import decoder

def kind(number):
    inner = defstruct(f"I{number}", [("a", dict[str, list[int] | None], {}), ("b", int | str | None, None)])
    return defstruct(f"S{number}", [("x", list[inner], []), ("y", dict[str, inner | None], {})])

def use():
    for kind in kinds:
        barrier.wait()
        decoder(kind).decode(b'{"x":[{"a":{}}]}')

kinds, barrier = [kind(number) for number in range(1000)], threading.Barrier(4)
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=use) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_may_use_a_type_for_the_first_time_together() -> None:
    """With msgspec.json.decode(..., type=kind) this program ends with SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
