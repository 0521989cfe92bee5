"""`launch.py report`: one file that holds all documents, loads nothing, and shows hostile text as text."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

import launch
from pipeline.facts.run_directory import RunDir
from pipeline.view import html_report
from stages.sample_log import SAMPLES_FILE
from tests.pipeline.control.test_run_states import summary
from tests.pipeline.observe.test_displays import a_row

HOSTILE = (
    "</script><script>document.title='taken'</script><!--<img src=x onerror=\"document.title='taken'\">\u202e\x1b[2J"
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has ended, with a rollout that tries to be a part of the page."""
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        rundir.write_config("[run]\n")
        rows = ({"step": n, "wall_s": n / 2, "trained_tokens": 9 * n, "reward/mean": n / 9} for n in (1, 2, 3))
        rundir.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        row = a_row(
            prompt=HOSTILE, label=HOSTILE, detail=HOSTILE, log_probs=(None, None, None, -0.5, -1, -2, None, None)
        )
        (rundir.path / SAMPLES_FILE).write_bytes(msgspec.json.encode(row) + b"\n")
        (rundir.path / "run.log").write_text(f"2026-11-25 12:00:03.512 controller: {HOSTILE}\n")
        summary(rundir.path, "completed")
    return rundir.path


class Elements(HTMLParser):
    """The elements of a page as a browser finds them: (tag, attributes, text)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.found.append(("", {}, ""))

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)

    def one(self, tag: str, **attributes: str) -> str:
        (text,) = [text for name, has, text in self.found if name == tag and attributes.items() <= has.items()]
        return text


def written(run: Path) -> str:
    assert launch.main(["report", str(run)]) == 0
    return (run / "report.html").read_text(encoding="utf-8")


def embedded(page: str) -> Any:
    return json.loads(Elements(page).one("script", id="documents"))


def test_every_document_of_the_page_is_in_the_file(run: Path) -> None:
    documents = embedded(written(run))
    assert documents.keys() == {"run", "metrics", "lanes", "rollouts", "rollout", "logs"}
    assert (documents["run"]["state"], documents["run"]["name"], documents["run"]["may_steer"]) == (
        "completed",
        "run",
        False,
    )
    assert documents["metrics"]["columns"]["reward/mean"] == [1 / 9, 2 / 9, 3 / 9]
    (row,) = documents["rollouts"]["rows"]
    assert documents["rollout"].keys() == {row["key"]}
    assert documents["rollout"][row["key"]]["row"]["ids"] == list(range(8))
    assert documents["lanes"].keys() == {"from_s", "to_s", "lanes", "steps", "cut"}
    assert [line["process"] for line in documents["logs"]["lines"]] == ["controller"]


def test_hostile_text_stays_text(run: Path) -> None:
    page = written(run)
    elements = Elements(page)
    assert [name for name, _, _ in elements.found if name in ("script", "img")] == ["script", "script"]
    assert "<" not in elements.one("script", id="documents")
    (whole,) = embedded(page)["rollout"].values()
    assert whole["row"]["prompt"] == HOSTILE, "nothing is lost"


def test_the_file_loads_nothing_and_its_policy_is_that_of_its_own_script_and_styles(run: Path) -> None:
    page = written(run)
    elements = Elements(page)
    addresses = [has[name] for _, has, _ in elements.found for name in ("src", "href", "action") if name in has]
    assert all(str(address).startswith("data:") for address in addresses), addresses
    script, style = elements.one("script", type="module"), elements.one("style")
    assert not re.search(r"^\s*(import|export)\b", re.sub(r"/\*.*?\*/", "", script, flags=re.DOTALL), re.MULTILINE)
    assert not re.search(r"@import|url\(", style)
    kinds = [has.get("http-equiv") or has.get("charset") for tag, has, _ in elements.found if tag == "meta"]
    assert kinds[:2] == ["utf-8", "Content-Security-Policy"], "before anything that it is to hold for"
    (policy,) = [has["content"] for tag, has, _ in elements.found if has.get("http-equiv")]

    def named(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert str(policy).split("; ") == [
        "default-src 'none'", f"script-src {named(script)}", f"style-src {named(style)}", "img-src data:",
        "base-uri 'none'", "form-action 'none'",
    ]  # fmt: skip


class ManyRollouts:
    """Documents of a run with 9 rollouts and with more requests than lanes show."""

    def run(self) -> Any:
        return {"elapsed_s": 300.0}

    def metrics(self) -> Any:
        return {}

    def lanes(self, seconds: float) -> Any:
        bars = [{"start_s": 80.0}, {"start_s": 70.0}]
        return {"from_s": 100 - seconds, "to_s": 100.0, "lanes": [{"bars": bars}], "cut": 5}

    def rollouts(self, query: Any) -> Any:
        return {"rows": [{"key": str(n)} for n in range(9)][: query.limit]}

    def rollout(self, key: str) -> Any:
        return {"row": key * 100}

    def logs(self) -> Any:
        return {}


def kept(monkeypatch: pytest.MonkeyPatch, **bounds: int) -> Any:
    for name, value in bounds.items():
        monkeypatch.setattr(html_report, name, value)
    return html_report.documents(ManyRollouts())  # type: ignore[arg-type]  # has all that is asked


def test_the_size_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(kept(monkeypatch, WHOLE=4)["rollout"]) == ["0", "1", "2", "3"], "the newest"
    assert list(kept(monkeypatch, WHOLE=9, MOST_BYTES=250)["rollout"]) == ["0", "1"]
    assert len(kept(monkeypatch, LISTED=7)["rollouts"]["rows"]) == 7


def test_lanes_have_the_whole_run_and_begin_where_requests_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = kept(monkeypatch)["lanes"]
    assert (lanes["from_s"], lanes["to_s"]) == (70.0, 100.0)
    monkeypatch.setattr(ManyRollouts, "lanes", lambda _, seconds: {"from_s": 100 - seconds, "lanes": [], "cut": 0})
    assert kept(monkeypatch)["lanes"]["from_s"] == -200.0


def test_modules_with_equal_names_become_one_script(tmp_path: Path) -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("no node")
    modules = {
        "main.js": 'import Shape from "./sub/shape.js";\nimport { one, two as second } from "./numbers.js";\n'
        "const own = 5;\nconsole.log(Shape(), one(), second, own);\n",
        "sub/shape.js": 'import { one } from "../numbers.js";\nconst own = one() + 1;\n'
        "function made() { return own; }\n/*\nexport function unused() {}\n*/\nexport { made as default };\n",
        "numbers.js": "const own = 1;\nexport function one() { return own; }\nexport const two = 20;\n"
        "console.log('once');\n",
    }
    for name, text in modules.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    script = html_report.joined(tmp_path / "main.js")
    done = subprocess.run([node, "-e", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "once\n2 1 20 5\n"


def test_licences_of_what_is_in_the_file_are_there_too(run: Path) -> None:
    (text,) = [path.read_text() for path in html_report.PAGE.rglob("LICENSE")]
    assert text.strip() in written(run)


def test_a_report_that_cannot_be_made_says_why(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is no directory; give the run directory" in capsys.readouterr().err
    assert launch.main(["report", str(run), "--output", str(tmp_path / "no" / "folder" / "x.html")]) == 2
    assert "choose another file with --output" in capsys.readouterr().err
    assert launch.main(["report", str(run), "--output", str(tmp_path / "x.html"), "--json"]) == 0
    size = (tmp_path / "x.html").stat().st_size
    assert json.loads(capsys.readouterr().out) == {"path": str(tmp_path / "x.html"), "bytes": size}


def test_a_notebook_shows_the_report_in_a_frame_that_reaches_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))  # the package puts a finder of its own there
    report = importlib.import_module("pipeline.api.sluice").report(run, height=300)
    [(tag, attributes, _), *_] = Elements(report._repr_html_()).found
    expected = {"sandbox": "allow-scripts", "height": "300", "srcdoc": report.html}
    assert (tag, {name: attributes[name] for name in expected}) == ("iframe", expected)
    assert embedded(report.html)["run"]["state"] == "completed"


@pytest.mark.slow
def test_it_opens_from_disk_without_an_error(run: Path, tmp_path: Path) -> None:
    if not (chromium := Path("/usr/bin/chromium")).exists():
        pytest.skip("no Chromium")
    written(run)
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [str(chromium), *flags, profile, "--dump-dom", f"file://{run / 'report.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    shown = Elements(done.stdout)
    assert shown.one("h1", id="name") == "run"
    assert shown.one("span", id="state") == "completed"
    assert next(text for name, _, text in shown.found if name == "title") == "run"
    assert "img" not in [name for name, _, _ in shown.found]
    (trouble,) = [has for _, has, _ in shown.found if has.get("id") == "trouble"]
    assert "hidden" in trouble
