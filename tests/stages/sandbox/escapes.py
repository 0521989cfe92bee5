"""What a jailed program may try: one line of Python for each attempt, and the errors with which it must be refused.

An attempt that ends without an error has escaped. One that ends with any other error has not reached what it meant to
try: a call that is let through with nonsense for arguments says EFAULT, EBADF or EINVAL, not EPERM. None of them harms
a machine whose jail is broken: who is not to be signalled gets signal 0, clocks get no time. The attempts know
`call(number, ...)` (a system call, raising OSError), `victim` (a process of the caller), `secret`, `outside` (a file
and a folder that are not theirs), `mailbox` (a datagram socket that listens) and `buffer` (zeroed memory).
System call numbers are those of x86-64.
"""

from __future__ import annotations

REFUSED = ("EPERM",)
NO_FILE = ("EACCES", "EPERM")

PROGRAM = """
import ctypes, errno, os, sys
c_library = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(4096)
def call(number, *arguments):
    ctypes.set_errno(0)
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if c_library.syscall(ctypes.c_long(number), *words) == -1:
        raise OSError(ctypes.get_errno(), "refused")
def pipe(): return os.pipe()[1]
class Modules(dict):
    def __missing__(self, name):
        if name not in ("fcntl", "mmap", "resource", "socket"): raise KeyError(name)
        return __import__(name)
attempt, names = eval(sys.stdin.read())
try:
    exec(attempt, globals() | names, Modules())
except OSError as error:
    print(errno.errorcode.get(error.errno))
except BaseException as error:
    print(type(error).__name__, error)
else:
    print("escaped")
"""


def calls(*numbers: int) -> tuple[str, ...]:
    """Calls that are refused by their number. With these arguments they do nothing where they are let through."""
    return tuple(f"call({number}{', -1' * 6})" for number in numbers)


def each(form: str, *values: object) -> tuple[str, ...]:
    """An attempt with each of these values."""
    return tuple(form.format(value) for value in values)


