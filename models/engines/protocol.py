"""Requests and answers of SGLang's HTTP protocol (0.5.23), as far as rollouts need it.

Invariants:
- answers decode tolerantly: unknown keys are ignored, all that is not needed has a default;
- requests encode sparsely: a field at its default is not sent, for routers drop or refuse fields they do not know. The
  sampling fields that define the behaviour policy are the exception and are always sent, so that a server's own
  defaults (say, from a checkpoint's generation config) can never change them;
- unknown sampling fields are refused on decoding, unknown top-level fields are ignored, both as SGLang does.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct, field

from models.weights.shared_memory_reader import SlotManifest

PauseMode = Literal["abort", "retract", "in_place"]
EXPECTED_SGLANG = "0.5.23"  # the release whose behaviour the contract tests pin
DEFAULT_LABEL = "default"  # of weights without a given name

# [log-prob or null, token id, text or null]
LogprobEntry = tuple[float | None, int, str | None]


class SamplingParams(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """`sampling_params` of /generate. `max_new_tokens` and `min_new_tokens` count tokens of the response."""

    # A default made by a factory is never omitted: these four are always on the wire.
    temperature: float = field(default_factory=lambda: 1.0)
    top_p: float = field(default_factory=lambda: 1.0)
    top_k: int = field(default_factory=lambda: -1)
    min_p: float = field(default_factory=lambda: 0.0)
    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    sampling_seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    stop_regex: str | list[str] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    custom_params: dict[str, Any] | None = None
    stream_interval: int | None = None
    beam_width: int | None = None


class GenerateRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Body of POST /generate. `input_ids` is one prompt or a list of prompts; `rid` then one id or a list."""

    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    rid: str | list[str] | None = None
    sampling_params: SamplingParams | list[SamplingParams] = SamplingParams()
    return_logprob: bool = False
    logprob_start_len: int = -1  # prompt tokens after this position are scored, at temperature 1; -1: none
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    stream: bool = False
    extra_key: str | None = None
    priority: int | None = None
    routing_key: str | None = None
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    return_hidden_states: bool = False
    # Ours: divides the logits of scored prompt tokens, None = 1. SGLang knows no such field, ignores it, scores at 1.
    input_logprob_temperature: float | None = None

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts as lists of token ids; empty if the request carries text."""
        ids = self.input_ids
        if not ids:
            return []
        if isinstance(ids[0], int):
            return [ids]  # type: ignore[list-item]
        return ids  # type: ignore[return-value]

    @property
    def samples(self) -> int:
        """Number of responses to this request."""
        if isinstance(self.sampling_params, list):
            return sum(params.n for params in self.sampling_params)
        texts = len(self.text) if isinstance(self.text, list) else 1
        return (len(self.prompts) or texts) * self.sampling_params.n


class VersionSpan(Struct, frozen=True):
    """Output tokens [start, end) were made by the weights called `version`."""

    version: str
    start: int
    end: int


class FinishReason(Struct, frozen=True, omit_defaults=True):
    """Why a response ended: `stop` (with what matched), `length`, or `abort` (HTTP 200, output so far kept)."""

    type: str
    matched: int | str | list[int] | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None


class CachedDetails(Struct, frozen=True):
    """Source of cached prompt tokens."""

    device: int = 0
    host: int = 0


class MetaInfo(Struct, frozen=True, kw_only=True):
    """An engine's report about one response. Times in seconds."""

    id: str
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = 0
    cached_tokens_details: CachedDetails | None = None
    weight_version: str | None = None
    weight_versions: list[VersionSpan] | None = None
    num_retractions: int | None = 0
    input_token_logprobs: list[LogprobEntry] | None = None
    output_token_logprobs: list[LogprobEntry] | None = None
    output_token_logprobs_length: int | None = None
    routed_experts: str | None = None
    spec_num_correct_drafts: int | None = None
    spec_num_proposed_drafts: int | None = None
    e2e_latency: float | None = None
    queue_time: float | None = None
    first_token_latency: float | None = None
    decode_throughput: float | None = None


