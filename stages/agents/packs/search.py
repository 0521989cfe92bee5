"""Pack: questions that need a search engine, as in Search-R1 (arXiv 2503.09516).

    [[environment]]
    name = "search"
    options = { corpus = "wiki.jsonl", topk = 3 }

The model calls `search` with a query and reads the results. Documents come from one of three sources:

- `corpus`, a JSONL file, indexed in memory (BM25, by the library bm25s);
- the built-in corpus `towns`: the numbers of towers, trees or carts in invented towns, which cannot be known without a
  search. The tiny model of sums knows its few characters, and learns to search on a CPU;
- `url`, a server with Search-R1's interface: POST of `{"queries": [...], "topk": n, "return_scores": true}` gives
  `{"result": [[{"document": {"contents": ...}, "score": ...}, ...]]}`.

Invariant: a failed server is an InfrastructureError; a query without results is not an error.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
import msgspec
from msgspec import Struct

from stages.agents.environment import InfrastructureError, Task
from stages.agents.tool_episode import ToolEpisode
from stages.tools.tool import TextTool, Tool, shortened

THINGS: Final = ("towers", "trees", "carts", "stores", "cows", "roads", "seats", "actors")
_FIRST: Final = ("an", "ca", "co", "da", "do", "na", "no", "ra", "ro", "sa", "so", "ta", "to", "wa", "wo")
_SECOND: Final = ("cada", "dera", "nda", "ndo", "ne", "rano", "re", "ston", "tone", "tu", "wen", "te")
_THIRD: Final = ("", "n", "r", "s", "st")
TOWNS: Final = 400
_HELDOUT: Final = 5  # questions about every fifth town are held out

Fact = tuple[str, str, int]  # town, thing, how many


@lru_cache(maxsize=1)
def town_names() -> tuple[str, ...]:
    """All towns, in a fixed order."""
    every = sorted({a + b + c for a in _FIRST for b in _SECOND for c in _THIRD} - set(THINGS))
    random.Random("towns").shuffle(every)
    return tuple(every[:TOWNS])


def town_facts() -> list[Fact]:
    """Every fact of the corpus; each is one document."""
    chosen = random.Random("facts")
    return [(town, thing, chosen.randint(2, 99)) for town in town_names() for thing in THINGS]


def town_questions(split: str, seed: int) -> Iterator[Fact]:
    """Questions, endless. The held-out questions are about towns that training never mentions."""
    heldout = {town for at, town in enumerate(town_names()) if at % _HELDOUT == 0}
    facts = [fact for fact in town_facts() if (fact[0] in heldout) == (split == "heldout")]
    chosen = random.Random(f"questions {split} {seed}")
    while True:
        yield chosen.choice(facts)


QUERY_CHARS = 1000  # of a query that are searched
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


class Index:
    """BM25 over the documents of a file, or over the built-in corpus `towns`."""

    def __init__(self, corpus: str) -> None:
        if importlib.util.find_spec("bm25s") is None:
            raise ValueError("a corpus is searched by the package bm25s: pip install bm25s, or give a url")
        if corpus != "towns" and not Path(corpus).is_file():
            raise ValueError(f"corpus is {corpus!r}, but there is no such file; give a JSONL file, or towns")
        self._corpus = corpus

    async def find(self, query: str, topk: int) -> Sequence[str]:
        """At most `topk` documents that share a word with the query, the best first."""
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
    """The index of a corpus and its documents, cached in this process."""
    import bm25s

    if corpus == "towns":
        documents = [f"{town}: {number} {what}" for town, what, number in town_facts()]
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
        """At most `topk` results of the server, the best first. Raises InfrastructureError."""
        order = {"queries": [query[:QUERY_CHARS]], "topk": topk, "return_scores": True}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s)) as session,
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
            words = f"the answer of the retrieval server {self._url} is not in Search-R1's form ({error})"
            raise InfrastructureError(words) from error
        return found[:topk]


def _decoded(data: bytes) -> list[list[str]]:
    """Texts by query. In answers with scores, an object wraps each document. Raises ValueError."""
    entries = msgspec.json.decode(data, type=dict[str, list[list[dict[str, Any]]]]).get("result")
    if entries is None:
        raise ValueError("no 'result'")
    return [[msgspec.convert(one.get("document", one), type=Document).shown() for one in hits] for hits in entries]


@dataclass
class Search(ToolEpisode):
    """Options besides those of every tool pack: `corpus` or `url` (with `timeout_s`); `topk` documents for a query,
    each of at most `document_chars` characters."""

    corpus: str = "towns"
    url: str = ""
    topk: int = 3
    document_chars: int = 1000
    timeout_s: float = 30.0
    max_calls: int = field(default=4, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topk < 1:
            raise ValueError(f"topk is {self.topk}, but must be at least 1")
        self._retriever = Server(self.url, self.timeout_s) if self.url else Index(self.corpus)

    @classmethod
    def tasks(cls, split: Literal["train", "heldout"], seed: int) -> Iterator[Mapping[str, Any]]:
        """Questions about the built-in corpus, with demonstrations for a model without a chat template."""
        for town, thing, number in town_questions(split, seed):
            query, line = f"[{town} {thing}]", f"{town}: {number} {thing}\n"
            yield {
                "input": f"{town} {thing}=",
                "label": str(number),
                "demonstration": f"{query}{line}{number}\n",
                "tool_spans": [[len(query), len(query) + len(line)]],
            }

    async def open_tools(self, task: Task) -> Sequence[Tool]:
        description = "Look something up. Answers with the documents that fit the query best."
        example = "a few words, for example towers of danor"
        search = TextTool("search", description, "query", example, self._found)
        if not self.url:  # a server's answers may change
            search.version = f"{self.corpus} {self.topk} {self.document_chars}"
        return [search]

    async def _found(self, query: str) -> str:
        """The documents, numbered if `topk` is above 1."""
        documents = [shortened(text, self.document_chars) for text in await self._retriever.find(query, self.topk)]
        if not documents:
            return "nothing was found\n"
        if self.topk == 1:
            return f"{documents[0]}\n"
        return "".join(f"{number}. {text}\n" for number, text in enumerate(documents, 1))
