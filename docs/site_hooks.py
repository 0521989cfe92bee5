"""What mkdocs does not do by itself: llms.txt in the site, and beside each page the Markdown that it names."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def on_post_build(config: Any) -> None:
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    for page in docs.rglob("*.md"):
        shutil.copy(page, site / page.relative_to(docs))
    lines = (docs.parent / "llms.txt").read_text().splitlines()
    of_site = [line.replace("](docs/", "](") for line in lines if "](" not in line or "](docs/" in line]
    (site / "llms.txt").write_text("\n".join(of_site) + "\n")
