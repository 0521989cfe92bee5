"""Pack: problems with a Python interpreter as a tool, as in ReTool (arXiv 2504.11536).

    [[environment]]
    name = "python_tool"
    path = "stages.agents.packs.python_tool:PythonTool"
    options = { deadline_s = 5.0, imports = ["numpy"] }

The model calls `python` with code; variables live until the end of the episode. `docs/packs.md` says what the sandbox
protects against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stages.agents.environment import Task
from stages.agents.packs.parts.interpreters import Interpreter, Interpreters, Ran, Sandbox
from stages.agents.packs.parts.tool_episode import ToolEpisode, text_argument
from stages.tools.errors import ToolCallError
from stages.tools.tool import Arguments, Schema, Tool, function_schema

_CODE = "code"
_GONE: Final = "all variables are gone"
_ENDS: Final = {
    "exit": "the code ended the interpreter",
    "killed": "the code had more memory, threads or files than it may",
    "output": "the code printed too much",
}
_warm: dict[tuple[object, ...], Interpreters] = {}  # of this process, for all of its episodes


class PythonTool(ToolEpisode):
    """Options besides those of every tool pack: `deadline_s` of one call, `imports` (packages of this environment that
    are loaded beforehand), `memory_mb`, `cpu_s` of an episode in all, `sandbox` ("auto", "bubblewrap" or "jail")."""

    def __init__(
        self,
        *,
        deadline_s: float = 5.0,
        imports: Sequence[str] = (),
        memory_mb: int = 1024,
        cpu_s: int = 60,
        sandbox: Sandbox = "auto",
        max_calls: int = 8,
        result_chars: int = 4096,
        system: str = "",
    ) -> None:
        super().__init__(max_calls=max_calls, result_chars=result_chars, system=system)
        kind = (tuple(imports), memory_mb, cpu_s, sandbox)
        if kind not in _warm:
            _warm[kind] = Interpreters(imports, memory_bytes=memory_mb << 20, cpu_s=cpu_s, sandbox=sandbox)
        self._python = _Python(_warm[kind], deadline_s)

    async def open_tools(self, task: Task) -> Sequence[Tool]:
        return [self._python]

    async def close(self) -> None:
        await self._python.close()


class _Python:
    name = "python"
    schema: Schema = function_schema(
        "python",
        "Run Python code and see what it prints; the value of a last expression is printed too. Variables are kept.",
        {_CODE: {"type": "string", "description": "the code, for example print(3 ** 20)"}},
        [_CODE],
    )

    def __init__(self, interpreters: Interpreters, deadline_s: float) -> None:
        self._interpreters, self._deadline_s = interpreters, deadline_s
        self._interpreter: Interpreter | None = None  # from the first call on: episodes that wait have no process

    async def call(self, arguments: Arguments) -> str:
        """What the code printed. Raises ToolCallError with words for the model."""
        code = text_argument(arguments, _CODE, self.name)
        if self._interpreter is None:
            self._interpreter = await self._interpreters.open()
        ran = await self._interpreter.run(code, self._deadline_s)
        if ran.how == "ok":
            return ran.output.strip() or "(nothing was printed)"
        raise ToolCallError(_words(ran, self._deadline_s))

    async def close(self) -> None:
        if self._interpreter is not None:
            await self._interpreter.close()


def _words(ran: Ran, deadline_s: float) -> str:
    if ran.how == "failed":
        return ran.output.strip()
    what = _ENDS.get(ran.how, f"no end within {deadline_s:g} s of time, or of processor time in all")
    printed = f"\n{ran.output.strip()}" if ran.output.strip() else ""
    return f"{what}; {_GONE}{printed}"
