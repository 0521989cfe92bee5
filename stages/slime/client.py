"""Imports of user code written for slime besides `Sample`: `post`, `run` and `GenerateState`, and their event loop.

Invariants: nothing here depends on a run, so it works with any server that speaks SGLang's HTTP. All calls of a process
run in one loop, because clients and locks of user code belong to the loop that created them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, ClassVar, Final

_END_S: Final = 5.0


class UserLoop:
    """An event loop in a thread, started by the first call. `close` cancels all tasks."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Schedule the coroutine. Not thread-safe: one caller at a time."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="user-functions", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await the coroutine. Cancellation cancels it without waiting for its end."""
        return await asyncio.wrap_future(self.submit(work))

    def close(self) -> None:
        """Blocks for a few seconds at most; a thread that hangs ends with the process."""
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
        self._thread.join(_END_S)


async def _cancel_all() -> None:
    """Cancel all tasks of this loop, wait for them, and stop the loop."""
    mine = asyncio.current_task()
    tasks = [task for task in asyncio.all_tasks() if task is not mine]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_S / 2)
    asyncio.get_running_loop().stop()


RETRY_S: Final = 1.0
_BUSY: Final = (429, 503)
_LOOP: Final = UserLoop()


class PostFailed(Exception):
    """A server refused a request; the text has status and body."""


async def post(
    url: str, payload: Mapping[str, Any], max_retries: int = 60, headers: Mapping[str, str] | None = None
) -> Any:
    """POST JSON and give the JSON of the answer. Raises PostFailed, or what the last attempt to connect raised.

    Retries after a second if the server is unreachable or busy. A refusal is not retried: it would be refused again.
    """
    import aiohttp  # imported late: it takes 0.3 s, and many processes never call this

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
    """Run a coroutine from a synchronous rollout function. Blocks; all coroutines share one loop."""
    return _LOOP.submit(work).result()


class GenerateState:
    """Shared state of a function's calls: the tokenizer of transformers, sampling parameters, a limit of calls.

    One object for each model, created by the first call.
    """

    _known: ClassVar[dict[str, GenerateState]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()
    args: Any
    tokenizer: Any
    processor: Any
    semaphore: asyncio.Semaphore
    sampling_params: dict[str, Any]
    aborted: bool

    def __new__(cls, args: Any) -> GenerateState:
        with cls._lock:  # functions run in several threads, in which transformers must not be imported at once
            if args.hf_checkpoint in cls._known:
                return cls._known[args.hf_checkpoint]
            from transformers import AutoTokenizer

            state = super().__new__(cls)
            state.args, state.processor, state.aborted = args, None, False
            state.tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
            state.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)
            names = ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "skip_special_tokens")
            state.sampling_params = {
                **{name: getattr(args, f"rollout_{name}") for name in names},
                **{"max_new_tokens": args.rollout_max_response_len, "no_stop_trim": True},
                "spaces_between_special_tokens": False,
            }
            cls._known[args.hf_checkpoint] = state
            return state
