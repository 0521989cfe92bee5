"""Whether the servers of a run want its token, and whether anybody sees it."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from models.engines.token import TokenFile, read_token


def status(url: str, token: str = "") -> int:
    """What a GET is answered."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def ended(process: int) -> bool:
    """Also if nobody has waited for it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def server_of(run_dir: Path, name: str, controller: int, timeout_s: float = 300) -> dict[str, Any]:
    """What a run tells of one of its servers, once that serves."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not ended(controller):
        with contextlib.suppress(OSError, KeyError):
            found: dict[str, Any] = json.loads((run_dir / "replicas" / "fleet.json").read_text())[name]
            return found
        time.sleep(0.05)
    raise AssertionError(f"the run has no {name}")


def check_token(run_dir: Path, controller: int, **routes: str) -> TokenFile:
    """Of a run that goes on: its token, which each server (`engine_0="/a/route"`) wants and no process shows."""
    found = {name.replace("_", "-"): route for name, route in routes.items()}
    servers = {name: server_of(run_dir, name, controller) for name in found}
    file = read_token(Path(next(server["token_file"] for server in servers.values() if server["token_file"])))
    assert Path(file.path).parent.stat().st_mode & 0o777 == 0o700
    for name, server in servers.items():
        url = server["url"] + found[name]
        assert (status(url), status(url, "of-another-run"), status(url, file.token.text)) == (401, 401, 200), name
        assert status(f"{server['url']}/health") == 200
    pids = [controller, *(int(path.read_text()) for path in (run_dir / "replicas").glob("*.pid"))]
    assert len(pids) > 4
    shown = b"".join(Path(f"/proc/{pid}/{what}").read_bytes() for pid in pids for what in ("cmdline", "environ"))
    assert file.path.encode() in shown
    assert file.token.text.encode() not in shown
    return file


def files_with(run_dir: Path, token: str) -> list[Path]:
    """Files of a run that have the token in them."""
    return [path for path in run_dir.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
