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

SIGNALS = (
    "call(62, victim, 9)",
    "call(62, victim, 0)",
    "call(62, -1, 0)",
    "call(62, 0, 0)",
    "call(62, os.getppid(), 0)",
    "call(62, 1, 0)",
    "os.kill(victim, 9)",
    "os.killpg(os.getpgid(0), 0)",
    "call(200, victim, 9)",  # tkill
    "call(234, victim, victim, 9)",  # tgkill
    "call(129, victim, 9, buffer)",  # rt_sigqueueinfo
    "call(297, victim, victim, 9, buffer)",  # rt_tgsigqueueinfo
    "os.pidfd_open(victim)",
    "call(424, 0, 9, 0, 0)",  # pidfd_send_signal
    "fcntl.fcntl(pipe(), fcntl.F_SETOWN, victim)",
    "fcntl.fcntl(pipe(), fcntl.F_SETOWN, os.getppid())",
    "fcntl.fcntl(pipe(), fcntl.F_SETOWN, -1)",
    "call(72, pipe(), 15, buffer)",  # F_SETOWN_EX
    "fcntl.fcntl(pipe(), fcntl.F_SETSIG, 9)",
    "fcntl.fcntl(pipe(), fcntl.F_SETFL, os.O_ASYNC)",
    "fcntl.fcntl(pipe(), fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)",
    "call(72, pipe(), 4, 0o20000 | 1 << 32)",
    "call(72, pipe(), 10 | 1 << 32, 9)",
    "fcntl.ioctl(pipe(), 0x5452, buffer)",  # FIOASYNC
    "fcntl.ioctl(socket.socketpair()[0].fileno(), 0x8901, buffer)",  # FIOSETOWN
    "fcntl.ioctl(socket.socketpair()[0].fileno(), 0x8902, buffer)",  # SIOCSPGRP
    "fcntl.ioctl(0, 0x5412, b'x')",  # TIOCSTI
    "fcntl.ioctl(0, 0x40045436, 9)",  # TIOCSIG
    "fcntl.fcntl(1, 1024, 0)",  # F_SETLEASE
    "fcntl.fcntl(os.open('.', 0), 1026, 1)",  # F_NOTIFY
    "call(222, 1, buffer, buffer)",  # timer_create
    "call(244, 0, buffer)",  # mq_notify
    "call(157, 1, 0)",  # PR_SET_PDEATHSIG
    "os.setpgid(0, os.getpgid(victim))",
    "os.setsid()",
    "call(438, 0, 0, 0)",  # pidfd_getfd
    "call(448, 0, 0)",  # process_mrelease
)
PROCESSES = (
    "os.fork()",
    "call(58)",  # vfork
    "call(56, 17, 0)",  # clone
    "call(56, 17 | 0x8000, 0)",  # a sibling
    "call(56, 17 | 0x10000000, 0)",  # CLONE_NEWUSER
    "call(56, 0x3D0F00 & ~0x400, 0)",  # a thread with descriptors of its own
    "call(56, 0x3D0F00 | 0x10000000, 0)",
    "os.execv('/bin/true', ['true'])",
    "call(322, -100, b'/bin/true', 0, 0, 0)",  # execveat
    "os.posix_spawn('/bin/true', ['true'], {})",
    "__import__('subprocess').run(['true'])",
    "__import__('multiprocessing').get_context('fork').Process(target=print).start()",
    "call(272, 0x10000000)",  # unshare: users
    "call(272, 0x40000000)",  # network
    "call(272, 0x20000)",  # mounts
    "call(272, 0x400)",  # descriptors
    "call(436, 3, 3, 2)",  # close_range with CLOSE_RANGE_UNSHARE
    "call(308, 0, 0)",  # setns
    "call(101, 0, 0, 0, 0)",  # ptrace: TRACEME
    "call(101, 16, victim, 0, 0)",  # ATTACH
    "call(101, 0x4206, victim, 0, 0)",  # SEIZE
    "call(310, victim, buffer, 1, buffer, 1, 0)",  # process_vm_readv
    "call(311, victim, buffer, 1, buffer, 1, 0)",
    "call(312, os.getpid(), victim, 0, 0, 0)",  # kcmp
    "call(440, 0, buffer, 1, 0, 0)",  # process_madvise
    "call(279, victim, 0, buffer, 0, buffer, 0)",  # move_pages
    "call(256, victim, 64, buffer, buffer)",  # migrate_pages
    "resource.prlimit(victim, resource.RLIMIT_CPU, (1, 1))",
    "resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
    "os.setpriority(os.PRIO_PROCESS, victim, 19)",
    "os.setpriority(9, 0, 19)",
    "os.nice(1)",
    "call(251, 1, victim, 3 << 13)",  # ioprio_set
    "os.sched_setaffinity(victim, {0})",
    "os.sched_setaffinity(0, {0})",
    "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "os.sched_setparam(0, os.sched_param(0))",
    "call(314, 0, buffer, 0)",  # sched_setattr
)
PRIVILEGES = (
    "os.setuid(0)",
    "os.setuid(os.getuid())",
    "os.setgid(0)",
    "os.setreuid(0, 0)",
    "os.setresuid(0, 0, 0)",
    "os.setresgid(0, 0, 0)",
    "os.setgroups([0])",
    "call(122, 0)",  # setfsuid
    "call(123, 0)",  # setfsgid
    "call(126, buffer, buffer)",  # capset
    "call(157, 4, 1)",  # PR_SET_DUMPABLE
    "call(157, 8, 1)",  # PR_SET_KEEPCAPS
    "call(157, 22, 2, buffer)",  # PR_SET_SECCOMP
    "call(157, 36, 1)",  # PR_SET_CHILD_SUBREAPER
    "call(157, 35, 1, 0, 0, 0)",  # PR_SET_MM
    "call(157, 47, 2, 21, 0, 0)",  # PR_CAP_AMBIENT_RAISE
    "call(157, 0x59616D61, victim)",  # PR_SET_PTRACER
    "call(157, 1 | 1 << 32, 0)",
    "call(317, 1, 0, buffer)",  # seccomp
    "call(135, 0x0040000)",  # personality
    "call(250, 0, 0)",  # keyctl
    "call(248, b'user', b'k', b'v', 1, -3)",  # add_key
    "call(249, b'user', b'k', 0, 0)",  # request_key
    "call(444, buffer, 8, 0)",  # landlock_create_ruleset
    "call(0x40000000 + 62, victim, 9)",  # the same calls by their x32 numbers
    "call(0x40000000 + 520, buffer, 0, 0)",
)
MACHINE = (
    "call(227, 0, 0)",  # clock_settime
    "call(164, 1, 0)",  # settimeofday
    "call(159, buffer)",  # adjtimex
    "call(305, 0, buffer)",  # clock_adjtime
    "call(170, b'x', -1)",  # sethostname
    "call(171, b'x', -1)",  # setdomainname
    "call(163, 1)",  # acct
    "call(103, 3, buffer, 10)",  # syslog
    "call(169, 0, 0, 0, 0)",  # reboot
    "call(246, 0, 0, 0, 0)",  # kexec_load
    "call(320, 0, 0, 0, 0, 0)",  # kexec_file_load
    "call(175, buffer, 0, buffer)",  # init_module
    "call(313, 0, buffer, 0)",  # finit_module
    "call(176, buffer, 0)",  # delete_module
    "call(167, buffer, 0)",  # swapon
    "call(168, buffer)",  # swapoff
    "call(165, buffer, buffer, buffer, 0, 0)",  # mount
    "call(166, buffer, 0)",  # umount2
    "call(155, buffer, buffer)",  # pivot_root
    "os.chroot('.')",
    "call(430, buffer, 0)",  # fsopen
    "call(432, 0, 0, 0)",  # fsmount
    "call(433, 0, buffer, 0)",  # fspick
    "call(428, -100, b'.', 1)",  # open_tree
    "call(429, 0, b'', 0, b'', 0)",  # move_mount
    "call(442, 0, buffer, 0, buffer, 0)",  # mount_setattr
    "call(457, buffer, buffer, 0, 0)",  # statmount
    "call(172, 3)",  # iopl
    "call(173, 0, 1, 1)",  # ioperm
    "call(154, 0, buffer, 0)",  # modify_ldt
    "call(179, 0, 0, 0, 0)",  # quotactl
    "call(153)",  # vhangup
    "call(162)",  # sync
    "call(300, 0, 0)",  # fanotify_init
    "call(294, 0)",  # inotify_init1
    "call(321, 0, buffer, 0)",  # bpf
    "call(298, buffer, 0, -1, -1, 0)",  # perf_event_open
    "call(323, 0)",  # userfaultfd
    "call(304, 0, buffer, 0)",  # open_by_handle_at
    "call(303, -100, b'.', buffer, buffer, 0)",  # name_to_handle_at
    "call(141, 0, 0, 5)",  # setpriority
)
NETWORK = (
    *(f"socket.socket({family}, {kind})" for family, kind in ((2, 1), (2, 2), (10, 1), (1, 1), (1, 2), (16, 3))),
    *(f"socket.socket({family}, {kind})" for family, kind in ((17, 3), (38, 5), (40, 1))),
    "__import__('http.client').client.HTTPConnection('127.0.0.1', 1).connect()",
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', mailbox)",
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
    "call(53, 1, 2 | 0o2000000, 0, buffer)",
    "call(42, socket.socketpair()[0].fileno(), buffer, 10)",  # connect
    "call(49, socket.socketpair()[0].fileno(), buffer, 10)",  # bind
    "call(50, socket.socketpair()[0].fileno(), 1)",  # listen
    "call(288, socket.socketpair()[0].fileno(), 0, 0, 0)",  # accept4
    "socket.socketpair()[0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b'\\1\\0\\0\\0')])",
    "socket.socketpair()[0].recvmsg(1)",
    "call(307, socket.socketpair()[0].fileno(), buffer, 1, 0)",  # sendmmsg
    "call(299, socket.socketpair()[0].fileno(), buffer, 1, 0, 0)",  # recvmmsg
    "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)",
    "call(425, 8, buffer)",  # io_uring_setup
    "call(206, 8, buffer)",  # io_setup
    "fcntl.ioctl(socket.socketpair()[0].fileno(), 0x8912, buffer)",  # SIOCGIFCONF
)
MEMORY = (
    "os.memfd_create('x')",
    "call(447, 0)",  # memfd_secret
    "call(29, 0, 1 << 20, 0o1600)",  # shmget
    "call(30, 0, 0, 0)",  # shmat
    "call(64, 0, 1, 0o1600)",  # semget
    "call(68, 0, 0o1600)",  # msgget
    "call(240, b'x', 66, 384, 0)",  # mq_open
    "call(149, buffer, 4096)",  # mlock
    "call(151, 3)",  # mlockall
    "fcntl.fcntl(pipe(), fcntl.F_SETPIPE_SZ, 1 << 20)",
    "fcntl.fcntl(1, fcntl.F_ADD_SEALS, 1)",
    "call(278, pipe(), buffer, 1, 8)",  # vmsplice
    "call(275, 0, 0, pipe(), 0, 1, 0)",  # splice
    "call(276, 0, pipe(), 1, 0)",  # tee
    "call(237, 0, 0, 0, 0, 0, 0)",  # mbind
    "call(238, 0, 0, 0)",  # set_mempolicy
    "call(216, 0, 0, 0, 0, 0)",  # remap_file_pages
    "call(330, 0, 0)",  # pkey_alloc
    "call(160, 9, (ctypes.c_ulong * 2)(1 << 40, 1 << 40))",  # setrlimit: address space
    "call(160, 1, (ctypes.c_ulong * 2)(1 << 40, 1 << 40))",  # file size
    "call(160, 7, (ctypes.c_ulong * 2)(1 << 16, 1 << 16))",  # descriptors
    "call(160, 0, (ctypes.c_ulong * 2)(1 << 16, 1 << 16))",  # processor time
    "call(302, 0, 9, (ctypes.c_ulong * 2)(1 << 40, 1 << 40), 0)",  # prlimit64
)
FILES = (  # refused with Landlock and without
    "open(outside + '/made', 'w')",
    "open('../escaped', 'w')",
    "os.open(outside, os.O_TMPFILE | os.O_RDWR)",
    "os.open('slow', os.O_CREAT | os.O_WRONLY | os.O_SYNC)",
    "os.open('slow', os.O_CREAT | os.O_WRONLY | os.O_DIRECT)",
    "open(secret, 'w')",
    "open(secret, 'a')",
    "open('/dev/shm/sluice-escaped', 'w')",
    "open('/proc/sys/kernel/hostname', 'w')",
    "open('/proc/self/oom_score_adj', 'w')",
    "open(os.__file__, 'a')",
    "os.truncate(secret, 0)",
    "os.unlink(secret)",
    "os.rename(secret, 'x')",
    "os.mkdir(outside + '/made')",
    "os.rmdir(outside)",
    "os.chmod(secret, 0o777)",
    "os.chmod('.', 0o777)",
    "os.fchmod(os.open('.', 0), 0o777)",
    "os.chown('.', 0, 0)",
    "os.fchown(1, 0, 0)",
    "os.utime(secret)",
    "os.utime('.')",
    "os.setxattr('.', 'user.x', b'1')",
    "os.removexattr('.', 'user.x')",
    "os.symlink(secret, 'link')",
    "os.link(secret, 'link')",
    "os.mkfifo('fifo')",
    "os.mknod('device', 0o60600, 0x800)",
    "call(437, -100, b'.', buffer, 24)",  # openat2
    "call(73, 1, 2)",  # flock
)
READING = (  # refused where there is Landlock; without, a program reads what the user can read
    "open(secret)",
    "open('/etc/passwd')",
    "os.listdir('/')",
    "os.listdir(outside)",
    "open('/proc/self/environ')",
    "open(f'/proc/{os.getppid()}/environ')",
    "open(f'/proc/{victim}/mem', 'rb')",
    "open('/proc/self/mem', 'rb')",
    "open('/dev/zero', 'rb')",
    "open('/sys/kernel/mm/transparent_hugepage/enabled')",
)

