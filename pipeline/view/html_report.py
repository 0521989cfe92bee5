"""`python launch.py report RUN`: the page of a run with its documents, as one HTML file that opens from disk.

The page is that of `launch.py view`. Its modules become one script, each in a scope of its own; its style sheets one
element; the documents a block of JSON. So the file needs no server and no network, and may be sent to others.

Invariants: the file loads nothing and sends nothing, by its own Content-Security-Policy, which names the script and the
styles by their hash; no text of a model, a user or a run ends the block of JSON, for it holds no `<`; the documents of
whole rollouts have at most `MOST_BYTES`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from models.disk import write_whole
from pipeline.errors import UsageError
from pipeline.facts.run_log import show
from pipeline.view.documents import RunDocuments
from pipeline.view.rollouts import Query

PAGE: Final = Path(__file__).with_name("page")
LISTED: Final = 1_000  # rollouts in the list, the newest
WHOLE: Final = 500  # of them with all of their tokens
MOST_BYTES: Final = 24 << 20  # of those, as JSON
CHARSET: Final = '<meta charset="utf-8">\n'  # the policy stands behind it, before anything that it is to hold for
SHORTEST_S: Final = 60.0  # of time in the lanes

_IMPORT: Final = re.compile(r'^import (?:\{(?P<names>[^}]*)\}|(?P<default>\w+)) from "(?P<path>[^"]+)";$', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b[ *]*(?P<name>\w+))", re.MULTILINE)
_LIST: Final = re.compile(r"^export \{(?P<names>[^}]*)\};$", re.MULTILINE)
_STYLE: Final = re.compile(r' *<link rel="stylesheet" href="(?P<path>[^"]+)">\n')
_SCRIPT: Final = re.compile(r' *<script type="module" src="(?P<path>[^"]+)"></script>\n')


def main(argv: Sequence[str]) -> int:
    """Write the report; returns the exit code. Raises UsageError."""
    parser = argparse.ArgumentParser(prog="launch.py report", description="Write the page of a run as one HTML file.")
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write it (RUN/report.html)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    arguments = parser.parse_args(argv)
    path = arguments.output or Path(arguments.run) / "report.html"
    content = html(documents(RunDocuments(Path(arguments.run)))).encode()
    try:
        write_whole(path, content)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"the report {path} cannot be written ({why}); choose another file with --output") from error
    text = f"{path} ({len(content) / 1e6:.1f} MB): open it in a browser, or send it to others"
    show(text, {"path": str(path), "bytes": len(content)}, as_json=arguments.json)
    return 0


def documents(run: RunDocuments) -> dict[str, Any]:
    """Everything that the page asks for, under the names by which it asks."""
    about, listed = run.run(), run.rollouts(Query(limit=LISTED))
    lanes = run.lanes(max(SHORTEST_S, about["elapsed_s"] or 0.0))
    if lanes["cut"]:
        lanes["from_s"] = min(bar["start_s"] for lane in lanes["lanes"] for bar in lane["bars"])
    return {
        "run": about,
        "metrics": run.metrics(),
        "lanes": lanes,
        "rollouts": listed,
        "rollout": dict(_whole(run, [row["key"] for row in listed["rows"][:WHOLE]])),
        "logs": run.logs(),
    }


def _whole(run: RunDocuments, keys: Sequence[str]) -> Iterator[tuple[str, msgspec.Raw]]:
    """The rollouts with all of their tokens, as many as have room."""
    left = MOST_BYTES
    for key in keys:
        encoded = msgspec.json.encode(run.rollout(key))
        if (left := left - len(encoded)) < 0:
            return
        yield key, msgspec.Raw(encoded)


def html(embedded: dict[str, Any], page: Path = PAGE) -> str:
    """The file for these documents."""
    whole = (page / "index.html").read_text(encoding="utf-8")
    styles = "\n".join((page / link["path"]).read_text(encoding="utf-8") for link in _STYLE.finditer(whole))
    (start,) = _SCRIPT.finditer(whole)
    script = joined(page / start["path"]).replace("</script", r"<\/script")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(styles)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = msgspec.json.encode(embedded).decode().replace("<", r"\u003c")
    licences = (f"<!--\n{path.read_text(encoding='utf-8').strip()}\n-->\n" for path in sorted(page.rglob("LICENSE")))
    head, end, body = _SCRIPT.sub("", _STYLE.sub("", whole)).partition("</head>")
    head = head.replace(CHARSET, f'{CHARSET}  <meta http-equiv="Content-Security-Policy" content="{policy}">\n', 1)
    elements = (
        f"  <style>{styles}</style>\n",
        f'  <script type="application/json" id="documents">{data}</script>\n',
        f'  <script type="module">{script}</script>\n',
    )
    return "".join((head, *elements, *licences, end, body))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def joined(entry: Path) -> str:
    """One script of a module and of all that it imports, those first; none may import itself by way of others."""
    names: dict[Path, str] = {}
    scopes: list[str] = []

    def add(path: Path) -> str:
        if path not in names:
            text = _IMPORT.sub(
                lambda found: f"const {_taken(found)} = {add((path.parent / found['path']).resolve())};",
                path.read_text(encoding="utf-8"),
            )
            text, given = _without_exports(text)
            names[path] = f"module{len(names)}"
            scopes.append(f"const {names[path]} = (() => {{\n{text}\nreturn {{ {', '.join(given)} }};\n}})();\n")
        return names[path]

    add(entry.resolve())
    return "".join(scopes)


def _taken(found: re.Match[str]) -> str:
    """What a statement of import binds, as a pattern: `{ a, b: c }`."""
    if found["default"] is not None:
        return f"{{ default: {found['default']} }}"
    return f"{{ {found['names'].strip().replace(' as ', ': ')} }}"


def _without_exports(text: str) -> tuple[str, list[str]]:
    """A module as the body of a function, and the entries of the object that it returns."""
    given: list[str] = []

    def declared(found: re.Match[str]) -> str:
        if text.rfind("/*", 0, found.start()) > text.rfind("*/", 0, found.start()):
            return found[0]  # in a comment
        given.append(found["name"])
        return ""

    body = _EXPORT.sub(declared, text)
    for found in _LIST.finditer(body):
        pairs = [name.strip().split(" as ") for name in found["names"].split(",")]
        given += [f"{pair[-1]}: {pair[0]}" for pair in pairs]
    return _LIST.sub("", body), given
