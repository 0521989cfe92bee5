"""The instructions of IFEval (arXiv 2311.07911) as functions of a response: does it hold?

Each rule takes the response and its arguments from the row (`Arguments`), and says yes or no. Words are runs of
letters and digits, paragraphs stand between blank lines, or between `***` where there are such lines. Everything is
decided from the text alone, in time linear in it; only the language of a response needs the package langdetect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from msgspec import Struct


class RuleError(ValueError):
    """An instruction's arguments are wrong, or it cannot be checked here."""


class Arguments(Struct, frozen=True):
    """The arguments of one instruction."""

    instruction: str
    values: Mapping[str, object]

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or not value.strip():
            raise RuleError(f"{self.instruction} needs a text under {key!r}, not {value!r}")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise RuleError(f"{self.instruction} needs a list of texts under {key!r}, not {value!r}")
        return value

    def count(self, key: str) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < 0:
            raise RuleError(f"{self.instruction} needs a number from 0 on under {key!r}, not {value!r}")
        return int(value)

    def compare(self, found: int, number: str, relation: str) -> bool:
        """Whether the found number stands in the wanted relation to the argument `number`."""
        wanted, how = self.count(number), self.values.get(relation)
        if how == "at least":
            return found >= wanted
        if how == "less than":
            return found < wanted
        raise RuleError(f"{self.instruction} needs 'at least' or 'less than' under {relation!r}, not {how!r}")


Rule = Callable[[str, Arguments], bool]

_WORD = re.compile(r"\w+")
_BLANK_LINES = re.compile(r"\n[ \t\r]*\n\s*")
_DIVIDER = re.compile(r"^[ \t]*\*\*\*[ \t\r]*$", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'”’)\]]{0,3}(?=\s|$)")
_ABBREVIATIONS = frozenset(
    (
        *("mr", "mrs", "ms", "dr", "prof", "st", "vs", "etc", "jr", "sr", "inc", "ltd", "co", "fig"),
        *("e.g", "i.e", "u.s", "u.k", "a.m", "p.m"),
    )
)
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]*\]")
_HIGHLIGHT = re.compile(r"\*\*(?P<bold>[^\n*]*)\*\*|\*(?P<plain>[^\n*]*)\*")
_TITLE = re.compile(r"<<([^\n<>]+)>>")
_FENCE = "```"
_CONSTRAINED = ("my answer is yes.", "my answer is no.", "my answer is maybe.")
_RESPONSE_DIVIDER = "******"


def _paragraphs(response: str) -> list[str]:
    pattern = _DIVIDER if _DIVIDER.search(response) else _BLANK_LINES
    return [part.strip() for part in pattern.split(response) if part.strip()]


def _sentences(response: str) -> int:
    """How many sentences: ends of sentences behind no abbreviation, and what is left without an end."""
    count = begin = 0
    last_character = len(response.rstrip())
    for found in _SENTENCE_END.finditer(response):
        before = response[max(begin, found.start() - 16) : found.start()].split()
        last = before[-1].lower().lstrip("(\"'") if before else ""
        single = len(last) == 1 and last.isalpha() and last != "i"
        if found[0].startswith(".") and (last in _ABBREVIATIONS or single) and found.end() < last_character:
            continue
        count += 1
        begin = found.end()
    return count + bool(response[begin:].strip())


