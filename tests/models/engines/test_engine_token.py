"""Tokens of servers: their files, what a server does without one, what a client says of a wrong one."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest

from models.engines.client import EngineClient
from models.engines.protocol import GenerateRequest, SamplingParams
from models.engines.serve import EngineServer
from models.engines.token import Token, read_token, run_token
from models.errors import EngineStartError, EngineUnauthorized
from tests.models.engines.harness import SIMULATED

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
    with pytest.raises(EngineStartError, match=r"token file .* cannot be read \(No such file or directory\); name the"):
        read_token(file)
    file.touch(0o600)
    for content in (b"", b"short", b"two words of it", b"x" * 5000, b"\xff" * 20):
        file.write_bytes(content)
        with pytest.raises(EngineStartError, match=r"holds no token: one line of 8 to .* openssl rand"):
            read_token(file)
    file.write_text("of-other-servers\n")
    assert read_token(file).token == Token("of-other-servers")
    file.chmod(0o640)
    with pytest.raises(EngineStartError, match=r"has mode 0640, so that other users may know the token; make a new"):
        read_token(file)
    file.chmod(0o600)
    os.chown(file, 1234, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with pytest.raises(EngineStartError, match=r"is owned by user \d+, who knows the token"):
        read_token(file)


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        (None, False),
        ("", False),
        ("Bearer", False),
        ("Bearer ", False),
        (TOKEN.text, False),
        (f"Basic {TOKEN.text}", False),
        (f"Bearer {TOKEN.text}x", False),
        (f"Bearer {TOKEN.text[:-1]}", False),
        ("Bearer \udcff\udcfe", False),
        (TOKEN.header, True),
        (f"bearer {TOKEN.text}", True),
    ],
)
def test_which_headers_have_the_token(header: str | None, accepted: bool) -> None:
    assert TOKEN.is_sent_by(header) is accepted


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


async def test_a_server_with_a_token_does_nothing_for_who_lacks_it() -> None:
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
            with pytest.raises(EngineUnauthorized, match=rf"401 .*: no token was sent; {cure}") as none:
                await client.generate(request)
        async with EngineClient(server.url, token=Token("of-another-run")) as client:
            with pytest.raises(EngineUnauthorized, match=rf"not the one that it was started with; {cure}") as wrong:
                await client.server_info()
        for raised in (none, wrong):
            assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
            assert "of-another-run" not in str(raised.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
async def test_a_server_without_a_token_stays_on_the_loopback_address(host: str) -> None:
    with pytest.raises(EngineStartError, match=r"lets other machines use this server .*; name a file .*--token-file"):
        async with EngineServer(SIMULATED, "none", max_context_len=None, seed=0, host=host):
            raise AssertionError("it serves")
