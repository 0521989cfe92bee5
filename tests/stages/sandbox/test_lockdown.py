"""The jail: a program tries everything in escapes.py, as root and as a user, on Landlock of every version.

The seccomp filter is run instruction by instruction, also for processors that this machine does not have.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from stages.sandbox import run as sandbox
from stages.sandbox import syscalls
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
    (reported,) = run_cases(_WHO, [StdinCase("")], Limits(total_s=60.0, case_s=30.0))
    user, readable = reported.stdout.split("; ")
    numbers = {"user": "1000" if os.getuid() == 0 else str(os.getuid()), "root": "65534" if os.getuid() == 0 else "0"}
    assert user == f"{numbers[person]} 0", "the user, and its capabilities"
    assert readable == f"{version == 0}\n"


PASSES, REFUSED, MISSING, DONE, KILLED = 0x7FFF0000, 0x00050001, 0x00050026, 0x00050000, 0x80000000
MACHINES = pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)


@cache
def program_of(machine: str, landlock: bool) -> list[tuple[int, int, int, int]]:
    """Its instructions: what to do, jumps if it holds and if not, and a value."""
    return [struct.unpack("=HBBI", word) for word in syscalls.filter_program(machine, without_landlock=not landlock)]


@MACHINES
@pytest.mark.parametrize("landlock", [False, True])
def test_the_filter_is_well_formed(machine: str, landlock: bool) -> None:
    """Every jump lands inside of the program, and what no instruction allows is refused."""
    program = program_of(machine, landlock)
    assert len(program) < 4096
    for place, (code, if_true, if_false, _) in enumerate(program):
        if code in (0x15, 0x25, 0x45):
            assert place + 1 + max(if_true, if_false) < len(program)
    assert program[-1] == (0x06, 0, 0, REFUSED)


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None, landlock: bool = True) -> int:
    """Run the filter on a made-up call."""
    audit = syscalls.ARCHITECTURES[machine][0] if architecture is None else architecture
    data = struct.pack("<IIQ6Q", number, audit, 0, *[*arguments, 0, 0, 0, 0, 0, 0][:6])
    register, place = 0, 0
    while True:
        code, if_true, if_false, value = program_of(machine, landlock)[place]
        place += 1
        if code == 0x20:
            register = struct.unpack_from("<I", data, value)[0]
        elif code == 0x06:
            return value
        else:
            held = {0x15: register == value, 0x25: register > value, 0x45: register & value != 0}[code]
            place += if_true if held else if_false


@MACHINES
def test_only_the_list_passes(machine: str) -> None:
    """All numbers there are, with arguments that no rule about arguments allows."""
    column = syscalls.ARCHITECTURES[machine][1]
    listed = {both[column] for both in (syscalls.ALLOWED | syscalls.WITH_LANDLOCK).values()}
    ignored = {both[column] for both in syscalls.IGNORED.values()}
    every = range(600)
    passed = {number for number in every if verdict(machine, number, *[0x7FFFFFFF] * 6) == PASSES}
    assert passed == listed - {-1}
    assert {number for number in every if verdict(machine, number) == DONE} == ignored
    assert {verdict(machine, number) for number in (463, 500, 0x3FFFFFFF, syscalls.CLONE3[column])} == {MISSING}
    assert {verdict(machine, 0x40000000 + number) for number in every} == {REFUSED}, "the x32 numbering"
    assert verdict(machine, 0, architecture=0x40000003) == KILLED, "32-bit calls end the process"


@MACHINES
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("clone", [(0x3D0F00,), (0x7D0F00,)], [(17,), (0,), (0x10000 | 0x100,), (0x3D0B00,), (0x13D0F00,)]),
        ("close_range", [(3, 9, 0), (3, 9, 4)], [(3, 9, 2), (3, 9, 6)]),
        ("prlimit64", [(0, 7)], [(1, 7), (0xFFFFFFFF, 7)]),
        ("prctl", [(15,), (16,)], [(1,), (4,), (22,), (36,), (1 | 1 << 32,)]),
        ("ioctl", [(0, 0x5401), (0, 0x5421)], [(0, 0x5452), (0, 0x5412), (0, 0x8901), (0, 0x8902), (0, 0)]),
        (
            "fcntl",
            [(0, 1), (0, 3), (0, 4, 0o4000), (0, 4, 0), (0, 6), (0, 1030)],
            [(0, 4, 0o20000), (0, 4, 0o24000), (0, 4, 1 << 32 | 0o20000), *((0, n) for n in (8, 10, 15, 1024, 1031))],
        ),
        ("socketpair", [(1, 1), (1, 1 | 0o2000000)], [(1, 2), (1, 5), (1, 2 | 0o2000000), (1, 0)]),
    ],
)
def test_arguments_decide(machine: str, name: str, good: list[tuple[int, ...]], bad: list[tuple[int, ...]]) -> None:
    number = syscalls.OF_VALUES[name][0][syscalls.ARCHITECTURES[machine][1]]
    assert {verdict(machine, number, *arguments) for arguments in good} == {PASSES}
    assert {verdict(machine, number, *arguments) for arguments in bad} == {REFUSED}


@MACHINES
def test_without_landlock_files_are_only_read(machine: str) -> None:
    column = syscalls.ARCHITECTURES[machine][1]
    for both in syscalls.WITH_LANDLOCK.values():
        assert both[column] < 0 or verdict(machine, both[column], landlock=False) == REFUSED
    for numbers, position in syscalls.OPEN.values():
        if (number := numbers[column]) >= 0:
            before = [0] * position
            assert verdict(machine, number, *before, 0o2000000, landlock=False) == PASSES
            for flags in (1, 2, 0o100, 0o1000, 0o2000, 0o20200000 | 2):
                assert verdict(machine, number, *before, flags) == PASSES
                assert verdict(machine, number, *before, flags, landlock=False) == REFUSED
            for flags in (os.O_SYNC, os.O_DSYNC | 1, os.O_DIRECT | 2):
                assert verdict(machine, number, *before, flags) == REFUSED


@pytest.mark.parametrize(("column", "header"), enumerate(["x86_64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h"]))
def test_call_numbers_are_those_of_the_kernel_headers(column: int, header: str) -> None:
    path = Path("/usr/include") / header
    if not path.exists():
        pytest.skip("no kernel headers here")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text())
    numbers = {name: int(number) for name, number in found}
    numbers.setdefault("newfstatat", numbers.get("fstatat", -1))
    of_values = {name: rule[0] for name, rule in (syscalls.OF_VALUES | syscalls.OPEN).items()}
    listed = syscalls.ALLOWED | syscalls.WITH_LANDLOCK | syscalls.IGNORED | of_values
    for name, both in (listed | {"clone3": syscalls.CLONE3}).items():
        assert both[column] == numbers.get(name, -1), f"{name} in {header}"