# Beyond what they are for, these calls fail with a word of their own.
OTHERWISE = {
    "call(435, buffer, 88)": ("ENOSYS",),  # clone3: so that the C library takes clone
    "call(463, 0, 0, 0, 0)": ("ENOSYS",),  # newer than the list
    "call(500)": ("ENOSYS",),
    "[os.dup(0) for _ in range(64)]": ("EMFILE",),
    "[pipe() for _ in range(64)]": ("EMFILE",),
    "os.ftruncate(1, 1 << 30)": ("EFBIG",),
    "os.posix_fallocate(3, 0, 1 << 30)": ("EFBIG",),
    "mmap.mmap(-1, 1 << 31)": ("ENOMEM",),
    "bytearray(1 << 31)": ("MemoryError",),
    "bytearray(1 << 34)": ("MemoryError",),
}


def attempts(*, landlock: bool) -> dict[str, tuple[str, ...]]:
    """What may be tried, and the answers that refuse it."""
    refused = (*SIGNALS, *PROCESSES, *PRIVILEGES, *MACHINE, *NETWORK, *MEMORY)
    found = dict.fromkeys(refused, REFUSED) | dict.fromkeys(FILES, NO_FILE) | OTHERWISE
    return found | dict.fromkeys(READING, NO_FILE) if landlock else found
