"""The pages of the documentation, and the blocks and commands in them.

A block of the language `bash` in docs/tutorials is executed, and the `text` block behind it shows what it prints. In
all other blocks a line that begins with a program is a command too: what starts a run is planned with `--dry-run`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

ROOT: Final = Path(__file__).resolve().parents[2]
SKILL: Final = ROOT / ".agents" / "skills" / "sluice-runs" / "SKILL.md"
PAGES: Final = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "AGENTS.md", SKILL, *(ROOT / "docs").rglob("*.md")]
)
TUTORIALS: Final = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE: Final = ("python", "toml", "json", "yaml")
PROGRAM: Final = re.compile(
    r"(\$ )?([A-Z_]+=\S* )*"
    r"(python3?|sluice|make|pip|npm|hf|ray|curl|tensorboard|cd|export|git|mlflow|mkdocs|bash|\.venv/bin/\w+|"
    r"\(umask|\w+=\$\(jq) "
)
# A command in a sentence.
SPAN: Final = re.compile(r"`((?:python|sluice|make) [^`\n]+)`")
# A block that is a file names it in its first line.
FILE: Final = re.compile(r"# ([\w./-]+\.(py|toml|yaml))\n")
# Behind a command: a remark after some spaces, or where its output goes.
REMARK: Final = re.compile(r"\s{3,}(?!\s|RUN)|\s{2}(?=[a-z]+ [a-z])|\s[<>|]\s")


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


def commands(page: Path) -> list[list[str]]:
    """The words of each command that is not executed anyway, without variables in front and remarks behind."""
    found = []
    for language, block in FENCE.findall(page.read_text()):
        if language in CODE or (language == "bash" and page in TUTORIALS):
            continue
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            match = PROGRAM.match(f"{line} ")
            if match and (language == "bash" or not line[match.end() - 1 :].startswith("  ")):
                line = REMARK.split(line[match.start(3) :])[0]
                found.append(shlex.split(line, comments=True))
    spans = () if page.name == "CHANGELOG.md" else dict.fromkeys(SPAN.findall(FENCE.sub("", page.read_text())))
    return found + [shlex.split(span) for span in spans]


def write_file(block: str, folder: Path) -> None:
    """Put a block that names its file there; other blocks are none."""
    if named := FILE.match(block):
        file = folder / named[1]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block)


def write_gsm8k(folder: Path) -> None:
    """The two files of the data set in miniature, where pages expect them."""
    for name in ("train", "test"):
        rows = {"question": ["What is 1+1?"] * 300, "answer": ["It is #### 2"] * 300}
        file = folder / "gsm8k" / "main" / f"{name}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(rows), file)
