"""The Python tool: what it answers, and what hostile code cannot do (with the jail, and below bubblewrap)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from stages.agents.environment import Environment, InfrastructureError, Step
from stages.agents.packs import python_tool
from stages.agents.packs.python_tool import Interpreters, PythonTool
from stages.chat.messages import ToolCall
from stages.graders.grade import GradeRequest
from stages.graders.math.final_line import grade_gsm8k_flex
from tests.stages.agents.play import Episode

ROOT = Path(__file__).resolve().parents[3]
TIMELESS = 60.0  # a deadline that a loaded machine does not meet either


def bubblewrap_works() -> bool:
    path = shutil.which("bwrap")
    options = "--unshare-all --unshare-user --uid 65534 --ro-bind / / --proc /proc true"
    return path is not None and subprocess.run([path, *options.split()], capture_output=True).returncode == 0


@pytest.fixture(params=["jail", "bubblewrap"])
def sandbox(request: pytest.FixtureRequest) -> str:
    if request.param == "bubblewrap" and not bubblewrap_works():
        pytest.skip("bubblewrap is not installed here, or may not make namespaces")
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    for interpreters in python_tool._warm.values():
        interpreters.close()
    python_tool._warm.clear()


@asynccontextmanager
async def episode(**options: object) -> AsyncIterator[Episode]:
    environment = PythonTool(**options)  # type: ignore[arg-type]
    played = Episode(environment)
    try:
        await played.start("What is 3 to the power of 20?")
        yield played
    finally:
        await environment.close()


async def test_what_the_tool_printed_is_not_the_models_answer() -> None:
    """The grader of the recipe reads the last turn alone, also where no turn can follow a call."""

    def earned(step: Step) -> float | None:
        assert step.answer is not None
        return grade_gsm8k_flex(GradeRequest("gsm8k_flex", step.answer, "408", "{}", n_tokens=1)).score

    async with episode(deadline_s=TIMELESS) as played:
        called = await played.say("[12*34]", ToolCall("python", "12*34"))
        assert called.messages[0].content == "408"
        assert earned(called) == 0.0
        assert earned(await played.say("")) == 0.0
        stated = await played.say("=408\n")
        assert (stated.done, earned(stated)) == (True, 1.0)


async def test_an_episode_by_hand() -> None:
    environment = PythonTool(deadline_s=TIMELESS, system="Use Python.")
    assert isinstance(environment, Environment)
    played = Episode(environment)
    start = await played.start("What is 3 to the power of 20?")
    assert [(message.role, message.content) for message in start.messages] == [
        ("system", "Use Python."),
        ("user", "What is 3 to the power of 20?"),
    ]
    assert [tool["function"]["name"] for tool in start.tools] == ["python"]  # type: ignore[index]
    assert await played.call("python", {"code": "x = 3 ** 20\nprint('is', x)\nx // 2"}) == "is 3486784401\n1743392200"
    assert await played.call("python", "x + 1") == "3486784402"  # bare code, and the variable is still there
    assert await played.call("python", {"code": "y = 1"}) == "(nothing was printed)"
    wrong = await played.call("python", {"code": "a = 1\nb = a / 0"})
    assert wrong.startswith("error: Traceback")
    assert 'File "<call 4>", line 2' in wrong
    assert wrong.endswith("ZeroDivisionError: division by zero")
    end = await played.say("It is 3486784401.")
    assert (end.done, end.reward, end.metrics) == (True, None, {"tool_calls": 4.0, "tool_errors": 1.0})
    await environment.close()


async def test_malformed_calls_are_observations() -> None:
    async with episode(deadline_s=TIMELESS, max_calls=6) as played:
        step = await played.say("<tool_call>{", malformed="the call is no JSON")
        assert [(m.role, m.content) for m in step.messages] == [("tool", "error: the call is no JSON")]
        assert await played.call("pyton", {"code": "1"}) == "error: there is no tool 'pyton'; did you mean 'python'?"
        for arguments in ({}, {"code": 3}, {"code": " "}, {"cod": "1"}):
            assert await played.call("python", arguments) == "error: python needs the text argument 'code'"
        step = await played.say("", ToolCall("python", "1 + 1", "a"), ToolCall("python", "2", "b"))
        refused = "error: all 6 calls are used up; give the answer"
        assert [(m.tool_call_id, m.content) for m in step.messages] == [("a", "2"), ("b", refused)]
        end = await played.say("It is", truncated=True)
        assert (end.done, end.metrics) == (True, {"tool_calls": 7.0, "tool_errors": 7.0})


async def test_two_episodes_share_nothing_and_begin_alike() -> None:
    async with episode(deadline_s=TIMELESS) as first, episode(deadline_s=TIMELESS) as second:
        await first.call("python", "import math, random; math.pi = 3; x = 1; open('f', 'w').close()")
        drawn = await first.call("python", "random.random(), hash('x')")
        assert await second.call("python", "import math, random, os; round(math.pi, 2), os.listdir()") == "(3.14, [])"
        # A lost episode that takes its turns again meets the same answers.
        assert await second.call("python", "random.random(), hash('x')") == drawn
        assert "NameError" in await second.call("python", "x")


async def test_long_answers_keep_beginning_and_end() -> None:
    async with episode(deadline_s=TIMELESS, result_chars=20) as played:
        assert await played.call("python", "'a' * 1000") == "'aaaaaaaaa\n[982 characters left out]\naaaaaaaaa'"
        too_long = await played.call("python", "x = '" + "b" * (5 << 20) + "'")
        assert too_long.startswith("error: the")


async def test_packages_are_loaded_beforehand() -> None:
    async with episode(deadline_s=TIMELESS, imports=["numpy"], memory_mb=4096) as played:
        assert await played.call("python", "import sys; 'numpy' in sys.modules") == "True"
        assert await played.call("python", "import numpy, numpy.fft; int(numpy.arange(5).sum())") == "10"


SWALLOWS = """
import signal
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True:
    try:
        while True: pass
    except BaseException: pass