def _whole_words(response: str, word: str) -> int:
    return sum(1 for _ in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", response, re.IGNORECASE))


def _existence(response: str, arguments: Arguments) -> bool:
    folded = response.casefold()
    return all(word.casefold() in folded for word in arguments.texts("keywords"))


def _frequency(response: str, arguments: Arguments) -> bool:
    return arguments.compare(_whole_words(response, arguments.text("keyword").strip()), "frequency", "relation")


def _forbidden(response: str, arguments: Arguments) -> bool:
    return not any(_whole_words(response, word) for word in arguments.texts("forbidden_words"))


def _letter_frequency(response: str, arguments: Arguments) -> bool:
    letter = arguments.text("letter").strip().lower()
    if len(letter) != 1:
        raise RuleError(f"{arguments.instruction} needs one letter under 'letter', not {letter!r}")
    return arguments.compare(response.lower().count(letter), "let_frequency", "let_relation")


def _language(response: str, arguments: Arguments) -> bool:
    try:
        import langdetect  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise RuleError(
            f"{arguments.instruction} needs the package langdetect; install it, or leave such rows out"
        ) from error
    langdetect.DetectorFactory.seed = 0
    try:
        return bool(langdetect.detect(response) == arguments.text("language"))
    except langdetect.LangDetectException:
        return False  # a text without letters has no language


def _number_words(response: str, arguments: Arguments) -> bool:
    return arguments.compare(sum(1 for _ in _WORD.finditer(response)), "num_words", "relation")


def _number_sentences(response: str, arguments: Arguments) -> bool:
    return arguments.compare(_sentences(response), "num_sentences", "relation")


def _number_paragraphs(response: str, arguments: Arguments) -> bool:
    return len(_paragraphs(response)) == arguments.count("num_paragraphs")


def _first_word(response: str, arguments: Arguments) -> bool:
    parts = [part.strip() for part in _BLANK_LINES.split(response) if part.strip()]
    position = arguments.count("nth_paragraph")
    if len(parts) != arguments.count("num_paragraphs") or not 1 <= position <= len(parts):
        return False
    word = _WORD.search(parts[position - 1].split(maxsplit=1)[0])
    return word is not None and word[0].lower() == arguments.text("first_word").strip().lower()


def _number_placeholders(response: str, arguments: Arguments) -> bool:
    return sum(1 for _ in _PLACEHOLDER.finditer(response)) >= arguments.count("num_placeholders")


def _postscript(response: str, arguments: Arguments) -> bool:
    marker = "".join(arguments.text("postscript_marker").lower().split())
    spaced = r"\s?".join(re.escape(character) for character in marker)
    return re.search(rf"(?<!\w){spaced}", response.lower()) is not None


def _number_bullets(response: str, arguments: Arguments) -> bool:
    lines = (line.lstrip() for line in response.split("\n"))
    found = sum(line.startswith("-") or (line.startswith("*") and line[1:2] not in ("*", "")) for line in lines)
    return found == arguments.count("num_bullets")


def _constrained(response: str, arguments: Arguments) -> bool:
    folded = response.lower()
    return any(option in folded for option in _CONSTRAINED)


def _highlights(response: str, arguments: Arguments) -> bool:
    found = sum(bool((hit["bold"] or hit["plain"] or "").strip()) for hit in _HIGHLIGHT.finditer(response))
    return found >= arguments.count("num_highlights")


def _sections(response: str, arguments: Arguments) -> bool:
    splitter = re.escape(arguments.text("section_spliter").strip())  # the data's own spelling of the key
    found = sum(1 for _ in re.finditer(rf"{splitter}\s?\d+", response))
    return found >= arguments.count("num_sections")


def _json(response: str, arguments: Arguments) -> bool:
    text = response.strip()
    if text.startswith(_FENCE) and text.endswith(_FENCE) and len(text) >= 2 * len(_FENCE):
        text = text[len(_FENCE) : -len(_FENCE)]
        text = text[4:] if text[:4].lower() == "json" else text
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _title(response: str, arguments: Arguments) -> bool:
    return any(hit[1].strip() for hit in _TITLE.finditer(response))


def _two_responses(response: str, arguments: Arguments) -> bool:
    parts = [part.strip() for part in response.split(_RESPONSE_DIVIDER)]
    if any(not part for part in parts[1:-1]):
        return False
    filled = [part for part in parts if part]
    return len(filled) == 2 and filled[0] != filled[1]


def _repeat(response: str, arguments: Arguments) -> bool:
    return response.strip().lower().startswith(arguments.text("prompt_to_repeat").strip().lower())


def _ends(response: str, arguments: Arguments) -> bool:
    return response.strip().strip('"').lower().endswith(arguments.text("end_phrase").strip().lower())


def _quotation(response: str, arguments: Arguments) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_words(response: str, arguments: Arguments) -> bool:
    found = sum(word[0].isupper() for word in _WORD.finditer(response))
    return arguments.compare(found, "capital_frequency", "capital_relation")


RULES: dict[str, Rule] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _language,
    "length_constraints:number_words": _number_words,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _number_placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _number_bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat,
    "startend:end_checker": _ends,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda response, _: response.isupper(),
    "change_case:english_lowercase": lambda response, _: response.islower(),
    "punctuation:no_comma": lambda response, _: "," not in response,
}
