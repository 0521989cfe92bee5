"""Weight-update calls of SGLang beyond the disk route: the bracket, process groups, tensors, checksums, memory.

Invariants: nothing is repeated in here; `/update_weight_version` is never called (it aborts every request); an engine
that updated the weights but kept its cache says so with status 400, which is a success with `cache_flushed=False`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import xxhash

from models.engines.client import EngineClient, WeightsUpdated
from models.engines.core import ALL_TAGS, MemoryRequest, MemoryTag
from models.engines.errors import EngineRefused

_ALREADY_OPEN: Final = "already"  # both SGLang and our engines use the word


class UpdateClient:
    """Weight-update calls over an engine's client. `timeout_s` bounds each call."""

    def __init__(self, client: EngineClient, *, timeout_s: float = 600.0) -> None:
        self.client, self.timeout_s = client, timeout_s

    async def begin(self) -> None:
        """Open the bracket that tensor and group updates must be in. One that a broken update left open is closed."""
        try:
            await self._update("/begin_weight_update", {})
        except EngineRefused as error:
            if _ALREADY_OPEN not in error.reason:
                raise
            await self.end()
            await self._update("/begin_weight_update", {})

    async def end(self) -> None:
        """Close the bracket. Raises EngineRefused if none is open."""
        await self._update("/end_weight_update", {})

    async def init_group(self, name: str, address: str, port: int, world_size: int, backend: str) -> None:
        """Have all ranks of the engine join a group as ranks 1 .. world_size - 1. Waits until they have met rank 0."""
        request = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._update("/init_weights_update_group", request)

    async def destroy_group(self, name: str) -> None:
        """Have the engine leave a group. Raises EngineRefused if it is in none of that name."""
        await self._update("/destroy_weights_update_group", {"group_name": name})

    async def update_from_distributed(
        self,
        group: str,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        *,
        label: str | None,
        flush_cache: bool,
    ) -> WeightsUpdated:
        """Receive one broadcast: the tensors' bytes end to end. Waits for it; unblocked by its end or its failure."""
        request = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group,
            "weight_version": label,
            "flush_cache": flush_cache,
            "load_format": "flattened_bucket",
            "abort_all_requests": False,
        }
        return await self._update("/update_weights_from_distributed", request, flush_cache)

    async def update_from_tensor(self, payloads: list[str], *, label: str | None, flush_cache: bool) -> WeightsUpdated:
        """Load tensors from shared memory; one payload for each tensor-parallel rank."""
        request = {
            "serialized_named_tensors": payloads,
            "weight_version": label,
            "flush_cache": flush_cache,
            "abort_all_requests": False,
        }
        return await self._update("/update_weights_from_tensor", request, flush_cache)

    async def checksum(self) -> str:
        """One digest (xxh3, hexadecimal) over the checksums of all tensors on all ranks, as the engine serves them.

        Engines agree only if they are of one kind and split alike: SGLang fuses and splits tensors.
        """
        ranks = await self.client.weights_checker()
        text = msgspec.json.encode([dict(rank) for rank in ranks], order="sorted")
        return xxhash.xxh3_128_hexdigest(text)

    async def release_memory(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        """Give device memory back. The engine must be paused and idle: SGLang's scheduler (0.5.23) ends itself
        otherwise, ours refuse. Without --enable-memory-saver SGLang does nothing."""
        await self.client.call("POST", "/release_memory_occupation", MemoryRequest([*tags]), self.timeout_s)

    async def resume_memory(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        """Take the memory again. What was in it is undefined: update the weights before anything is generated."""
        await self.client.call("POST", "/resume_memory_occupation", MemoryRequest([*tags]), self.timeout_s)

    async def _update(self, path: str, payload: Mapping[str, object], flush_cache: bool = False) -> WeightsUpdated:
        return await self.client.update(path, payload, self.timeout_s, flush_cache)