"""


async def test_an_endless_loop_is_ended_and_the_next_call_works() -> None:
    async with episode(deadline_s=0.2) as played:
        await played.call("python", "x = 1")
        for code in ("while True: pass", "import time; time.sleep(3600)", SWALLOWS, "10 ** 10 ** 10"):
            answer = await played.call("python", code)
            ended = "error: no end within 0.2 s of time, or of processor time in all; all variables are gone"
            assert answer == ended, code
    async with episode(deadline_s=TIMELESS) as played:
        assert await played.call("python", "2 + 2") == "4"


async def test_what_is_lost_is_reported_and_only_that_episode_loses_it() -> None:
    async with episode(deadline_s=TIMELESS) as played, episode(deadline_s=TIMELESS) as other:
        await played.call("python", "x = 1")
        await other.call("python", "x = 2")
        assert await played.call("python", "import os; os._exit(0)") == (
            "error: the code ended the interpreter; all variables are gone"
        )
        assert "NameError" in await played.call("python", "x")
        hung_up = await played.call("python", "import os; os.close(3)\nwhile True: pass")
        assert "all variables are gone" in hung_up
        assert await played.call("python", "1 + 1") == "2"
        assert await other.call("python", "x") == "2"


@pytest.mark.slow
async def test_processor_time_is_bounded_over_all_calls() -> None:
    async with episode(deadline_s=TIMELESS, cpu_s=1) as played:
        burn = "import time\nend = time.process_time() + 0.7\nwhile time.process_time() < end: pass"
        assert await played.call("python", burn) == "(nothing was printed)"
        assert "processor time in all" in await played.call("python", burn)


@pytest.mark.slow
async def test_a_thread_that_is_left_behind_stands_still() -> None:
    async with episode(deadline_s=TIMELESS) as played:
        count = "import threading\nn = 0\ndef run():\n    global n\n    while True: n += 1\n"
        await played.call("python", count + "threading.Thread(target=run, daemon=True).start()")
        # The clock is of the whole process: it stands while nobody has asked for anything.
        before = float(await played.call("python", "import time; time.process_time()"))
        await asyncio.sleep(0.5)
        after = float(await played.call("python", "time.process_time()"))
        assert after - before < 0.4


async def test_hostile_code_reaches_nothing(tmp_path: Path, sandbox: str) -> None:
    """No process, no network, no file of the run, no signal to others."""
    secret = tmp_path / "journal.jsonl"
    secret.write_text("hunter2")
    threads = "import threading, time\nfor _ in range(100_000): threading.Thread(target=time.sleep, args=(60,)).start()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        refused = ["while True: os.fork()", "import subprocess; subprocess.run(['true'])"]
        refused += [f"import socket; socket.create_connection({server.getsockname()})"]
        refused += [f"os.kill({victim}, 9)" for victim in ("os.getppid()", os.getpid(), -1, 0, 1)]
        hidden = [f"open({str(path)!r}).read()" for path in (secret, ROOT / "launch.py")]
        hidden += [f"os.listdir({str(tmp_path)!r})", f"open({str(secret)!r}, 'w')", f"os.unlink({str(secret)!r})"]
        hidden += [f"open('/proc/{os.getpid()}/environ', 'rb').read()"]
        hidden += ["open(f'/proc/{os.getppid()}/mem', 'rb').read(1)"]
        async with episode(deadline_s=TIMELESS, sandbox=sandbox, max_calls=100) as played:
            await played.call("python", "import os; x = 7")
            for code in refused:
                assert "PermissionError" in await played.call("python", code), code
            for code in hidden:
                answer = await played.call("python", code)
                assert "PermissionError" in answer or "FileNotFoundError" in answer, code
            assert await played.call("python", "x") == "7"
            answer = await played.call("python", threads)
            assert "can't start new thread" in answer or "more memory, threads or files" in answer
            assert await played.call("python", "2 + 2") == "4"
        with pytest.raises(TimeoutError):
            server.accept()
    assert secret.read_text() == "hunter2"


SWALLOWED = "for _ in range(1 << {}):\n    try: {}\n    except OSError: pass"


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("for _ in range(1 << 20): print('x' * 1024)", id="plain"),
        pytest.param(SWALLOWED.format(20, "print('x' * 1024)"), id="swallowed", marks=pytest.mark.slow),
        pytest.param(
            "import os\n" + SWALLOWED.format(10, "os.write(1, bytes(1 << 20))"), id="descriptor", marks=pytest.mark.slow
        ),
    ],
)
async def test_a_gigabyte_of_output_is_cut(code: str, sandbox: str) -> None:
    async with episode(deadline_s=TIMELESS, sandbox=sandbox) as played:
        answer = await played.call("python", code)
        assert answer.startswith("error: the code printed too much; all variables are gone")
        assert len(answer) < 5000
        memory = await played.call("python", "x = 'x' * (2 << 30)")
        assert memory.endswith("MemoryError")
        files = "for i in range(100):\n    with open(f'{i}', 'wb') as f: f.write(bytes(3 << 20))"
        assert "more memory, threads or files" in await played.call("python", files)
        assert await played.call("python", "import os; os.listdir()") == "[]"


async def test_a_program_that_lies_to_its_keeper_fools_only_itself() -> None:
    async with episode(deadline_s=TIMELESS) as played, episode(deadline_s=TIMELESS) as other:
        await other.call("python", "x = 1")
        await played.call("python", "import os; os.write(3, b'!' * 4096)")
        await played.call("python", "import os; os.write(3, b'{}' * 4096); os.ftruncate(4, 0)")
        # A call whose end was feigned goes on during later ones, so which of them its words answer is open. Each call
        # lets it go on to its next word at least, and one that runs when this code is there is the last of it.
        answers = [await played.call("python", "import os; os.close(3)")]
        while "all variables are gone" not in answers[-1]:
            assert len(answers) < 10, answers
            answers.append(await played.call("python", "import os; os.close(3)"))
        assert await played.call("python", "1 + 1") == "2"
        assert await other.call("python", "x + 1") == "2"


async def test_more_episodes_at_once_than_can_be_begun_wait_for_their_turn() -> None:
    interpreters = Interpreters(sandbox="jail")
    try:
        first = await interpreters.open()
        assert interpreters._process is not None
        assert interpreters._control is not None
        interpreters._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # a few sessions fill it
        interpreters._process.send_signal(signal.SIGSTOP)
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(interpreters.open()) for _ in range(20)]
            _, waiting = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
            assert waiting
            interpreters._process.send_signal(signal.SIGCONT)
        for made in (first, *(other.result() for other in others)):
            assert (await made.run("1 + 1", TIMELESS))["output"] == "2\n"
            await made.close()
    finally:
        interpreters.close()


@pytest.mark.slow
def test_all_ends_with_the_process_of_the_caller(sandbox: str) -> None:
    script = (
        "import asyncio\n"
        "from stages.agents.packs.python_tool import Interpreters\n"
        "async def main():\n"
        f"    made = await Interpreters(sandbox={sandbox!r}).open()\n"
        "    await made.run('1', 60)\n"
        "    print('running', flush=True)\n"
        "    await made.run('while True: pass', 3600)\n"
        "asyncio.run(main())"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"running\n"
    below = [child.pid for child in psutil.Process(owner.pid).children(recursive=True)]
    assert len(below) >= 3  # the warm one, a keeper, a program
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        assert time.monotonic() < end, "processes of the sandbox are still there"
        time.sleep(0.01)


@pytest.mark.slow
async def test_a_machine_that_loses_its_jail_says_so_and_the_next_episode_has_a_new_one() -> None:
    interpreters = Interpreters(sandbox="jail")
    made = await interpreters.open()
    assert (await made.run("1 + 1", TIMELESS))["output"] == "2\n"
    assert interpreters._process is not None
    interpreters._process.kill()
    interpreters._process.wait()
    with pytest.raises(InfrastructureError):
        await made.run("1 + 1", TIMELESS)
    again = await interpreters.open()
    assert (await again.run("1 + 1", TIMELESS))["output"] == "2\n"
    interpreters.close()
