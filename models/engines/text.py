"""Token ids to text and back, from a checkpoint's `tokenizer.json`. Light: the `tokenizers` library only.

Invariant: a directory without a tokenizer still serves token ids; text is then empty, and whatever needs text (a text
prompt, a stop string) is refused by the intake.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.engines.errors import EngineStartError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TextCodec:
    """Decodes and encodes with one tokenizer, or with none."""

    def __init__(self, tokenizer: Tokenizer | None, eos_id: int | None) -> None:
        self._tokenizer = tokenizer
        self.eos_id = eos_id

    @classmethod
    def load(cls, directory: Path) -> TextCodec:
        """The tokenizer of a Hugging Face directory; an empty codec if there is none."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            return cls(None, None)
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise EngineStartError(f"tokenizer.json of {directory} cannot be read: {error}; save it again") from error
        return cls(tokenizer, _eos_id(directory, tokenizer))

    @property
    def available(self) -> bool:
        return self._tokenizer is not None

    def encode(self, text: str) -> list[int]:
        assert self._tokenizer is not None, "the intake refuses text without a tokenizer"
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        if self._tokenizer is None or not ids:
            return ""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def decode_many(self, rows: Sequence[Sequence[int]], skip_special: bool) -> list[str]:
        """One call for all rows: the library then decodes them without holding the interpreter."""
        if self._tokenizer is None:
            return [""] * len(rows)
        texts: list[str] = self._tokenizer.decode_batch([list(row) for row in rows], skip_special_tokens=skip_special)
        return texts


def _eos_id(directory: Path, tokenizer: Any) -> int | None:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return None
    token = json.loads(path.read_text()).get("eos_token")
    if isinstance(token, dict):  # written as an AddedToken
        token = token.get("content")
    found: int | None = tokenizer.token_to_id(token) if isinstance(token, str) else None
    return found


def find_stop(text: str, stops: Sequence[str]) -> str | None:
    """The stop string that occurs first in `text`, None if none does."""
    found = [(text.find(stop), stop) for stop in stops]
    hits = [hit for hit in found if hit[0] >= 0]
    return min(hits)[1] if hits else None


def ends_within_stop(text: str, stops: Sequence[str]) -> bool:
    """Whether a text ends with the beginning of a stop string, so that the next tokens may complete it."""
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def tail_tokens(stops: Sequence[str]) -> int:
    """How many last tokens must be decoded to see any stop string that the newest token completes: each token that
    shows at all carries a byte or more; the margin is for special tokens that are skipped."""
    return max(len(stop.encode()) for stop in stops) + 8
