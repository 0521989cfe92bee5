"""Pack: an unmodified command-line program as an agent, started for each task.

    [[environment]]
    name = "command"
    path = "stages.agents.packs.command:Command"
    options = { argv = ["my-agent", "--model", "{model}", "-p", "{prompt}"] }

The variables of the OpenAI and Anthropic clients (OPENAI_BASE_URL, ANTHROPIC_API_KEY, ...) name the gateway, which
records the program's requests. A rollout is graded by the text of its last turn.

Invariants: the program gets a new, empty home and working directory; when the same episode starts again they have the
same path, because programs put it into their prompts (stages/records/unfinished.py); the program inherits only the
listed variables of this process; when the episode ends, for any reason, the program and all its descendants are killed.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stages.agents.environment import Endpoint, Outcome, Task
from stages.records.once import Once
from stages.workers.guard import written_arguments

_INHERITED: Final = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE")
_TAIL: Final = 2000  # characters of output in the error of a failed program
_END_S: Final = 25.0  # for all processes below the guard to end


@dataclass(repr=False)  # the environment may hold keys
class Command:
    """One run of the program. `argv`, `env` and `files` may contain {prompt}, {model}, {base_url} and {api_key}."""

    argv: Sequence[str]  # the program and its arguments
    env: Mapping[str, str] = field(default_factory=dict)  # further variables of its environment
    files: Mapping[str, str] = field(default_factory=dict)  # contents by path in its home, as configuration files
    deadline_s: float = 600.0  # after which it is killed; the recorded turns are then graded
    check: bool = True  # whether an exit status other than 0 fails the rollout

    def __post_init__(self) -> None:
        if not self.argv:
            raise ValueError("argv is empty; give the program and its arguments")

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome:
        """Waits for the program's end; unblocked by it or by the deadline."""
        texts = [message.content for message in task.messages if message.role == "user"]
        prompt = "\n".join(filter(None, texts))
        names = {"prompt": prompt, **{name: getattr(endpoint, name) for name in ("model", "base_url", "api_key")}}
        with _new_home(getattr(self, "once", None)) as home:  # set by the worker
            work = Path(home, "work")
            work.mkdir()
            for path, content in self.files.items():
                place = Path(home, path)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(filled(content, names))
            environment = {
                **{name: os.environ[name] for name in _INHERITED if name in os.environ},
                **variables(endpoint),
                "HOME": home,
                "TMPDIR": home,
                **{name: filled(value, names) for name, value in self.env.items()},
            }
            return await self._ran([filled(word, names) for word in self.argv], environment, work)

    async def _ran(self, argv: list[str], environment: Mapping[str, str], work: Path) -> Outcome:
        begun = time.monotonic()
        paths = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
        given = written_arguments((argv, dict(environment)))
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "stages.workers.guard", str(os.getpid())),
                stdin=given,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=work,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
            )
        finally:
            os.close(given)
        assert process.stdout is not None
        late, output = False, b""  # the end of the output
        try:
            async with asyncio.timeout(self.deadline_s):
                while chunk := await process.stdout.read(65536):
                    output = (output + chunk)[-4 * _TAIL :]  # a character has four bytes at most
                status = await process.wait()
        except TimeoutError:
            late, output, status = True, b"", 0
        finally:
            await _ended(process)
        if self.check and status:
            printed = output.decode(errors="replace")[-_TAIL:]
            raise RuntimeError(f"{argv[0]} ended with status {status}; its last output: {printed}")
        return Outcome(metrics={"seconds": time.monotonic() - begun, "late": float(late), "status": float(status)})


@contextmanager
def _new_home(once: Once | None) -> Iterator[str]:
    """An empty directory, removed afterwards. A killed attempt of the episode may have left its own there."""
    home = Path(tempfile.gettempdir(), f"agent-{once.place}") if once else Path(tempfile.mkdtemp(prefix="agent-"))
    try:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(mode=0o700)
    except FileExistsError:  # it is of another user
        home = Path(tempfile.mkdtemp(prefix="agent-"))
    try:
        yield str(home)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def variables(endpoint: Endpoint) -> dict[str, str]:
    """Environment variables with which clients of both dialects find the endpoint."""
    return {
        "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
        "OPENAI_API_BASE": f"{endpoint.base_url}/v1",
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": endpoint.base_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "ANTHROPIC_MODEL": endpoint.model,
        "ANTHROPIC_SMALL_FAST_MODEL": endpoint.model,
        "NO_PROXY": "127.0.0.1,localhost",
    }


def filled(template: str, names: Mapping[str, str]) -> str:
    """The text with each {name} replaced, in one pass. Other braces stay, as configuration files need them."""
    return re.sub(rf"\{{({'|'.join(names)})\}}", lambda found: names[found[1]], template)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Have the guard kill all processes below it, also those that survived the program."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
