"""What user code written for slime imports beside `Sample`: `post`, `run` and `GenerateState`.

Invariant: nothing of a run is in here; they work with any server that speaks SGLang's HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, ClassVar, Final

from stages.agents.slime.user_loop import UserLoop

RETRY_S: Final = 1.0
_BUSY: Final = (429, 503)
_LOOP: Final = UserLoop()


class PostFailed(Exception):
    """A server refused a request; the text has its status and what it said."""


async def post(
    url: str, payload: Mapping[str, Any], max_retries: int = 60, headers: Mapping[str, str] | None = None
) -> Any:
    """POST JSON and give the JSON of the answer. Raises PostFailed, or what the last attempt to connect raised.

    Waits a second and tries again where a server cannot be reached or is busy. A refusal is not tried again: the same
    request would be refused again.
    """
    import aiohttp  # a third of a second in processes that load this package and never call

    for attempt in range(max_retries + 1):
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http,
                http.post(url, json=dict(payload), headers=headers) as response,
            ):
                if response.status < 400:
                    return await response.json()
                if response.status not in _BUSY or attempt == max_retries:
                    raise PostFailed(f"{response.status}: {(await response.text())[:1000]}")
        except aiohttp.ClientConnectionError:
            if attempt == max_retries:
                raise
        await asyncio.sleep(RETRY_S)
    raise AssertionError("the last attempt returns or raises")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns or raises, for a rollout function that is plain. Blocking; all run in one loop."""
    return _LOOP.submit(work).result()


class GenerateState:
    """What calls of a function share: the tokenizer of transformers, sampling parameters, a limit of calls.

    There is one for each model, made at the first call.
    """

    _known: ClassVar[dict[str, GenerateState]] = {}
    args: Any
    tokenizer: Any
    processor: Any
    semaphore: asyncio.Semaphore
    sampling_params: dict[str, Any]
    aborted: bool

    def __new__(cls, args: Any) -> GenerateState:
        found = cls._known.get(args.hf_checkpoint)
        if found is None:
            from transformers import AutoTokenizer

            found = super().__new__(cls)
            found.args, found.processor, found.aborted = args, None, False
            found.tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
            found.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)
            found.sampling_params = {
                "temperature": args.rollout_temperature,
                "top_p": args.rollout_top_p,
                "top_k": args.rollout_top_k,
                "max_new_tokens": args.rollout_max_response_len,
                "stop": args.rollout_stop,
                "stop_token_ids": args.rollout_stop_token_ids,
                "skip_special_tokens": args.rollout_skip_special_tokens,
                "no_stop_trim": True,
                "spaces_between_special_tokens": False,
            }
            cls._known[args.hf_checkpoint] = found
        return found
