"""An engine in a thread of its own whose answers can be spoilt: a real server behind a front that lies and hangs.

Everything but what a test spoils is the real server's: it takes weights, says which it has, and is well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web

from configs.schema.rollout import EngineConfig
from models.engines.protocol import GenerateRequest
from models.engines.serve import EngineServer
from tests.other_programs import served_app

Handler = Callable[[web.Request, bytes], Awaitable[web.StreamResponse | None]]


class SpoiltEngine:
    """`spoil`: path -> what answers a request there, given its body; None: as the real server would."""

    def __init__(self, config: EngineConfig, model: Path | str, spoil: dict[str, Handler]) -> None:
        self.config, self.model, self.spoil = config, str(model), spoil
        self.url = ""
        self.server: EngineServer

    async def serve(self, up: threading.Event, stop: asyncio.Event) -> None:
        async with (
            EngineServer(self.config, self.model, max_context_len=None, seed=0) as self.server,
            aiohttp.ClientSession() as self._session,
        ):
            app = web.Application(client_max_size=1 << 28)
            app.router.add_route("*", "/{path:.*}", self._answer)
            async with served_app(app, handler_cancellation=True, shutdown_timeout=0.1) as self.url:
                up.set()
                await stop.wait()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if (handler := self.spoil.get(request.path)) is not None:
            answer = await handler(request, body)
            if answer is not None:
                return answer
        return await self.forward(request, body)

    async def forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """The real server's answer."""
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with self._session.request(
            request.method, f"{self.server.url}{request.path_qs}", data=body or None, headers=headers
        ) as upstream:
            response = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.content_type})
            await response.prepare(request)
            async for data in upstream.content.iter_any():
                await response.write(data.replace(b'"Simulated"', b'"Qwen3ForCausalLM"'))  # who is no model of its own
        await response.write_eof()
        return response


@contextlib.contextmanager
def serving(engine: SpoiltEngine) -> Iterator[SpoiltEngine]:
    """The engine, up, for the time of a block."""
    up, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await engine.serve(up, stop)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert up.wait(60), "the engine did not come up"
    try:
        yield engine
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(30)


async def never(request: web.Request, body: bytes) -> web.StreamResponse | None:
    """No answer at all."""
    await asyncio.sleep(3600)
    return None


# ---------------------------------------------------------------------- lies

MARK: Final = -0.123456789  # the log-prob of every token that is a lie: no engine makes the same number all the time


@dataclass(frozen=True)
class Lie:
    """What is wrong with an answer that has the right form."""

    beyond: int = 0  # tokens over its budget
    last_id: int = 1
    last_log_prob: float | None = MARK
    no_log_probs: int = 0  # tokens at the end without any
    version: Callable[[str], str] = str  # of the true label
    no_version: int = 0  # tokens at the end without one


def _moved(by: int) -> Callable[[str], str]:
    def change(label: str) -> str:
        epoch, _, version = label.partition(".")
        return f"{epoch}.{max(-1, int(version) + by)}"

    return change


LIES: Final[dict[str, Lie]] = {
    "longer": Lie(beyond=50),
    "fewer log-probs": Lie(no_log_probs=1),
    "nan": Lie(last_log_prob=math.nan),
    "no log-prob": Lie(last_log_prob=None),
    "impossible log-prob": Lie(last_log_prob=2.0),
    "beyond the vocabulary": Lie(last_id=1 << 20),
    "negative": Lie(last_id=-3),
    "beyond 32 bits": Lie(last_id=(1 << 32) + 5),
    "future": Lie(version=_moved(1000)),
    # By one, it may be true: what an engine had when it was asked is known to a client only after it has happened.
    "past": Lie(version=_moved(-8)),
    "another run": Lie(version=lambda label: f"77.{label.partition('.')[2]}"),
    "no version": Lie(version=lambda label: "banana"),
    "gap": Lie(no_version=1),
}
# What has no form at all, or never comes to an end.
NOISE: Final = (
    "html", "500", "503", "404", "nested", "not utf-8", "broken", "endless", "endless events", "drip", "silent",
)  # fmt: skip


