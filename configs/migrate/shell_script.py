"""The launch command of a shell script: which program it starts, with which arguments.

Reads what launch scripts of RL trainers are made of: scalars, arrays, `source`, defaults such as `${NAME:-8}`, sums
such as `$((4 * 1024))`, and one command that trains. Nothing is executed: a script that kills processes is safe to
read.

Invariants: what only a running shell knows (an unset variable, the output of a command) stays in the text as it was
written, so that the new command means the same in the same shell. Conditions are not evaluated: the last assignment
counts, and `Launch.conditional` names the variables that this concerns.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from configs.layers import ConfigError

_PROGRAMS: Final = ("train.py", "train_async.py")
VERL_PROGRAMS: Final = ("verl.trainer.main_ppo", "recipe.dapo.main_dapo", "recipe.dapo.src.main_dapo")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_VARIABLE: Final = re.compile(
    r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(\[[@*]\])?(?::?-([^{}]*(?:\$\{[^{}]*\}[^{}]*)*))?\})"
)
_ARRAY: Final = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
_HEREDOC: Final = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_SIGNS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
}  # fmt: skip
_OPENS: Final = ("if", "for", "while", "until", "case")
_CLOSES: Final = ("fi", "done", "esac")
_KEYWORDS: Final = ("then", "else", "do", "export", "local", "declare", "readonly", "!", "{")


class Launch(Struct, frozen=True):
    """`conditional`: variables of the arguments that were assigned within a condition or a loop. `notes`: what was
    read otherwise than a shell would."""

    program: str
    arguments: tuple[str, ...]
    conditional: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_launch(path: Path) -> Launch:
    """The last launch command of a script. Raises `ConfigError` where there is none, or a file cannot be read."""
    reader = _Reader()
    reader.run(path)
    if reader.launch is None:
        programs = f"{' or '.join(_PROGRAMS)} and no {VERL_PROGRAMS[0]}"
        raise ConfigError(
            f"{path} starts no {programs}, but that is what is converted; give the shell script that trains, for "
            "TRL the arguments of GRPOConfig and of the trainer as a .yaml file, for prime-rl its rl.toml"
        )
    return reader.launch


class _Reader:
    """Assigns variables statement by statement. A variable is a list of words; a scalar has one."""

    def __init__(self) -> None:
        self.variables: dict[str, list[str]] = {}
        self.in_condition: set[str] = set()
        self.used: set[str] = set()
        self.launch: Launch | None = None
        self.place = Path()  # of the file that is read
        self.open: list[Path] = []  # files that are being read

    def run(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); give a shell script that is there") from error
        if path.resolve() in self.open:
            raise ConfigError(f"{path} reads itself, so that no shell would come to its end; remove that line")
        self.open.append(path.resolve())
        before, self.place = self.place, path.absolute().parent
        depth, after_launch = 0, False
        for words in statements(text):
            while words and words[0] in (*_OPENS, *_CLOSES, *_KEYWORDS):
                depth += (words[0] in _OPENS) - (words[0] in _CLOSES)
                del words[0]
            if not words:
                continue
            if _ASSIGNMENT.match(words[0]):
                words = self._assign(words, conditional=depth > 0)
            if words[:1] in (["source"], ["."]) and len(words) > 1:
                self._source(path, words[1])
            elif words:
                after_launch = self._command(path, words, after_launch=after_launch)
        self.place = before
        self.open.pop()

    def _assign(self, words: list[str], *, conditional: bool) -> list[str]:
        """The command behind the assignments, such as `BASE=5 source model.sh`."""
        for at, word in enumerate(words):
            match = _ASSIGNMENT.match(word)
            if match is None:
                return words[at:]
            name, more, value = match[1], match[2], word[match.end() :]
            array = value == "("  # all words that follow, up to its end
            found = self.expand(words[at + 1 :]) if array else [" ".join(self.expand([value], split=False))]
            self.variables[name] = [*self.variables.get(name, []), *found] if more else found
            (self.in_condition.add if conditional else self.in_condition.discard)(name)
            if array:
                break
        return []

    def _source(self, path: Path, word: str) -> None:
        """Run a file that the script reads: at its path, or else where its last parts are found above the script."""
        text = "".join(self.expand([word], split=False))
        parts = [part for part in Path(text).parts if part not in ("/", "..", ".")]
        tails = [Path(*parts[start:]) for start in range(max(1, len(parts) - 1))]
        places = [self.place / text, *(folder / tail for tail in tails for folder in (self.place, *self.place.parents))]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise ConfigError(f"{path} reads {text}, which is not there; correct the path in the script")
        self.run(found)

    def _command(self, path: Path, words: list[str], *, after_launch: bool) -> bool:
        known = (*_PROGRAMS, *VERL_PROGRAMS)
        at = next((at for at, word in enumerate(words) if Path(word.strip("\"'")).name in known), None)
        if at is None:
            rest = self.expand(words)
            if not (after_launch and self.launch is not None and rest and rest[0].startswith("--")):
                return False
            note = f"{path.name}: the command ends before {words[0]}, where a backslash is missing; read as one command"
            old = self.launch
            self.launch = Launch(old.program, (*old.arguments, *rest), self._conditional(), (*old.notes, note))
            return True
        self.used.clear()
        arguments = tuple(self.expand(words[at + 1 :]))
        self.launch = Launch(Path(words[at].strip("\"'")).name, arguments, self._conditional())
        return True

    def _conditional(self) -> tuple[str, ...]:
        return tuple(sorted(self.used & self.in_condition))

    def expand(self, words: list[str], *, split: bool = True) -> list[str]:
        """Words with quotes removed and variables put in. Unquoted values are split at spaces, as a shell does."""
        found: list[str] = []
        for word in words:
            if (array := _ARRAY.fullmatch(word)) and not self.variables.get(array[1]):
                continue  # not even an empty word
            fields = [""]
            filled = False
            for text, quoted, literal in _pieces(word):
                values = [text] if literal else self._values(text)
                if split and not quoted and not literal:
                    values = [part for value in values for part in ([value] if "$(" in value else value.split())]
                elif not quoted and not text:
                    values = []
                filled = filled or quoted or bool(values)
                if values:
                    fields[-1] += values[0]
                    fields += values[1:]
            if filled:
                found += fields
        return found

    def _values(self, text: str) -> list[str]:
        """Of one expansion."""
        if text.startswith("$(("):
            inner = " ".join(self.expand([f'"{text[3:-2]}"'], split=False))
            return [_sum(re.sub(r"\b([A-Za-z_]\w*)\b", lambda name: self._plain(name[1]), inner)) or text]
        if text.startswith("$("):
            return self._output(text)
        match = _VARIABLE.fullmatch(text)
        if match is None:
            return [text]
        name, default = match[1] or match[2], match[4]
        self.used.add(name)
        values = self.variables.get(name)
        if default is not None and (values is None or not any(values)):
            return self.expand([f'"{default}"' if '"' not in default else default], split=False) or [""]
        return ([] if match[3] else [text]) if values is None else values  # arrays do not come from outside

    def _output(self, text: str) -> list[str]:
        """Of a command whose output needs no shell: `seq`, and the directories of scripts."""
        if match := re.fullmatch(r"\$\(\s*seq((?:\s+-?\d+){1,3})\s*\)", text):
            numbers = [int(number) for number in match[1].split()]
            first, step = numbers[0] if len(numbers) > 1 else 1, numbers[1] if len(numbers) > 2 else 1
            return [" ".join(str(number) for number in range(first, numbers[-1] + (1 if step > 0 else -1), step or 1))]
        if match := re.fullmatch(r"\$\(\s*dirname\s+(?:--\s+)?\"?\$(?:0|\{BASH_SOURCE\[0\]\})\"?\s*\)", text):
            return [str(self.place)]
        if match := re.fullmatch(r"\$\(\s*cd\s+(?:--\s+)?(.+?)\s*(?:&?>\S+\s*)?&&\s*pwd(?:\s+-P)?\s*\)", text):
            inner = "".join(self.expand([match[1]], split=False))
            return [text if "$" in inner else os.path.normpath(self.place / inner)]
        return [text]

    def _plain(self, name: str) -> str:
        self.used.add(name)
        return " ".join(self.variables.get(name, [name]))


def _sum(text: str) -> str | None:
    """The value of an integer expression with + - * / and brackets; None for all others."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -value(inner)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _SIGNS:
                return _SIGNS[type(sign)](value(left), value(right))
        raise ValueError

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _pieces(word: str) -> Iterator[tuple[str, bool, bool]]:
    """(Text, quoted, literal) of a word, without its quotes."""
    at, quoted, plain = 0, False, ""
    while at < len(word):
        char = word[at]
        if char == "\\" and at + 1 < len(word):
            plain += word[at + 1] if not quoted or word[at + 1] in '$`"\\\n' else word[at : at + 2]
            at += 2
        elif char == '"':
            yield plain, quoted, True
            plain, quoted, at = "", not quoted, at + 1
        elif char == "'" and not quoted:
            end = word.find("'", at + 1) % (len(word) + 1)
            yield plain, False, True
            yield word[at + 1 : end], True, True
            plain, at = "", end + 1
        elif char == "$" and (end := _piece_end(word, at)) > at + 1:
            yield plain, quoted, True
            yield word[at:end], quoted, False
            plain, at = "", end
        else:
            plain += char
            at += 1
    yield plain, quoted, True


