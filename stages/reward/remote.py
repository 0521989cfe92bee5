"""`remote`: a reward model behind HTTP, called by the reward stage itself.

POST of JSON `{prompt, response, label, metadata, sample_id, attempt}`; the answer is a number, a dict with `score`, or
a dict and `--reward-key`.

Invariants:
- at most `--rm-concurrency` requests are open at one time; a request that waits to be tried again holds no place;
- every try of one question carries the same `Idempotency-Key`, made of the sample and the question, so that a
  server may answer a repeated question from memory, and never one sample's question with another's answer;
- permanent faults (a refusal, a score that is no finite number) fail at once; transient faults (5xx, a lost connection,
  a timeout, an answer that is no JSON) are retried `--rm-retries` times, with pauses of min(2^k, 30) s + U(0, 1) s;
- 429 with Retry-After is obeyed without using up tries, at most `MAX_WAITS` times and for `MAX_WAIT_S` each.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import aiohttp
import msgspec
from msgspec import Struct

from configs.schema.data import RewardConfig
from stages.graders.grade import EXTRACTED_CHARS, Grade, clean, failed

MAX_ANSWER_BYTES = 1 << 20
MAX_PAUSE_S = 30.0
MAX_WAIT_S = 60.0  # of one Retry-After
MAX_WAITS = 20  # per question
_CONNECT_S = 10.0
_TRY_AGAIN = frozenset((408, 425, 429))  # of the 4xx: these say "later"


class Question(Struct, frozen=True):
    """The question to a reward model about one sample."""

    sample_id: str
    prompt: str
    response: str
    label: str | None
    metadata: str  # JSON object of the row
    url: str | None = None  # instead of the client's own

    def key(self) -> str:
        """The same for the same question, and for no other."""
        digest = hashlib.blake2b(digest_size=12)
        for text in (self.prompt, self.response, self.label or "", self.metadata):
            data = text.encode("utf-8", "replace")
            digest.update(len(data).to_bytes(8, "little") + data)
        return f"{self.sample_id}:{digest.hexdigest()}"

    def body(self, attempt: int) -> bytes:
        return msgspec.json.encode(
            {
                "prompt": clean(self.prompt),
                "response": clean(self.response),
                "label": None if self.label is None else clean(self.label),
                "metadata": msgspec.Raw(clean(self.metadata).encode()),
                "sample_id": self.sample_id,
                "attempt": attempt,
            }
        )


class _Fault(Struct, frozen=True):
    """Why one try gave no grade. `after_s`: the wait that the server wants; `free`: this wait uses up no try."""

    reason: str
    again: bool = True
    after_s: float | None = None
    free: bool = False
    timeout: bool = False


class RemoteReward:
    """Client of the reward model at `--rm-url`."""

    def __init__(self, reward: RewardConfig, reward_key: str | None = None) -> None:
        self.reward, self.reward_key = reward, reward_key
        self.sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
        self.jitter: Callable[[], float] = random.random
        self._places = asyncio.Semaphore(reward.rm_concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def grade(self, question: Question) -> Grade:
        """Try until there is a grade or a permanent fault. Waits for a place, for the answer, and between tries."""
        url = question.url or self.reward.rm_url
        if not url:
            return failed("rm_type 'remote' has no address; set --rm-url")
        key, used, waited, attempt = question.key(), 0, 0, 0
        while True:
            async with self._places:
                outcome = await self._try(url, question.body(attempt), key)
            attempt += 1
            if isinstance(outcome, Grade):
                return outcome
            free = outcome.free and waited < MAX_WAITS
            if not outcome.again or (used >= self.reward.rm_retries and not free):
                tries = "" if attempt == 1 else f", in {attempt} tries"
                return failed(f"{url}: {outcome.reason}{tries}", "timeout" if outcome.timeout else "error")
            await self.sleep(self._pause(used, outcome, free))
            used, waited = (used, waited + 1) if free else (used + 1, waited)

    def _pause(self, used: int, fault: _Fault, free: bool) -> float:
        backoff = min(2.0**used, MAX_PAUSE_S) + self.jitter()
        if fault.after_s is None:
            return backoff
        wait = min(fault.after_s, MAX_WAIT_S) + self.jitter()
        return wait if free else max(wait, backoff)

    async def _try(self, url: str, body: bytes, key: str) -> Grade | _Fault:
        """One exchange, with one deadline for all of it."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        try:
            async with asyncio.timeout(self.reward.rm_timeout_s):
                async with self._open().post(url, data=body, headers=headers, allow_redirects=False) as response:
                    text = await _read(response.content)
                    status, after_s = response.status, retry_after(response.headers.get("Retry-After"))
        except TimeoutError:
            return _Fault(f"no answer within {self.reward.rm_timeout_s:g} s (--rm-timeout-s)", timeout=True)
        except aiohttp.InvalidURL:
            return _Fault("this is no address; write --rm-url http://host:port/path", again=False)
        except (aiohttp.ClientError, OSError) as error:
            return _Fault(f"{type(error).__name__}: {error}")
        if 200 <= status < 300:
            return _answer(text, self.reward_key)
        words = (text or b"")[:200].decode(errors="replace")
        again = status >= 500 or status in _TRY_AGAIN
        return _Fault(f"it answered {status}: {words}", again, after_s, free=status == 429 and after_s is not None)

    def _open(self) -> aiohttp.ClientSession:
        """Made at the first question, for a session belongs to the event loop that runs then."""
        if self._session is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
            connector = aiohttp.TCPConnector(limit=self.reward.rm_concurrency)
            self._session = aiohttp.ClientSession(connector=connector, timeout=limits)
        return self._session


