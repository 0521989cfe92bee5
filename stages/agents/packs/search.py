"""Pack: questions that are answered by looking things up, as in Search-R1 (arXiv 2503.09516).

    [[environment]]
    name = "search"
    options = { corpus = "wiki.jsonl", topk = 3 }

The model calls `search` with a query and reads what is found. `corpus` is a JSONL file (or `towns`, which is built in),
indexed in memory; `url` asks a server instead. See `retrieval` for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from stages.agents.environment import Task
from stages.agents.packs.parts import towns
from stages.agents.packs.parts.retrieval import Index, Retriever, Server
from stages.agents.packs.parts.tool_episode import ToolEpisode, shortened, text_argument
from stages.tools.tool import Arguments, Schema, Tool, function_schema

_QUERY = "query"


class Search(ToolEpisode):
    """Options besides those of every tool pack: `corpus` or `url` (with `timeout_s`), `topk` documents for a query, of
    which each has at most `document_chars`."""

    def __init__(
        self,
        *,
        corpus: str = "towns",
        url: str = "",
        topk: int = 3,
        document_chars: int = 1000,
        timeout_s: float = 30.0,
        max_calls: int = 4,
        result_chars: int = 4096,
        system: str = "",
    ) -> None:
        super().__init__(max_calls=max_calls, result_chars=result_chars, system=system)
        if topk < 1:
            raise ValueError(f"topk is {topk}, but must be at least 1")
        self._topk, self._document_chars = topk, document_chars
        self._retriever: Retriever = Server(url, timeout_s) if url else Index(corpus)
        self._indexed = "" if url else corpus

    @classmethod
    def tasks(cls, split: Literal["train", "heldout"], seed: int) -> Iterator[Mapping[str, Any]]:
        """Questions about the built-in corpus, with demonstrations for a model without a chat template."""
        for town, thing, number in towns.questions(split, seed):
            call, found = f"[{town} {thing}]", f"{town}: {number} {thing}\n"
            yield {
                "input": f"{town} {thing}=",
                "label": str(number),
                "demonstration": f"{call}{found}{number}\n",
                "tool_spans": [[len(call), len(call) + len(found)]],
            }

    async def open_tools(self, task: Task) -> Sequence[Tool]:
        search = _Search(self._retriever, self._topk, self._document_chars)
        if self._indexed:  # a server's answers may change
            search.version = f"{self._indexed} {self._topk} {self._document_chars}"
        return [search]


class _Search:
    name = "search"
    version: str
    schema: Schema = function_schema(
        "search",
        "Look something up. Answers with the documents that fit the query best.",
        {_QUERY: {"type": "string", "description": "a few words, for example towers of danor"}},
        [_QUERY],
    )

    def __init__(self, retriever: Retriever, topk: int, document_chars: int) -> None:
        self._retriever, self._topk, self._document_chars = retriever, topk, document_chars

    async def call(self, arguments: Arguments) -> str:
        """The documents, numbered where more than one is asked for. Raises ToolCallError."""
        query = text_argument(arguments, _QUERY, self.name)
        found = [shortened(text, self._document_chars) for text in await self._retriever.find(query, self._topk)]
        if not found:
            return "nothing was found\n"
        if self._topk == 1:
            return f"{found[0]}\n"
        return "".join(f"{number}. {text}\n" for number, text in enumerate(found, 1))
