"""HTTP client of one engine (SGLang, embedded or simulated): generation, control, weight updates.

Invariants:
- the client never repeats a call: a repeated rollout would be sampled twice. The owner of the lease decides;
- the client refuses what would end a real SGLang server (see `check_request`) before it sends it;
- control calls (pause, update, abort) must go to the engine itself: routers do not forward them;
- tensor and group updates never call `/update_weight_version`, which aborts every request;
- no torch, and nothing of the servers, is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Struct

from models.engines import protocol
from models.engines.access_token import Token
from models.engines.answers import AnswerLimits, check_request, input_scores, with_spans
from models.engines.core import ALL_TAGS, MemoryRequest, MemoryTag
from models.engines.http_client import Headers, HttpClient, T
from models.engines.streamed import PartialOutputs, StreamBroken
from models.errors import EngineProtocolError, EngineRefused, EngineUnreachable, RequestNotSent
from models.weights.layout import TORCH_NAMES, Bucket
from models.weights.shared_memory_reader import SlotManifest

# SGLang's words for "the weights did change, the cache was not emptied", sent with status 400.
_UPDATED_BUT_NOT_FLUSHED: Final = "Weights were updated"
_ALREADY_OPEN: Final = "already"  # of the bracket; both SGLang and our engines use the word
UPDATE_TIMEOUT_S: Final = 600.0


class WeightsUpdated(Struct, frozen=True):
    """A weight update that took effect. `cache_flushed` is False if the engine kept entries of older weights."""

    message: str
    cache_flushed: bool


class EngineClient(HttpClient):
    """Talks to one engine at `base_url`.

    `timeout_s` bounds a whole `generate` call, pauses included; `control_timeout_s` every other call, but those of
    updates by tensors or group and of memory, which have UPDATE_TIMEOUT_S.
    With `vocab_size`, where it is known, what the engine cannot serve is refused before it is sent: a real SGLang
    scheduler dies of a token id that it does not have.
    `early_boundary`, set later, moves the versions' boundaries in every response one token on; see
    `has_early_boundaries`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 3600.0,
        control_timeout_s: float = 120.0,
        connect_timeout_s: float = 10.0,
        vocab_size: int | None = None,
        token: Token | None = None,
    ) -> None:
        super().__init__(base_url, connect_timeout_s=connect_timeout_s, token=token)
        self.vocab_size, self.early_boundary = vocab_size, False
        self._timeout_s, self._control_timeout_s = timeout_s, control_timeout_s

    async def generate(
        self, request: protocol.GenerateRequest, *, partial: PartialOutputs | None = None, headers: Headers = None
    ) -> list[protocol.GenerateOutput]:
        """Send one request and return its responses: prompts in order, and the `n` samples of each side by side. Their
        spans are filled in.

        With `partial` the answer is streamed, and whatever error this call ends with, `partial.certain()` has what can
        be used of it. `headers` are for a router. Raises `RequestNotSent` for what `check_request` refuses.
        """
        if request.stream:
            raise ValueError("stream=True is not for a request to generate(); leave it False and pass partial")
        try:
            check_request(request, self.vocab_size)
        except ValueError as error:
            raise RequestNotSent(self.base_url, str(error)) from error
        limits = AnswerLimits.of(request, self.vocab_size)
        if partial is not None:
            partial.begin(limits, early_boundary=self.early_boundary)
            streamed = msgspec.structs.replace(request, stream=True)
            await self.stream("/generate", streamed, self._timeout_s, headers, partial)
            return self._outputs(partial)
        body = await self.call("POST", "/generate", request, self._timeout_s, headers, limits.answer_bytes)
        if body[:1] == b"[":
            outputs = self.decode("/generate", body, list[protocol.GenerateOutput])
        else:
            outputs = [self.decode("/generate", body, protocol.GenerateOutput)]
        return [with_spans(output, output.version_spans, self.early_boundary) for output in outputs]

    def _outputs(self, partial: PartialOutputs) -> list[protocol.GenerateOutput]:
        """Of a stream that has ended."""
        rejection = partial.rejection()
        if rejection is not None:  # what would have been the status of an answer that is not streamed
            status, words = rejection.status_code or 500, rejection.message or "no reason was given"
            if status < 500:
                raise EngineRefused(self.base_url, status, words)
            raise EngineUnreachable(self.base_url, f"/generate ended the request with {status}: {words}")
        try:
            return partial.outputs()
        except StreamBroken as error:
            if partial.complete:
                raise EngineProtocolError(self.base_url, str(error)) from error
            raise EngineUnreachable(self.base_url, str(error)) from error

    async def score(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.int32],
        start: int,
        *,
        temperature: float = 1.0,
        extra_key: str | None = None,
    ) -> npt.NDArray[np.float32]:
        """[..., n - start] log-probs of `token_ids[..., start:]`, each given all tokens before it; nothing is
        generated. One sequence [n], or several [S, n] in one request.

        `start` is at least 1, because the first token has no context; the first `start` - 1 tokens may come from the
        engine's prefix cache, if they are there under `extra_key`. Scores are of log_softmax(logits / temperature);
        SGLang always scores at temperature 1, the embedded engine at the given one. Raises `EngineAborted` if another
        client ended the request, and the errors of `generate`.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        *rows, length = ids.shape
        if not 1 <= start <= length:
            raise ValueError(
                f"start={start} of {length} tokens must be from 1 to their number: the first token has no log-prob"
            )
        if start == length:
            return np.empty((*rows, 0), dtype=np.float32)
        request = protocol.GenerateRequest(
            input_ids=ids.tolist(),
            sampling_params=protocol.SamplingParams(max_new_tokens=0),
            return_logprob=True,
            logprob_start_len=start - 1,
            input_logprob_temperature=temperature if temperature != 1.0 else None,
            extra_key=extra_key,
        )
        outputs = await self.generate(request)
        if len(outputs) != max(1, len(request.prompts)):
            raise EngineProtocolError(self.base_url, f"{len(outputs)} answers to {len(request.prompts)} prompts")
        scores = np.stack([input_scores(self.base_url, output, length - start) for output in outputs])
        return scores.reshape(*rows, length - start)

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text as the server sees it; a beginning-of-text token may come first. /generate reports them,
        because not every server has a route for tokenizing."""
        request = protocol.GenerateRequest(
            text=text,
            sampling_params=protocol.SamplingParams(max_new_tokens=0),
            return_logprob=True,
            logprob_start_len=0,
        )
        [output] = await self.generate(request)
        return [token for _, token, _ in output.meta_info.input_token_logprobs or ()]

    async def pause(self, mode: protocol.PauseMode) -> None:
        """Stop generating. abort ends all requests (200, partial output; about a second with SGLang), retract drops
        their KV cache, in_place keeps it. New requests wait."""
        await self.call("POST", "/pause_generation", protocol.PauseRequest(mode), self._control_timeout_s)

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self.call("POST", "/continue_generation", {}, self._control_timeout_s)

    async def abort(self, rid: str | None = None) -> None:
        """End the requests whose id begins with `rid`, or all. They answer with what they have."""
        request = protocol.AbortRequest(rid or "", abort_all=rid is None)
        await self.call("POST", "/abort_request", request, self._control_timeout_s)

    async def update_weights_from_disk(
        self, path: str, version_label: str | None, flush_cache: bool = True, claim: SlotManifest | None = None
    ) -> WeightsUpdated:
        """Load the Hugging Face checkpoint at `path` and call it `version_label` from the next token on.

        `claim`: what one of our engines compares its bytes with, unless it has done so in `prepare_weights`.

        Raises `EngineRefused` if it does not fit; the old weights then stay. Returns as `update` does.
        """
        request = protocol.UpdateWeightsRequest(
            model_path=path, weight_version=version_label, flush_cache=flush_cache, claim=claim
        )
        updated = await self.update("/update_weights_from_disk", request, self._control_timeout_s, flush_cache)
        if flush_cache and not updated.cache_flushed and version_label is not None:
            # With status 400 the server did not record the label.
            rename = protocol.UpdateVersionRequest(new_version=version_label, abort_all_requests=False)
            await self.call("POST", "/update_weight_version", rename, self._control_timeout_s)
        return updated

    async def prepare_weights(self, claim: SlotManifest) -> bool:
        """Have one of our engines load the next update beside its weights. Returns whether it has compared the bytes
        with the claim: one that casts them or lacks the memory has not. Raises `EngineRefused`."""
        request = protocol.UpdateWeightsRequest(model_path=claim.path, weight_version=claim.label, claim=claim)
        body = await self.call("POST", "/prepare_weights", request, self._control_timeout_s)
        return self.decode("/prepare_weights", body, protocol.UpdateAnswer).verified

    async def update(
        self, path: str, payload: Struct | Mapping[str, object], timeout_s: float, flush_cache: bool = False
    ) -> WeightsUpdated:
        """One call of a weight update. An engine that updated the weights but kept its cache answers 400: that is a
        success here, with `cache_flushed=False`. Raises `EngineRefused`."""
        try:
            body = await self.call("POST", path, payload, timeout_s)
        except EngineRefused as error:
            if error.status == 400 and error.reason.startswith(_UPDATED_BUT_NOT_FLUSHED):
                return WeightsUpdated(message=error.reason, cache_flushed=False)
            raise
        answer = self.decode(path, body, protocol.UpdateAnswer)
        if not answer.success:
            raise EngineRefused(self.base_url, 200, answer.message)
        return WeightsUpdated(message=answer.message, cache_flushed=flush_cache)

    async def model_info(self) -> protocol.ModelInfo:
        return await self._get("/model_info", protocol.ModelInfo)

    async def server_info(self) -> protocol.ServerInfo:
        return await self._get("/server_info", protocol.ServerInfo)

    async def has_early_boundaries(self, mode: protocol.PauseMode) -> bool:
        """Whether this engine reports a version's boundary one token early after a pause in `mode`: the value of
        `early_boundary` for the clients of this engine, or of its router."""
        return mode == "in_place" and (await self.server_info()).disable_overlap_schedule is False

    async def loads(self) -> list[protocol.Load]:
        """Load by data-parallel rank."""
        return (await self._get("/v1/loads", protocol.Loads)).loads

    async def ready(self) -> bool:
        """True if the engine takes requests now; False while it is paused or gone."""
        return await self.is_ok("/ready")

    async def weights_checker(self) -> list[dict[str, str]]:
        """Checksum by tensor name, for each rank."""
        body = await self.call("POST", "/weights_checker", protocol.CheckerRequest(), self._control_timeout_s)
        answer = self.decode("/weights_checker", body, protocol.CheckerAnswer)
        if not answer.success:
            raise EngineRefused(self.base_url, 200, answer.message)
        return [rank.checksums for rank in answer.ranks]

    # Weight updates beyond the disk route: the bracket, process groups, tensors, checksums, memory.

    async def begin_update(self) -> None:
        """Open the bracket that tensor and group updates must be in. One that a broken update left open is closed."""
        try:
            await self.update("/begin_weight_update", {}, UPDATE_TIMEOUT_S)
        except EngineRefused as error:
            if _ALREADY_OPEN not in error.reason:
                raise
            await self.end_update()
            await self.update("/begin_weight_update", {}, UPDATE_TIMEOUT_S)

    async def end_update(self) -> None:
        """Close the bracket. Raises EngineRefused if none is open."""
        await self.update("/end_weight_update", {}, UPDATE_TIMEOUT_S)

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
        await self.update("/init_weights_update_group", request, UPDATE_TIMEOUT_S)

    async def destroy_group(self, name: str) -> None:
        """Have the engine leave a group. Raises EngineRefused if it is in none of that name."""
        await self.update("/destroy_weights_update_group", {"group_name": name}, UPDATE_TIMEOUT_S)

    async def update_from_distributed(
        self, group: str, bucket: Bucket, *, label: str | None, flush_cache: bool
    ) -> WeightsUpdated:
        """Receive one broadcast: the tensors' bytes end to end. Waits for it; unblocked by its end or its failure."""
        specs = [item.spec for item in bucket.tensors]
        request = {
            "names": [spec.name for spec in specs],
            "dtypes": [TORCH_NAMES[spec.dtype] for spec in specs],
            "shapes": [spec.shape for spec in specs],
            "group_name": group,
            "load_format": "flattened_bucket",
        }
        return await self._load("/update_weights_from_distributed", request, label, flush_cache)

    async def update_from_tensor(self, payloads: list[str], *, label: str | None, flush_cache: bool) -> WeightsUpdated:
        """Load tensors from shared memory; one payload for each tensor-parallel rank."""
        request = {"serialized_named_tensors": payloads}
        return await self._load("/update_weights_from_tensor", request, label, flush_cache)

    async def checksum(self) -> str:
        """One digest (xxh3, hexadecimal) over the checksums of all tensors on all ranks, as the engine serves them.

        Engines agree only if they are of one kind and split alike: SGLang fuses and splits tensors.
        """
        text = msgspec.json.encode(await self.weights_checker(), order="sorted")
        return xxhash.xxh3_128_hexdigest(text)

    async def release_memory(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        """Give device memory back. The engine must be paused and idle: SGLang's scheduler (0.5.23) ends itself
        otherwise, ours refuse. Without --enable-memory-saver SGLang does nothing."""
        await self.call("POST", "/release_memory_occupation", MemoryRequest([*tags]), UPDATE_TIMEOUT_S)

    async def resume_memory(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        """Take the memory again. What was in it is undefined: update the weights before anything is generated."""
        await self.call("POST", "/resume_memory_occupation", MemoryRequest([*tags]), UPDATE_TIMEOUT_S)

    async def _load(
        self, path: str, tensors: Mapping[str, object], label: str | None, flush_cache: bool
    ) -> WeightsUpdated:
        about = {"weight_version": label, "flush_cache": flush_cache, "abort_all_requests": False}
        return await self.update(path, {**tensors, **about}, UPDATE_TIMEOUT_S, flush_cache)

    async def _get(self, path: str, kind: type[T]) -> T:
        return self.decode(path, await self.call("GET", path, None, self._control_timeout_s), kind)