async def _read(content: aiohttp.StreamReader) -> bytes | None:
    """The body, None if it is longer than an answer can be."""
    data = bytearray()
    async for part in content.iter_chunked(1 << 16):
        data += part
        if len(data) > MAX_ANSWER_BYTES:
            return None
    return bytes(data)


def _answer(data: bytes | None, reward_key: str | None) -> Grade | _Fault:
    """A grade, or why the body is none. A body that is no JSON may be a proxy's page: try again."""
    if data is None:
        return _Fault(f"the answer is longer than {MAX_ANSWER_BYTES} bytes", again=False)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return _Fault(f"the answer {data[:80]!r} is no JSON")
    if not isinstance(value, dict):
        score = _number(value)
        return _fault_of(value, "the answer") if score is None else Grade(score)
    key = "score" if reward_key is None else reward_key
    if key not in value:
        keys = ", ".join(map(str, list(value)[:20])) or "none"
        return _Fault(f"the answer has no {key!r} (--reward-key); its keys: {keys}", again=False)
    score = _number(value[key])
    if score is None:
        return _fault_of(value[key], f"{key!r} of the answer")
    parts = {
        clean(name): part
        for name, item in value.items()
        if isinstance(item, int | float) and not isinstance(item, bool)  # everything else in it is left out
        if (part := _number(item)) is not None and (name, key) != ("score", "score")
    }
    correct, extracted = value.get("is_correct"), value.get("extracted")
    return Grade(
        score,
        correct if isinstance(correct, bool) else None,
        parts,
        clean(extracted[:EXTRACTED_CHARS]) if isinstance(extracted, str) else None,
    )


def _fault_of(value: object, name: str) -> _Fault:
    return _Fault(f"{name} is {json.dumps(value)[:80]}; a score must be one finite number", again=False)


def _number(value: object) -> float | None:
    """A finite number, also written as text."""
    if not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def retry_after(value: str | None) -> float | None:
    """Seconds to wait by a Retry-After header (a number, or an HTTP date); None without the header."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.fromtimestamp(time.time(), UTC)).total_seconds())