class GenerateOutput(Struct, frozen=True, kw_only=True):
    """One response (of one prompt and one sample)."""

    meta_info: MetaInfo
    text: str = ""
    output_ids: list[int] = []
    index: int = 0

    @property
    def aborted(self) -> bool:
        """True if the response is partial because a client or the server ended it."""
        reason = self.meta_info.finish_reason
        return reason is not None and reason.type == "abort"

    @property
    def output_log_probs(self) -> list[float]:
        """[len(output_ids)] log-probs of the output tokens: after temperature, before top-k, top-p and min-p.

        Raises ValueError if the request did not ask for them or if one is not a number.
        """
        values = [entry[0] for entry in self.meta_info.output_token_logprobs or ()]
        numbers = [value for value in values if value is not None]
        if len(numbers) != len(self.output_ids):
            raise ValueError(
                f"response {self.meta_info.id} has {len(self.output_ids)} tokens and {len(numbers)} log-probs; "
                "send return_logprob=True"
            )
        return numbers

    @property
    def version_spans(self) -> list[VersionSpan]:
        """Half-open spans that cover all output tokens; a server that reports none made all with one version."""
        spans = [span for span in self.meta_info.weight_versions or () if span.start < span.end]
        if spans:
            return spans
        count = len(self.output_ids)
        return [VersionSpan(self.meta_info.weight_version or DEFAULT_LABEL, 0, count)] if count else []


class PauseRequest(Struct, frozen=True):
    """Body of POST /pause_generation."""

    mode: PauseMode = "abort"


class AbortRequest(Struct, frozen=True, omit_defaults=True):
    """Body of POST /abort_request; `rid` matches every request id that begins with it."""

    rid: str = ""
    abort_all: bool = False


class UpdateWeightsRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Body of POST /update_weights_from_disk and of our engines' /prepare_weights. The defaults are SGLang's."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    claim: SlotManifest | None = None  # for our engines: what the directory must hold, byte for byte


class UpdateVersionRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /update_weight_version. Mind SGLang's default: it aborts everything."""

    new_version: str
    abort_all_requests: bool = True


class UpdateAnswer(Struct, frozen=True, kw_only=True):
    """Answer to a weight update."""

    success: bool
    message: str = ""
    num_paused_requests: int | None = 0
    verified: bool = False  # of our engines' /prepare_weights: the claim holds, and the weights are there


class CheckerRequest(Struct, frozen=True):
    """Body of POST /weights_checker."""

    action: str = "checksum"


class RankChecksums(Struct, frozen=True):
    """Checksum (hexadecimal) by tensor name on one rank."""

    checksums: dict[str, str] = {}


class CheckerAnswer(Struct, frozen=True, kw_only=True):
    """Answer of POST /weights_checker."""

    success: bool = True
    message: str = ""
    ranks: list[RankChecksums] = []


class ModelInfo(Struct, frozen=True, kw_only=True):
    """GET /model_info."""

    model_path: str = ""
    served_model_name: str = ""
    tokenizer_path: str | None = None
    is_generation: bool = True
    weight_version: str | None = None
    load_format: str | None = None
    model_type: str | None = None
    architectures: list[str] | None = None
    vocab_size: int | None = None


class ServerInfo(Struct, frozen=True, kw_only=True):
    """GET /server_info: the part of it that we read. `context_length` in tokens."""

    version: str = ""
    model_path: str = ""
    served_model_name: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    context_length: int | None = None
    max_running_requests: int | None = None
    max_total_num_tokens: int | None = None
    disable_overlap_schedule: bool | None = None
    incremental_streaming_output: bool | None = None
    stream_interval: int | None = None
    tp_size: int | None = 1
    pp_size: int | None = 1
    dp_size: int | None = 1
    disaggregation_mode: str = "null"  # or prefill, decode
    disaggregation_bootstrap_port: int | None = None


class Load(Struct, frozen=True, kw_only=True):
    """Load of one data-parallel rank. Counts of requests and tokens; `gen_throughput` in tokens/s."""

    dp_rank: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    busy_s: float = 0.0  # ours: seconds of computing since the start; a real SGLang does not send it
    max_total_num_tokens: int = 0
    max_running_requests: int = 0
    token_usage: float = 0.0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0


class Loads(Struct, frozen=True, kw_only=True):
    """GET /v1/loads."""

    version: str = ""
    loads: list[Load] = []


class ErrorDetail(Struct, frozen=True, omit_defaults=True):
    """The longer of SGLang's two shapes of `error`. In a stream it has a `code`; routers put words there."""

    message: str = ""
    code: int | str | None = None


class ErrorBody(Struct, frozen=True, kw_only=True):
    """Any refusal: `{"error": "..."}`, `{"error": {"message": "..."}}` or `{"success": false, "message": "..."}`."""

    error: str | ErrorDetail | None = None
    message: str = ""


def error_words(error: ErrorDetail | str) -> str:
    """The text of an `error`, in either shape."""
    return error.message if isinstance(error, ErrorDetail) else error


T = TypeVar("T")
_building = threading.Lock()
_decoder = functools.cache(msgspec.json.Decoder)


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Of JSON. msgspec learns a type at its first use, and crashes where two threads do that at the same time."""
    with _building:
        return _decoder(kind)  # type: ignore[arg-type]  # a class is hashable
