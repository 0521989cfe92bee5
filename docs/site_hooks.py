"""What mkdocs does not do by itself: llms.txt in the site with the Markdown that it names, and sources for docs/api.md.

Griffe, which reads docstrings for mkdocstrings, passes over folders without an `__init__.py`. So it gets a copy of the
sources in which every folder has one.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

SOURCES = (("stages", "stages"), ("models", "models"), ("pipeline/api/sluice", "sluice"))


@event_priority(100)  # before mkdocstrings reads its paths
def on_config(config: Any) -> None:
    copy = Path(tempfile.mkdtemp(prefix="sluice-api-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    for source, name in SOURCES:
        shutil.copytree(
            Path(config["docs_dir"]).parent / source, copy / name, ignore=shutil.ignore_patterns("__pycache__")
        )
        for folder in (copy / name, *(path for path in (copy / name).rglob("*") if path.is_dir())):
            (folder / "__init__.py").touch()
    config["plugins"]["mkdocstrings"].config["handlers"]["python"]["paths"] = [str(copy)]


def on_post_build(config: Any) -> None:
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    for page in docs.rglob("*.md"):
        shutil.copy(page, site / page.relative_to(docs))
    lines = (docs.parent / "llms.txt").read_text().splitlines()
    of_site = [line.replace("](docs/", "](") for line in lines if "](" not in line or "](docs/" in line]
    (site / "llms.txt").write_text("\n".join(of_site) + "\n")