def _piece_end(text: str, at: int) -> int:
    """Where the piece that begins at `at` ends: an escape, quoted text, an expansion, or else one character."""
    if text[at] == "\\":
        return at + 2
    if text[at] == "'":
        return text.find("'", at + 1) % (len(text) + 1) + 1
    if text[at] == '"':
        return _closing_end(text, at + 1, '"')
    if text.startswith("$(", at):
        return _closing_end(text, at + 2, ")")
    match = _VARIABLE.match(text, at)
    return match.end() if match else at + 1


def _closing_end(text: str, at: int, mark: str) -> int:
    """Behind the quote or bracket that closes what began before `at`; pieces and here-documents are passed over."""
    while at < len(text) and text[at] != mark:
        if mark == '"':
            at = at + 1 if text[at] == "'" else _piece_end(text, at)
        elif text[at] == "(":
            at = _closing_end(text, at + 1, ")")
        elif match := _HEREDOC.match(text, at):
            at = _heredoc_end(text, text.find("\n", at) % (len(text) + 1), match[2])
        else:
            at = _piece_end(text, at)
    return at + 1


def _heredoc_end(text: str, at: int, word: str) -> int:
    """The end of the line that closes a here-document whose body begins behind the line end at `at`."""
    match = re.compile(rf"^\s*{word}[ \t]*$", re.MULTILINE).search(text, at)
    return match.end() if match else len(text)


