"""The documentation as a site, and llms.txt: complete, without a broken link."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import FENCE, LINK, ROOT, SKILL, page_id

DOCS = sorted((ROOT / "docs").rglob("*.md"))


def test_llms_txt_lists_each_page_once_and_in_the_form_of_llmstxt_org() -> None:
    text = (ROOT / "llms.txt").read_text()
    title, blank, summary, *_ = text.splitlines()
    assert [title[:2], blank, summary[:2]] == ["# ", "", "> "]
    entries = [line for line in text.splitlines() if line.startswith("- ")]
    assert [line for line in entries if not re.fullmatch(r"- \[[^\]]+\]\([^)\s]+\): \S.*", line)] == []
    targets = LINK.findall(text)
    assert [target for target in targets if not (ROOT / target).is_file()] == []
    pages = [page_id(page) for page in DOCS] + ["README.md", "AGENTS.md", page_id(SKILL)]
    assert sorted(targets) == sorted(pages)


def test_the_skill_has_the_form_of_one_and_every_exit_code() -> None:
    text = SKILL.read_text()
    head = re.fullmatch(r"---\nname: ([a-z-]+)\ndescription: (.+)\n---\n.*", text, re.DOTALL)
    assert head is not None
    assert head[1] == SKILL.parent.name
    assert len(head[2].partition("\n")[0]) <= 1024
    section = (ROOT / "docs" / "errors.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    codes = re.findall(r"^\| (\d+) \|", section, re.MULTILINE)
    assert len(codes) >= 4
    assert [code for code in codes if not re.search(rf"^\| {code} \|", text, re.MULTILINE)] == []


def test_the_navigation_names_each_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r"[\w/]+\.md", navigation)) == [str(page.relative_to(ROOT / "docs")) for page in DOCS]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} cannot be imported; pip install -e '.[docs]'")
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def article(site: Path, page: Path) -> str:
    html = (site / page.relative_to(ROOT / "docs").with_suffix(".html")).read_text()
    return html.partition("<article")[2].partition("</article>")[0]


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_the_site_shows_each_table_list_and_block_as_such(site: Path) -> None:
    for page in DOCS:
        html, text = article(site, page), page.read_text()
        prose = FENCE.sub("", text)
        assert not re.search(r"<p>(\||- |\d+\. |```|:::)", html), page_id(page)
        tables = len(re.findall(r"^\|(?:\s*:?-+:?\s*\|)+$", prose, re.MULTILINE))
        assert html.count("<table>") >= tables, page_id(page)
        assert 'class="mermaid"' not in html, "the theme would load a program from another host"
        assert not re.search(r'(?:src|srcset)="https?:', html), page_id(page)


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_the_site_has_docstrings_of_what_users_extend(site: Path) -> None:
    page = ROOT / "docs" / "api.md"
    html = article(site, page)
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
        assert f'id="{name}"' in html, name
    assert "weights versions between the token and the batch" in html  # the comment behind a field of PolicyTokens


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_llms_txt_of_the_site_names_files_of_the_site(site: Path) -> None:
    targets = LINK.findall((site / "llms.txt").read_text())
    assert sorted(targets) == sorted(str(page.relative_to(ROOT / "docs")) for page in DOCS)
    assert [target for target in targets if (site / target).read_text() != (ROOT / "docs" / target).read_text()] == []
