"""The instructions of IFEval (arXiv 2311.07911) as functions of a response: does it hold?

Each rule takes the response and its arguments from the row (`Arguments`), and returns yes or no, as the definitions
that were published with the paper do, oddities included: keywords are counted as parts of words too, paragraphs are
separated by `***`, a title may hold any character. Two places differ: sentences are counted by the rules below instead
of a trained model, and a text of fewer than 20 letters counts as in the right language, as the published rule does for
texts without letters. Time is linear in the text, but for its language.
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
_PLACEHOLDER = re.compile(r"\[[^][\n]*\]")
_TOKEN = re.compile(r"\w+(?:[-./]\w+)*|(?<=\w)'\w+")  # as word_tokenize has it: TO-DO is one, IT'S are two
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'”’)\]]{0,3}(?=\s|$)")
_TITLES = frozenset(("mr", "mrs", "ms", "dr", "prof", "st", "vs", "jr", "sr", "fig", "gen", "rev", "e.g", "i.e"))
# These may end a sentence:
_ABBREVIATIONS = frozenset(("etc", "inc", "ltd", "co", "corp", "u.s", "u.k", "a.m", "p.m", "ph.d"))
_FENCES = ("```json", "```Json", "```JSON", "```")
_FENCE = "```"
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_PARAGRAPH_DIVIDER, _RESPONSE_DIVIDER = "***", "******"
_AFTER_WORD = frozenset(".,?!'\"")
_FEWEST_LETTERS = 20


def _sentences(response: str) -> int:
    """How many sentences: sentence ends that follow no abbreviation, and the rest of the text if it has no end."""
    count = begin = 0
    for found in _SENTENCE_END.finditer(response):
        before = response[max(begin, found.start() - 16) : found.start()].split()
        last = before[-1].lower().lstrip("(\"'") if before else ""
        following = response[found.end() : found.end() + 16].lstrip()[:1]
        single = len(last) == 1 and last.isalpha() and last != "i"
        inside = last in _TITLES or single or (last in _ABBREVIATIONS and not following.isupper())
        if found[0].startswith(".") and inside and following:
            continue
        count += 1
        begin = found.end()
    return count + bool(response[begin:].strip())


def _divided(response: str, divider: str) -> list[str] | None:
    """The parts between dividers; None if one is empty that is neither the first nor the last."""
    parts = [part.strip() for part in response.split(divider)]
    return None if not all(parts[1:-1]) else [part for part in parts if part]


def _occurrences(response: str, text: str) -> int:
    return sum(1 for _ in re.finditer(re.escape(text), response, re.IGNORECASE))


def _frequency(response: str, arguments: Arguments) -> bool:
    return arguments.compare(_occurrences(response, arguments.text("keyword").strip()), "frequency", "relation")


def _forbidden(response: str, arguments: Arguments) -> bool:
    words = arguments.texts("forbidden_words")
    return not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in words)


def _letter_frequency(response: str, arguments: Arguments) -> bool:
    letter = arguments.text("letter").strip().lower()
    if len(letter) != 1:
        raise RuleError(f"{arguments.instruction} needs one letter under 'letter', not {letter!r}")
    return arguments.compare(response.lower().count(letter), "let_frequency", "let_relation")


def _is_language(response: str, language: str) -> bool:
    """The verdict of langdetect, always the same for the same text."""
    if sum(character.isalpha() for character in response) < _FEWEST_LETTERS:
        return True
    import langdetect  # reads its profiles at the first call: most of a second

    langdetect.DetectorFactory.seed = 0
    try:
        return bool(langdetect.detect(response) == language)
    except langdetect.LangDetectException:
        return True


def prepare_language() -> None:
    """Read the profiles of all languages, so that no response pays for it."""
    _is_language("a text of more than twenty letters", "en")


def _number_paragraphs(response: str, arguments: Arguments) -> bool:
    wanted = arguments.count("num_paragraphs")
    parts = _divided(response, _PARAGRAPH_DIVIDER)
    return parts is not None and len(parts) == wanted


def _first_word(response: str, arguments: Arguments) -> bool:
    """Paragraphs stand between single blank lines here, and one that is empty keeps its number."""
    parts = [part.strip() for part in response.split("\n\n")]
    filled, position = sum(map(bool, parts)), arguments.count("nth_paragraph")
    wanted = arguments.text("first_word").strip().lower()
    if filled != arguments.count("num_paragraphs") or not 1 <= position <= filled or not parts[position - 1]:
        return False
    word = parts[position - 1].split(maxsplit=1)[0].lstrip("'").lstrip('"')
    end = next((place for place, character in enumerate(word) if character in _AFTER_WORD), len(word))
    return word[:end].lower() == wanted


def _postscript(response: str, arguments: Arguments) -> bool:
    marker = arguments.text("postscript_marker").strip()
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(known.get(marker, re.escape(marker.lower())), response.lower()) is not None


def _number_bullets(response: str, arguments: Arguments) -> bool:
    lines = [line.lstrip() for line in response.split("\n")]
    bullets = sum(line.startswith("-") or (line.startswith("*") and line[1:2] not in ("*", "")) for line in lines)
    return bullets == arguments.count("num_bullets")


def _highlights(response: str, arguments: Arguments) -> bool:
    """Text between single stars and between double ones, each counted by itself."""
    single = sum(bool(found[1].strip()) for found in re.finditer(r"\*([^\n*]*)\*", response))
    double = sum(bool(found[1].strip()) for found in re.finditer(r"\*\*([^\n*]*)\*\*", response))
    return single + double >= arguments.count("num_highlights")


def _sections(response: str, arguments: Arguments) -> bool:
    splitter = re.escape(arguments.text("section_spliter").strip())  # the data's own spelling of the key
    return sum(1 for _ in re.finditer(rf"{splitter}\s?\d+", response)) >= arguments.count("num_sections")


def _json(response: str, arguments: Arguments) -> bool:
    text = response.strip()
    for fence in _FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix(_FENCE).strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(response: str, arguments: Arguments) -> bool:
    """`<<` and the last `>>` of its line, with something between them that is no angle bracket."""
    for line in response.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and start + 2 < end and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def _two_responses(response: str, arguments: Arguments) -> bool:
    parts = _divided(response, _RESPONSE_DIVIDER)
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _repeat(response: str, arguments: Arguments) -> bool:
    return response.strip().lower().startswith(arguments.text("prompt_to_repeat").strip().lower())


def _ends(response: str, arguments: Arguments) -> bool:
    return response.strip().strip('"').lower().endswith(arguments.text("end_phrase").strip().lower())


def _quotation(response: str, arguments: Arguments) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_words(response: str, arguments: Arguments) -> bool:
    capitals = sum(word[0].isupper() for word in _TOKEN.finditer(response))
    return arguments.compare(capitals, "capital_frequency", "capital_relation")


RULES: dict[str, Rule] = {
    "keywords:existence": lambda response, given: all(_occurrences(response, w) for w in given.texts("keywords")),
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": lambda response, given: _is_language(response, given.text("language")),
    "length_constraints:number_words": lambda response, given: given.compare(
        len(_WORD.findall(response)), "num_words", "relation"
    ),
    "length_constraints:number_sentences": lambda response, given: given.compare(
        _sentences(response), "num_sentences", "relation"
    ),
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda response, given: (
        len(_PLACEHOLDER.findall(response)) >= given.count("num_placeholders")
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _number_bullets,
    "detectable_format:constrained_response": lambda response, _: any(option in response for option in _CONSTRAINED),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat,
    "startend:end_checker": _ends,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda response, _: response.isupper() and _is_language(response, "en"),
    "change_case:english_lowercase": lambda response, _: response.islower() and _is_language(response, "en"),
    "punctuation:no_comma": lambda response, _: "," not in response,
}
