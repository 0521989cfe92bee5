"""Control routes of an engine server: pause, abort, flush, weight updates, checksums.

Invariants: weight updates happen one at a time; a refused update leaves weights, label and requests as they were;
SGLang's routes for tensors in a request body are refused with a reason, because this server unpickles nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Struct

from models.engines import protocol
from models.engines.core import Completion, EngineCore, MemoryRequest
from models.errors import RequestRefused, WeightsRefused

T = TypeVar("T")
_TENSOR_ROUTES: Final = ("update_weights_from_tensor", "update_weights_from_distributed", "update_weights_from_ipc")


def send(payload: Struct | Mapping[str, Any], status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=msgspec.json.encode(payload), status=status, content_type="application/json")


@web.middleware
async def refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The answers to what an engine or a route refuses."""
    try:
        return await handler(request)
    except RequestRefused as error:
        return send({"error": protocol.ErrorDetail(error.message) if error.shaped else error.message}, error.status)
    except WeightsRefused as error:
        return send(protocol.UpdateAnswer(success=False, message=str(error)), status=400)


class ControlRoutes:
    """Control routes over one engine. `live` lists the completions that are not finished."""

    def __init__(self, core: EngineCore, live: Callable[[], list[Completion]]) -> None:
        self._core, self._live = core, live
        self._updating = asyncio.Lock()
        self._bracket = False  # between begin and end of a weight update
        self.model_path = core.facts.model_path

    def routes(self) -> list[web.RouteDef]:
        """Paths and handlers; SGLang serves flush_cache by GET as well."""
        post = {
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/flush_cache": self._flush,
            "/prepare_weights": self._prepare,
            "/update_weights_from_disk": self._update_from_disk,
            "/begin_weight_update": self._begin_or_end,
            "/end_weight_update": self._begin_or_end,
            "/update_weight_version": self._update_version,
            "/weights_checker": self._checker,
            "/release_memory_occupation": self._release_memory,
            "/resume_memory_occupation": self._resume_memory,
        }
        tensors = [web.post(f"/{name}", self._tensor_route) for name in _TENSOR_ROUTES]
        flush = web.get("/flush_cache", self._flush)
        return [web.post(path, handler) for path, handler in post.items()] + [*tensors, flush]

    async def _pause(self, http: web.Request) -> web.Response:
        await self._core.pause((await _body(http, protocol.PauseRequest)).mode)
        return send({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        await self._core.resume()
        return send({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, http: web.Request) -> web.Response:
        """A rid ends every request whose id begins with it."""
        request = await _body(http, protocol.AbortRequest)
        if not request.rid and not request.abort_all:
            raise RequestRefused("neither rid nor abort_all is set; send one of them")
        self._core.cancel([c for c in self._live() if request.abort_all or c.rid.startswith(request.rid)])
        return web.Response()

    async def _flush(self, http: web.Request) -> web.Response:
        if not await self._core.flush_cache():
            return web.Response(text="Flush cache failed.", status=400)
        return web.Response(text="Cache flushed.")

    async def _prepare(self, http: web.Request) -> web.Response:
        request = await _body(http, protocol.UpdateWeightsRequest)
        async with self._updating:
            verified = await self._core.prepare_weights(request.model_path, request.weight_version, request.claim)
        return send(protocol.UpdateAnswer(success=True, verified=verified))

    async def _update_from_disk(self, http: web.Request) -> web.Response:
        request = await _body(http, protocol.UpdateWeightsRequest)
        async with self._updating:
            waiting = len(self._live()) if self._core.paused else 0
            await self._core.update_weights(
                request.model_path, request.weight_version, request.abort_all_requests, request.claim
            )
            self.model_path = request.model_path
        message = "Succeeded to update model weights."
        return send(protocol.UpdateAnswer(success=True, message=message, num_paused_requests=waiting))

    async def _begin_or_end(self, http: web.Request) -> web.Response:
        begins = http.path == "/begin_weight_update"
        if begins and self._bracket:
            raise WeightsRefused("begin_weight_update was called already; call end_weight_update() first")
        if not begins and not self._bracket:
            raise WeightsRefused("end_weight_update must follow begin_weight_update()")
        self._bracket = begins
        return send(protocol.UpdateAnswer(success=True, message=f"Weight update {'begun' if begins else 'ended'}."))

    async def _tensor_route(self, http: web.Request) -> web.Response:
        name = http.path.strip("/")
        if not self._bracket:
            raise WeightsRefused(f"{name} must run between begin_weight_update() and end_weight_update()")
        raise WeightsRefused(f"{name} is not served by this engine; use update_weights_from_disk")

    async def _update_version(self, http: web.Request) -> web.Response:
        request = await _body(http, protocol.UpdateVersionRequest)
        if request.abort_all_requests:
            self._core.cancel(self._live())
        await self._core.relabel(request.new_version)
        return send({"success": True, "message": "Weight version updated.", "new_version": request.new_version})

    async def _checker(self, http: web.Request) -> web.Response:
        request = await _body(http, protocol.CheckerRequest)
        if request.action != "checksum":
            raise RequestRefused(f"action={request.action!r} is not served; use checksum")
        return send(protocol.CheckerAnswer(ranks=[protocol.RankChecksums(await self._core.checksums())]))

    async def _release_memory(self, http: web.Request) -> web.Response:
        async with self._updating:  # else weights that are being prepared would take memory after it was given back
            await self._core.release_memory((await _body(http, MemoryRequest)).wanted)
        return web.Response()

    async def _resume_memory(self, http: web.Request) -> web.Response:
        async with self._updating:
            await self._core.resume_memory((await _body(http, MemoryRequest)).wanted)
        return web.Response()


async def _body(http: web.Request, kind: type[T]) -> T:
    raw = await http.read() or b"{}"
    try:
        return protocol.decoder(kind).decode(raw)
    except msgspec.MsgspecError as error:
        raise RequestRefused(f"the body of {http.path} does not decode: {error}") from error
