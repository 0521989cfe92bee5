"""Where a search tool finds documents: an index in memory (BM25, by the library bm25s), or a server.

A server is one of the form that Search-R1 has: POST of `{"queries": [...], "topk": n, "return_scores": true}` gives
`{"result": [[{"document": {"contents": ...}, "score": ...}, ...]]}`.

Invariant: a world that is out of order is an InfrastructureError; a query that finds nothing is no error.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec
from msgspec import Struct

from stages.agents.environment import InfrastructureError
from stages.agents.packs.parts import towns

QUERY_CHARS = 1000  # of a query that are looked for
ANSWER_BYTES = 8 << 20


class Document(Struct, frozen=True):
    """One entry of a corpus. In a JSONL file: `title` and `text`, or `contents` with the title in its first line."""

    text: str = ""
    title: str = ""
    contents: str = ""

    def shown(self) -> str:
        title, text = self.title, self.text
        if self.contents:
            title, _, text = self.contents.partition("\n")
            title = title.strip('"')
        return f"{title}: {text}" if title and text else title or text


class Retriever(Protocol):
    """Finds documents."""

    async def find(self, query: str, topk: int) -> Sequence[str]:
        """At most `topk` documents as text, the best first. Raises InfrastructureError."""


class Index:
    """BM25 over the documents of a file, or over the built-in corpus `towns`."""

    def __init__(self, corpus: str) -> None:
        if importlib.util.find_spec("bm25s") is None:
            raise ValueError("a corpus is searched by the package bm25s: pip install bm25s, or give a url")
        if corpus != "towns" and not Path(corpus).is_file():
            raise ValueError(f"corpus is {corpus!r}, but there is no such file; give a JSONL file, or towns")
        self._corpus = corpus

    async def find(self, query: str, topk: int) -> Sequence[str]:
        """Documents that share a word with the query."""
        return await asyncio.to_thread(self._find, query[:QUERY_CHARS], topk)

    def _find(self, query: str, topk: int) -> list[str]:
        import bm25s

        index, documents = _load(self._corpus)
        words = bm25s.tokenize([query], stopwords=[], return_ids=False, show_progress=False)
        if not words[0]:
            return []
        found, scores = index.retrieve(words, k=min(topk, len(documents)), show_progress=False, n_threads=1)
        return [documents[at] for at, score in zip(found[0], scores[0], strict=True) if score > 0]


@lru_cache(maxsize=4)
def _load(corpus: str) -> tuple[Any, list[str]]:
    """The index of a corpus, once for each process, and its documents."""
    import bm25s

    if corpus == "towns":
        documents = [f"{town}: {number} {what}" for town, what, number in towns.facts()]
    else:
        with open(corpus, "rb") as lines:
            documents = [msgspec.json.decode(line, type=Document).shown() for line in lines if line.strip()]
    index = bm25s.BM25(backend="numpy")
    index.index(bm25s.tokenize(documents, stopwords=[], show_progress=False), show_progress=False)
    return index, documents


class Server:
    """A retrieval server at a URL."""

    def __init__(self, url: str, timeout_s: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url is {url!r}, but must begin with http:// or https://")
        self._url, self._timeout_s = url, timeout_s

    async def find(self, query: str, topk: int) -> Sequence[str]:
        """What the server finds."""
        order = {"queries": [query[:QUERY_CHARS]], "topk": topk, "return_scores": True}
        try:
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(self._url, json=order, allow_redirects=False) as answer,
            ):
                if answer.status != 200:
                    raise InfrastructureError(f"the retrieval server {self._url} answers with HTTP {answer.status}")
                data = b""
                async for part in answer.content.iter_any():
                    data += part
                    if len(data) > ANSWER_BYTES:
                        raise InfrastructureError(f"the retrieval server {self._url} answers with too many bytes")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise InfrastructureError(f"the retrieval server {self._url} does not answer ({error!r})") from error
        try:
            (found,) = _decoded(data)
        except ValueError as error:
            words = f"the answer of the retrieval server {self._url} is not of the form of Search-R1's ({error})"
            raise InfrastructureError(words) from error
        return found[:topk]


def _decoded(data: bytes) -> list[list[str]]:
    """Texts of each query. With scores, a document stands in an object of its own. Raises ValueError."""
    answer = msgspec.json.decode(data, type=dict[str, list[list[dict[str, Any]]]])
    entries = answer.get("result")
    if entries is None:
        raise ValueError("no 'result'")
    return [
        [msgspec.convert(entry.get("document", entry), type=Document).shown() for entry in found] for found in entries
    ]
