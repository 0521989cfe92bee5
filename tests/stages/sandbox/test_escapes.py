"""A program in the jail tries everything in escapes.py, as root and as a user, on Landlock of every version."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stages.sandbox import run as sandbox
from stages.sandbox.lockdown import landlock_version
from stages.sandbox.run import CaseResult, Limits, StdinCase, run_cases
from tests.stages.sandbox.escapes import PROGRAM, attempts

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the attempts are written for x86-64")

NATIVE = landlock_version(ctypes.CDLL(None, use_errno=True))
# Code at the start of the jail's process: another number for the same user, in a namespace of its own.
_AS_ANOTHER = """
import ctypes as c, os
me = os.getuid(), os.getgid()
assert c.CDLL(None).unshare(0x10000000) == 0
for name, text in (('setgroups', 'deny'), ('uid_map', '{number} %d 1' % me[0]), ('gid_map', '{number} %d 1' % me[1])):
    with open('/proc/self/' + name, 'w') as file: _ = file.write(text)
"""
_WITHOUT_CAPABILITIES = """
import struct
assert c.CDLL(None).capset(struct.pack('=Ii', 0x20080522, 0), bytes(24)) == 0
"""
_CLAMP = """
import stages.sandbox.lockdown as jailed
native = jailed.landlock_version
jailed.landlock_version = lambda libc: min({version}, native(libc))
"""
_WHO = """
import ctypes as c, os
sets = c.create_string_buffer(24)
assert c.CDLL(None).capget((0x20080522).to_bytes(4, "little") + bytes(4), sets) == 0
(user,) = set(os.getresuid())
try: readable = bool(open("/etc/passwd").read())
except OSError: readable = False
print(f"{user} {int.from_bytes(sets.raw, 'little')}; {readable}")
"""


def becoming(person: str) -> str:
    """Code that makes the jail's process one of this user's."""
    if person == ("root" if os.getuid() == 0 else "user"):
        return ""
    if person == "root":
        return _AS_ANOTHER.format(number=0)
    return _AS_ANOTHER.format(number=1000) + _WITHOUT_CAPABILITIES


def jailed(monkeypatch: pytest.MonkeyPatch, person: str, version: int) -> None:
    """From here on, jails are this user's, on a kernel with this version of Landlock."""
    become = becoming(person)
    if become and subprocess.run([sys.executable, "-c", become], stderr=subprocess.DEVNULL).returncode:
        pytest.skip(f"to be {person} here needs a user namespace, which this machine does not permit")
    prepare = become.replace("{", "{{").replace("}", "}}") + "from stages.sandbox.cases import main"
    clamp = _CLAMP.format(version=version) if version < NATIVE else ""
    code = sandbox._PROGRAM.replace("; from stages.sandbox.cases import main", "\n" + prepare + clamp + "\n")
    monkeypatch.setattr(sandbox, "_PROGRAM", code.replace("\n; ", "\n"))


@contextmanager
def surroundings(folder: Path) -> Iterator[dict[str, object]]:
    """What the attempts are told of, and the proof that none of it was touched."""
    secret, outside = folder / "secret", folder / "outside"
    secret.write_text("hunter2")
    outside.mkdir()
    mailbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    mailbox.bind(str(folder / "mailbox"))
    mailbox.setblocking(False)
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        priority = os.getpriority(os.PRIO_PROCESS, victim.pid)
        yield {"victim": victim.pid, "secret": str(secret), "outside": str(outside), "mailbox": str(folder / "mailbox")}
        assert victim.poll() is None, "the victim was ended"
        assert os.getpriority(os.PRIO_PROCESS, victim.pid) == priority
        assert len(os.sched_getaffinity(victim.pid)) == len(os.sched_getaffinity(0))
        assert secret.read_text() == "hunter2"
        assert not list(outside.iterdir())
        assert not Path("/dev/shm/sluice-escaped").exists()
        with pytest.raises(BlockingIOError):
            mailbox.recv(1)
    finally:
        mailbox.close()
        victim.kill()
        victim.communicate()


def try_all(folder: Path, *, landlock: bool) -> None:
    """All attempts, each in a fork of one jail."""
    table = attempts(landlock=landlock)
    with surroundings(folder) as names:
        cases = [StdinCase(repr((attempt, names))) for attempt in table]
        results = run_cases(PROGRAM, cases, Limits(total_s=300.0, case_s=30.0))
    answers = zip(table.items(), results, strict=True)
    wrong = {attempt: result for (attempt, good), result in answers if not is_refusal(result, good)}
    assert not wrong


def is_refusal(result: CaseResult, good: tuple[str, ...]) -> bool:
    words = result.stdout.split()
    return result.how == "ok" and bool(words) and words[0] in good


def test_the_table_is_long() -> None:
    assert len(attempts(landlock=False)) >= 120
    named = {word for words in attempts(landlock=True).values() for word in words} - {"MemoryError"}
    assert named <= set(errno.errorcode.values())


@pytest.mark.slow
def test_no_attempt_succeeds(tmp_path: Path) -> None:
    try_all(tmp_path, landlock=NATIVE > 0)


@pytest.mark.full
@pytest.mark.parametrize("version", range(8))
@pytest.mark.parametrize("person", ["root", "user"])
def test_no_attempt_succeeds_for_anybody_on_any_kernel(
    person: str, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version > NATIVE:
        pytest.skip(f"this kernel has Landlock {NATIVE}")
    jailed(monkeypatch, person, version)
    try_all(tmp_path, landlock=version > 0)
    (told,) = run_cases(_WHO, [StdinCase("")], Limits(total_s=60.0, case_s=30.0))
    user, readable = told.stdout.split("; ")
    numbers = {"user": "1000" if os.getuid() == 0 else str(os.getuid()), "root": "65534" if os.getuid() == 0 else "0"}
    assert user == f"{numbers[person]} 0", "the user, and its capabilities"
    assert readable == f"{version == 0}\n"
