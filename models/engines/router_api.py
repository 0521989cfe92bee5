"""The router in front of the engines: its worker API, and which fields of a request it loses.

Two kinds of one code line: `sglang` (sglang-router 0.3.2) and `smg` (1.13.0). Both proxy /generate only; control calls
go to the engines themselves. Both parse a request's body and write it anew, so that fields which they do not know, or
know wrongly, are lost on the way; the tables below were measured with every field set, and a test pins them.

Invariants: no call is repeated in here; adding is asynchronous (1-3 s until the worker is listed), and a removed worker
may stay listed for a second: whoever keeps the list looks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from models.engines.errors import EngineRefused
from models.engines.http_client import HttpClient
from models.engines.protocol import GenerateRequest, SamplingParams
from models.engines.token import Token

ROUTING_KEY_HEADER: Final = "X-SMG-Routing-Key"  # requests of one key go to one engine, with the right policy
REGULAR: Final = "regular"  # worker type of an engine that does everything
CONFLICT: Final = 409  # smg's answer to a worker that it has, or has not forgotten yet
NOT_FOUND: Final = 404


class RouterTraits(Struct, frozen=True):
    """Fields of a request's body that one kind of router does not pass on."""

    dropped: frozenset[str]  # at the top
    dropped_sampling: frozenset[str]


TRAITS: Final = {
    "sglang": RouterTraits(
        dropped=frozenset(
            {"routing_key", "return_routed_experts", "routed_experts_start_len", "input_logprob_temperature"}
        ),
        dropped_sampling=frozenset(
            {"stop_regex", "spaces_between_special_tokens", "stream_interval", "logit_bias", "custom_params"}
        ),
    ),
    "smg": RouterTraits(
        dropped=frozenset(),
        dropped_sampling=frozenset({"stop_regex", "spaces_between_special_tokens", "stream_interval", "logit_bias"}),
    ),
}


def lost_fields(kind: str, request: GenerateRequest) -> tuple[str, ...]:
    """Names of the fields that are set in the request and that a router of this kind would not pass on."""
    traits = TRAITS[kind]
    lost = [name for name in _set_fields(request) if name in traits.dropped]
    params = request.sampling_params
    for one in params if isinstance(params, list) else [params]:
        lost += [f"sampling_params.{name}" for name in _set_fields(one) if name in traits.dropped_sampling]
    return tuple(dict.fromkeys(lost))


def _set_fields(struct: GenerateRequest | SamplingParams) -> list[str]:
    """Fields with another value than their default."""
    plain = type(struct)()
    return [name for name in struct.__struct_fields__ if getattr(struct, name) != getattr(plain, name)]


class RouterWorker(Struct, frozen=True):
    """An engine as the router lists it. `worker_type`: regular, or prefill and decode where these are apart."""

    id: str
    url: str
    is_healthy: bool = True
    worker_type: str = REGULAR
    bootstrap_port: int | None = None  # of a prefill worker: where decode workers fetch the KV cache

    @property
    def role(self) -> Role:
        return Role(self.worker_type, self.bootstrap_port)


class Role(Struct, frozen=True, omit_defaults=True):
    """What an engine does for the router; these fields are part of the body that adds it."""

    worker_type: str = REGULAR
    bootstrap_port: int | None = None


class _Workers(Struct, frozen=True):
    workers: list[RouterWorker] = []


class _NewWorker(Role, frozen=True, omit_defaults=True, kw_only=True):
    url: str
    api_key: str | None = None


class RouterClient(HttpClient):
    """Worker API of the router at `base_url`. Raises the errors of `EngineClient`. A router that is well may have no
    worker."""

    def __init__(self, base_url: str, *, timeout_s: float = 10.0, token: Token | None = None) -> None:
        super().__init__(base_url, connect_timeout_s=timeout_s, token=token)
        self._timeout_s = timeout_s

    async def workers(self) -> list[RouterWorker]:
        """All workers, also those that are being removed (not healthy then)."""
        body = await self.call("GET", "/workers", None, self._timeout_s)
        return list(self.decode("/workers", body or b"{}", _Workers).workers)

    async def add(self, url: str, role: Role | None = None, token: Token | None = None) -> bool:
        """Ask for a worker; it is listed seconds later. False if the router still has one at this address. `token`:
        what the router sends it, before what it was sent itself."""
        role, key = role or Role(), token.text if token is not None else None
        new = _NewWorker(url=url, worker_type=role.worker_type, bootstrap_port=role.bootstrap_port, api_key=key)
        try:
            await self.call("POST", "/workers", new, self._timeout_s)
        except EngineRefused as error:
            if error.status == CONFLICT:
                return False
            raise
        return True

    async def remove(self, worker: RouterWorker) -> None:
        """Have a worker taken out; new requests go elsewhere at once. No error if it has gone."""
        try:
            await self.call("DELETE", f"/workers/{worker.id}", None, self._timeout_s)
        except EngineRefused as error:
            if error.status != NOT_FOUND:
                raise


def urls(workers: Sequence[RouterWorker], *, healthy: bool = False) -> frozenset[str]:
    """Addresses of the workers, or of those that the router sends requests to."""
    return frozenset(w.url.rstrip("/") for w in workers if w.is_healthy or not healthy)