class Liar(SpoiltEngine):
    """Each answer to /generate is a lie; `told` counts the kinds, each of which has its turn before one comes again.
    Nothing of what it says may be used."""

    def __init__(self, config: EngineConfig, model: Path | str, *, seed: int, kinds: Sequence[str] = ()) -> None:
        super().__init__(config, model, {"/generate": self._lie})
        self.told: Counter[str] = Counter()
        self._kinds = kinds or (*LIES, *NOISE)
        self._random = random.Random(seed)
        # What has to run into a time limit comes first, so that a run on a slow machine does not end before the limit.
        self._deck = sorted(self._random.sample(self._kinds, len(self._kinds)), key=("drip", "silent").__contains__)

    async def _lie(self, request: web.Request, body: bytes) -> web.StreamResponse | None:
        ask = msgspec.json.decode(body, type=GenerateRequest)
        self._deck = self._deck or self._random.sample(self._kinds, len(self._kinds))
        kind = self._deck.pop()
        self.told[kind] += 1
        if kind.isdigit():
            return web.json_response({"error": {"message": "out of order"}}, status=int(kind))
        if kind == "silent":
            return await never(request, body)
        response = web.StreamResponse(headers={"Content-Type": "text/html" if kind == "html" else "text/event-stream"})
        with contextlib.suppress(ConnectionError):  # the client has had enough
            await response.prepare(request)
            if kind in LIES:
                async with self._session.get(f"{self.server.url}/model_info") as info:
                    label = (await info.json())["weight_version"]
                await response.write(self._whole(ask, label, LIES[kind]))
            else:
                await self._noise(kind, request, response, ask)
            await response.write_eof()
        return response

    def _whole(self, ask: GenerateRequest, label: str, lie: Lie) -> bytes:
        """The whole answer, right but for what the lie says."""
        assert not isinstance(ask.sampling_params, list)
        budget = ask.sampling_params.max_new_tokens or 0
        right = min(3, budget)
        ids = [1] * ((budget + lie.beyond if lie.beyond else right) - 1) + [lie.last_id]
        log_probs = [[MARK, token, None] for token in ids[:-1]] + [[lie.last_log_prob, ids[-1], None]]
        span = {"version": lie.version(label), "start": 0, "end": len(ids) - lie.no_version}
        meta = {
            "id": ask.rid, "finish_reason": {"type": "stop"}, "completion_tokens": right, "weight_version": label,
            "output_token_logprobs": log_probs[: len(ids) - lie.no_log_probs], "weight_versions": [span],
        }  # fmt: skip
        answers = [{"index": n, "text": "", "output_ids": ids, "meta_info": meta} for n in range(ask.samples)]
        if ask.stream:
            return b"".join(_event(answer) for answer in answers) + b"data: [DONE]\n\n"
        return json.dumps(answers if ask.samples > 1 else answers[0]).encode()

    async def _noise(self, kind: str, request: web.Request, response: web.StreamResponse, ask: GenerateRequest) -> None:
        nothing = _event({"index": 0, "output_ids": [], "meta_info": {"id": ask.rid, "completion_tokens": 0}})
        head = b"data: " if ask.stream else b""
        texts = {
            "html": b"<html><body>502 Bad Gateway</body></html>\n",
            "nested": head + b'{"meta_info":{"id":"r","x":' + b"[" * 200_000 + b"]" * 200_000 + b"}}\n\n",
            "not utf-8": head + b'{"text":"\xff\xfe"}\n\n',
            "broken": b'data: {"index":0,"output_ids":[1,1,',
        }
        if kind in texts:
            await response.write(texts[kind])
            if kind == "broken" and request.transport is not None:
                request.transport.close()
            return
        more = {"endless": b" " * 65536, "endless events": nothing * 64, "drip": b" "}[kind]
        while True:
            await response.write(more)
            await asyncio.sleep(0.2 if kind == "drip" else 0)


def _event(answer: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(answer).encode() + b"\n\n"