SIGNALS = (
    *each("call(62, {})", "victim, 9", "victim, 0", "-1, 0", "0, 0", "os.getppid(), 0", "1, 0"),
    *("os.kill(victim, 9)", "os.killpg(os.getpgid(0), 0)", "os.pidfd_open(victim)"),
    *calls(200, 234, 129, 297, 424),  # tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal
    *each("fcntl.fcntl(pipe(), fcntl.F_SETOWN, {})", "victim", "os.getppid()", -1),
    "call(72, pipe(), 15, buffer)",  # F_SETOWN_EX
    "fcntl.fcntl(pipe(), fcntl.F_SETSIG, 9)",
    *each("fcntl.fcntl(pipe(), fcntl.F_SETFL, os.O_ASYNC{})", "", " | os.O_NONBLOCK"),
    *each("call(72, pipe(), {})", "4, 0o20000 | 1 << 32", "10 | 1 << 32, 9"),
    "fcntl.ioctl(pipe(), 0x5452, buffer)",  # FIOASYNC
    *each("fcntl.ioctl(socket.socketpair()[0].fileno(), {}, buffer)", 0x8901, 0x8902),  # FIOSETOWN, SIOCSPGRP
    *each("fcntl.ioctl(0, {})", "0x5412, b'x'", "0x40045436, 9"),  # TIOCSTI, TIOCSIG
    *("fcntl.fcntl(1, 1024, 0)", "fcntl.fcntl(os.open('.', 0), 1026, 1)"),  # F_SETLEASE, F_NOTIFY
    *calls(222, 244, 438, 448),  # timer_create, mq_notify, pidfd_getfd, process_mrelease
    *("call(157, 1, 0)", "os.setpgid(0, os.getpgid(victim))", "os.setsid()"),  # the first: PR_SET_PDEATHSIG
)
PROCESSES = (
    *("os.fork()", "call(58)"),  # the second: vfork
    *each("call(56, {}, 0)", 17, 17 | 0x8000, 17 | 0x10000000),  # clone: a child, a sibling, CLONE_NEWUSER
    *each("call(56, {}, 0)", 0x3D0F00 & ~0x400, 0x3D0F00 | 0x10000000),  # a thread with descriptors of its own
    *("os.execv('/bin/true', ['true'])", "os.posix_spawn('/bin/true', ['true'], {})"),
    "__import__('subprocess').run(['true'])",
    "__import__('multiprocessing').get_context('fork').Process(target=print).start()",
    *each("call(272, {})", 0x10000000, 0x40000000, 0x20000, 0x400),  # unshare: users, network, mounts, descriptors
    "call(436, 3, 3, 2)",  # close_range with CLOSE_RANGE_UNSHARE
    *each("call(101, {}, victim, 0, 0)", 0, 16, 0x4206),  # ptrace: TRACEME, ATTACH, SEIZE
    *calls(322, 308, 310, 311, 312),  # execveat, setns, process_vm_readv, process_vm_writev, kcmp
    *calls(440, 279, 256, 251, 314),  # process_madvise, move_pages, migrate_pages, ioprio_set, sched_setattr
    "resource.prlimit(victim, resource.RLIMIT_CPU, (1, 1))",
    "resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
    *("os.setpriority(os.PRIO_PROCESS, victim, 19)", "os.setpriority(9, 0, 19)", "call(141, 0, 0, 5)", "os.nice(1)"),
    *each("os.sched_setaffinity({}, {{0}})", "victim", 0),
    *("os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))", "os.sched_setparam(0, os.sched_param(0))"),
)
PRIVILEGES = (
    *each("os.{}", "setuid(0)", "setuid(os.getuid())", "setgid(0)", "setreuid(0, 0)", "setgroups([0])"),
    *each("os.{}(0, 0, 0)", "setresuid", "setresgid"),
    *("call(122, 0)", "call(123, 0)", "call(126, buffer, buffer)"),  # setfsuid, setfsgid, capset
    # PR_SET_DUMPABLE, _KEEPCAPS, _SECCOMP, _CHILD_SUBREAPER, _MM, PR_CAP_AMBIENT_RAISE, PR_SET_PTRACER
    *each("call(157, {})", "4, 1", "8, 1", "22, 2, buffer", "36, 1", "35, 1, 0, 0, 0", "47, 2, 21, 0, 0"),
    *each("call(157, {})", "0x59616D61, victim", "1 | 1 << 32, 0"),
    *("call(317, 1, 0, buffer)", "call(135, 0x0040000)"),  # seccomp, personality
    *calls(250, 248, 249, 444),  # keyctl, add_key, request_key, landlock_create_ruleset
    *each("call(0x40000000 + {})", "62, victim, 9", "520, buffer, 0, 0"),  # the same calls by their x32 numbers
)
MACHINE = (
    *calls(227, 164, 159, 305),  # clock_settime, settimeofday, adjtimex, clock_adjtime
    *calls(170, 171, 163, 103, 169),  # sethostname, setdomainname, acct, syslog, reboot
    *calls(246, 320, 175, 313, 176),  # kexec_load, kexec_file_load, init_module, finit_module, delete_module
    *calls(167, 168, 165, 166, 155),  # swapon, swapoff, mount, umount2, pivot_root
    "os.chroot('.')",
    *calls(430, 432, 433, 428),  # fsopen, fsmount, fspick, open_tree
    *calls(429, 442, 457),  # move_mount, mount_setattr, statmount
    *calls(172, 173, 154, 179),  # iopl, ioperm, modify_ldt, quotactl
    *calls(153, 162, 300, 294),  # vhangup, sync, fanotify_init, inotify_init1
    *calls(321, 298, 323, 304, 303),  # bpf, perf_event_open, userfaultfd, open_by_handle_at, name_to_handle_at
)
NETWORK = (
    *each("socket.socket({})", "2, 1", "2, 2", "10, 1", "1, 1", "1, 2", "16, 3", "17, 3", "38, 5", "40, 1"),
    "__import__('http.client').client.HTTPConnection('127.0.0.1', 1).connect()",
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', mailbox)",
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
    "call(53, 1, 2 | 0o2000000, 0, buffer)",
    *calls(42, 49, 50, 288, 307, 299),  # connect, bind, listen, accept4, sendmmsg, recvmmsg
    "socket.socketpair()[0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b'\\1\\0\\0\\0')])",
    "socket.socketpair()[0].recvmsg(1)",
    "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)",
    "fcntl.ioctl(socket.socketpair()[0].fileno(), 0x8912, buffer)",  # SIOCGIFCONF
    *calls(425, 206),  # io_uring_setup, io_setup
)
MEMORY = (
    "os.memfd_create('x')",
    *calls(447, 29, 30, 64, 68, 240),  # memfd_secret, shmget, shmat, semget, msgget, mq_open
    *("call(149, buffer, 4096)", "call(151, 3)"),  # mlock, mlockall
    *("fcntl.fcntl(pipe(), fcntl.F_SETPIPE_SZ, 1 << 20)", "fcntl.fcntl(1, fcntl.F_ADD_SEALS, 1)"),
    *calls(278, 275, 276),  # vmsplice, splice, tee
    *calls(237, 238, 216, 330),  # mbind, set_mempolicy, remap_file_pages, pkey_alloc
    *each("call(160, {}, (ctypes.c_ulong * 2)(1 << 40, 1 << 40))", 9, 1),  # setrlimit: address space, file size
    *each("call(160, {}, (ctypes.c_ulong * 2)(1 << 16, 1 << 16))", 7, 0),  # descriptors, processor time
    "call(302, 0, 9, (ctypes.c_ulong * 2)(1 << 40, 1 << 40), 0)",  # prlimit64
)
FILES = (  # refused with Landlock and without
    *each("open({})", "outside + '/made', 'w'", "'../escaped', 'w'", "secret, 'w'", "secret, 'a'"),
    *each("open('{}', 'w')", "/dev/shm/sluice-escaped", "/proc/sys/kernel/hostname", "/proc/self/oom_score_adj"),
    "open(os.__file__, 'a')",
    "os.open(outside, os.O_TMPFILE | os.O_RDWR)",
    *each("os.open('slow', os.O_CREAT | os.O_WRONLY | os.{})", "O_SYNC", "O_DIRECT"),
    *("os.truncate(secret, 0)", "os.unlink(secret)", "os.rename(secret, 'x')"),
    *("os.mkdir(outside + '/made')", "os.rmdir(outside)"),
    *("os.chmod(secret, 0o777)", "os.chmod('.', 0o777)", "os.fchmod(os.open('.', 0), 0o777)"),
    *("os.chown('.', 0, 0)", "os.fchown(1, 0, 0)", "os.utime(secret)", "os.utime('.')"),
    *("os.setxattr('.', 'user.x', b'1')", "os.removexattr('.', 'user.x')"),
    *("os.symlink(secret, 'link')", "os.link(secret, 'link')"),
    *("os.mkfifo('fifo')", "os.mknod('device', 0o60600, 0x800)"),
    *("call(437, -100, b'.', buffer, 24)", "call(73, 1, 2)"),  # openat2, flock
)
READING = (  # refused where there is Landlock; without, a program reads what the user can read
    *("open(secret)", "os.listdir('/')", "os.listdir(outside)"),
    *each("open('{}')", "/etc/passwd", "/proc/self/environ", "/sys/kernel/mm/transparent_hugepage/enabled"),
    *each("open(f'{}', 'rb')", "/proc/{victim}/mem", "/proc/{os.getppid()}/environ", "/proc/self/mem", "/dev/zero"),
)

# Beyond what they are for, these calls fail with a word of their own.
OTHERWISE = {
    # clone3, so that the C library takes clone, and what is newer than the list
    **dict.fromkeys(("call(435, buffer, 88)", "call(463, 0, 0, 0, 0)", "call(500)"), ("ENOSYS",)),
    **dict.fromkeys(each("[{} for _ in range(64)]", "os.dup(0)", "pipe()"), ("EMFILE",)),
    **dict.fromkeys(("os.ftruncate(1, 1 << 30)", "os.posix_fallocate(3, 0, 1 << 30)"), ("EFBIG",)),
    "mmap.mmap(-1, 1 << 31)": ("ENOMEM",),
    **dict.fromkeys(each("bytearray(1 << {})", 31, 34), ("MemoryError",)),
}


def attempts(*, landlock: bool) -> dict[str, tuple[str, ...]]:
    """What may be tried, and the answers that refuse it."""
    refused = (*SIGNALS, *PROCESSES, *PRIVILEGES, *MACHINE, *NETWORK, *MEMORY)
    found = dict.fromkeys(refused, REFUSED) | dict.fromkeys(FILES, NO_FILE) | OTHERWISE
    return found | dict.fromkeys(READING, NO_FILE) if landlock else found