def statements(text: str) -> Iterator[list[str]]:
    """The words of each statement as they are written. An array assignment is `NAME=(`, then its words."""
    words: list[str] = []
    word, at, array, bodies = "", 0, False, list[str]()

    def finished() -> None:
        nonlocal word
        if word:
            words.append(word)
        word = ""

    while at < len(text):
        char, end = text[at], _piece_end(text, at)
        if text.startswith("\\\n", at):
            at = end
            finished()
        elif end > at + 1:
            word, at = word + text[at:end], end
        elif char == "#" and not word:
            at = text.find("\n", at) % (len(text) + 1)
        elif match := _HEREDOC.match(text, at):
            bodies.append(match[2])
            at = match.end()
        elif char in "<>" or text.startswith("&>", at):  # a redirection and where to
            word = "" if word.isdigit() else word
            finished()
            at = re.compile(r"&?[<>]+&?\s*(\"[^\"]*\"|[^\s;|&)]*)").match(text, at).end()  # type: ignore[union-attr]
        elif char == "(" and _ASSIGNMENT.fullmatch(word):
            word, array, at = word + "(", True, at + 1
            finished()
        elif char == "(":
            at = _closing_end(text, at + 1, ")")
        elif char == ")" and array:
            finished()
            array, at = False, at + 1
        elif char.isspace() and (char != "\n" or array):
            finished()
            at += 1
        elif char in "\n;|&)":
            finished()
            if words:
                yield words
            words, at = [], at + 1
            while char == "\n" and bodies:
                at = _heredoc_end(text, at - 1, bodies.pop(0))
        else:
            word, at = word + char, at + 1
    finished()
    if words:
        yield words
