# SPDX-License-Identifier: Apache-2.0
"""The first process of a sandbox: finishes the walls, starts its one child and ends when that ends or nobody waits.

It is process 1 of its namespace of processes: when it ends, the kernel kills everything that was started in there.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys


# Names, links and attributes of files are memory too, and count as inodes
INODES = 4096
FOLDERS = {
    "/tmp": f"size=64m,nr_inodes={INODES},mode=1777",
    "/dev": "size=64k,nr_inodes=64,mode=755",
    "/dev/shm": "size=16m,nr_inodes=256,mode=1777",
}
DEVICES = ("null", "zero", "full", "random", "urandom")

CPU_SECONDS = 20
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 24
OPEN_FILES = 64  # sockets keep up to 416 KB in the kernel for each two of them
PENDING_SIGNALS = 256
TASKS = 48  # processes and threads

libc = ctypes.CDLL(None, use_errno=True)


def succeed(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())} ({what})")
    return result


# --- the file system, where bubblewrap has not made it

BIND, RECURSIVE, NO_SETUID, NO_DEVICES, DETACH = 1 << 12, 1 << 14, 1 << 1, 1 << 2, 2


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None):
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    succeed(libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {source} on {target}")


def make_read_only(path: str, recursive: bool = True, attributes: int = 1 | 2 | 4):
    """`attributes`: read-only, no setuid, no devices."""
    mount_setattr, at_fdcwd, at_recursive = 442, -100, 0x8000
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = at_recursive if recursive else 0
    result = libc.syscall(mount_setattr, at_fdcwd, path.encode(), flags, ctypes.byref(wanted), ctypes.sizeof(wanted))
    succeed(result, f"make {path} read-only")


def build_root(read_only: list[list[str]], hidden: list[str]):
    """A new root that holds nothing but the interpreter, and the only one from here on."""
    succeed(libc.mount(None, b"/", None, ctypes.c_ulong(RECURSIVE | 1 << 18), None), "make mounts private")
    new = "/proc"  # a folder that is always there, and that nothing is taken from
    mount("tmpfs", new, "tmpfs", NO_SETUID | NO_DEVICES, "size=1m,mode=755")
    for source, target in read_only:
        place = new + target
        os.makedirs(place if os.path.isdir(source) else os.path.dirname(place), exist_ok=True)
        if not os.path.isdir(source):
            open(place, "x").close()
        mount(source, place, None, BIND | RECURSIVE)
        make_read_only(place)
    for path in hidden:
        mount("tmpfs", new + path, "tmpfs", NO_SETUID | NO_DEVICES, "size=4k,mode=755")
        make_read_only(new + path)
    for path, size in FOLDERS.items():
        os.makedirs(new + path, exist_ok=True)
        mount("tmpfs", new + path, "tmpfs", NO_SETUID | NO_DEVICES, size)
    for device in DEVICES:
        open(f"{new}/dev/{device}", "x").close()
        mount(f"/dev/{device}", f"{new}/dev/{device}", None, BIND)
    os.chdir(new)
    succeed(libc.pivot_root(b".", b"."), "pivot_root")
    succeed(libc.umount2(b".", DETACH), "let go of the old root")
    os.chdir("/")
    for path in ("/dev", "/"):
        make_read_only(path, recursive=False, attributes=1 | 2)
    succeed(libc.sethostname(b"sandbox", 7), "name the machine")


def limit_files():
    """In the folders that bubblewrap has made, which knows no such limit."""
    remount = 1 << 5
    for path in ("/tmp", "/dev/shm"):
        mount("tmpfs", path, None, remount | NO_SETUID | NO_DEVICES, FOLDERS[path].rsplit(",", 1)[0])


# --- what a process may do


def drop_rights(user: int | None):
    """No user of the machine, no capabilities, and no way to get any."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    version, empty = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    succeed(libc.capset(version, empty), "capset")


def limit_resources():
    for what, most in (
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, TASKS),
        (resource.RLIMIT_MEMLOCK, 1 << 16),
        (resource.RLIMIT_SIGPENDING, PENDING_SIGNALS),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


# What no program of a benchmark needs and what has led out of sandboxes, or keeps memory that no limit counts, such as
# attributes, watches and locks of files, sockets and what is sent with them
FORBIDDEN = (
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "fsopen", "fsconfig", "fsmount", "fspick"),
    *("move_mount", "open_tree", "open_by_handle_at", "name_to_handle_at", "mknod", "mknodat"),
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "perf_event_open", "bpf"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd", "keyctl", "add_key", "request_key"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "syslog", "acct"),
    *("swapon", "swapoff", "quotactl", "settimeofday", "clock_settime", "adjtimex", "clock_adjtime"),
    *("memfd_create", "shmget", "shmat", "msgget", "semget", "mq_open", "fanotify_init", "vhangup", "personality"),
    *("mbind", "set_mempolicy", "migrate_pages", "move_pages", "sethostname", "setdomainname"),
    *("setxattr", "lsetxattr", "fsetxattr", "inotify_init", "inotify_init1", "flock", "execve", "execveat", "seccomp"),
    *("socket", "setsockopt", "sendmsg", "sendmmsg"),
)
# Newer calls, whose numbers are the same on all machines, such as `statmount`, `listmount` and `setxattrat`. Libraries
# fall back to older ones
NEWER_CALLS = range(441, 512)
LOCKS = (6, 7, 37, 38, 1024, 1026)  # F_SETLK, F_SETLKW and those of open files, F_SETLEASE, F_NOTIFY
SET_FILTER = 22  # PR_SET_SECCOMP
NAMESPACE_FLAGS = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
TERMINAL_REQUESTS = (0x5412, 0x541C, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCSETD
LOCAL, STREAM = 1, 1  # AF_UNIX, SOCK_STREAM: the pair that asyncio wakes itself up with
EPERM, ENOSYS = 1, 38
NOT_EQUAL, MASKED_EQUAL = 1, 7


class Comparison(ctypes.Structure):
    _fields_ = [("argument", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


def filter_calls():
    """Calls of the kernel that fail from here on, by libseccomp; it takes the way to new rights as well."""
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_rule_add_array.argtypes = [
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(Comparison))
    ]
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    calls = library.seccomp_init(0x7FFF0000)  # everything else is allowed

    def forbid(name: str | int, *comparisons: Comparison, error: int = EPERM):
        number = name if isinstance(name, int) else library.seccomp_syscall_resolve_name(name.encode())
        if number == -1:
            raise OSError(f"libseccomp is older than 2.5: it does not know `{name}`")
        array = (Comparison * len(comparisons))(*comparisons)
        result = library.seccomp_rule_add_array(calls, 0x50000 | error, number, len(comparisons), array)
        if result < 0:
            raise OSError(-result, f"{os.strerror(-result)} (seccomp rule for {name})")

    for name in FORBIDDEN:
        forbid(name)
    forbid("clone3", error=ENOSYS)  # whose flags cannot be read; everybody falls back to clone
    for flag in NAMESPACE_FLAGS:
        forbid("clone", Comparison(0, MASKED_EQUAL, flag, flag))
    for call in TERMINAL_REQUESTS:
        forbid("ioctl", Comparison(1, MASKED_EQUAL, 0xFFFFFFFF, call))
    for command in LOCKS:
        forbid("fcntl", Comparison(1, MASKED_EQUAL, 0xFFFFFFFF, command))
    forbid("prctl", Comparison(0, MASKED_EQUAL, 0xFFFFFFFF, SET_FILTER))
    forbid("socketpair", Comparison(0, NOT_EQUAL, LOCAL))
    for kind in range(16):
        if kind != STREAM:
            forbid("socketpair", Comparison(1, MASKED_EQUAL, 0xF, kind))
    for number in NEWER_CALLS:
        forbid(number, error=ENOSYS)
    result = library.seccomp_load(calls)
    if result < 0:
        raise OSError(-result, f"{os.strerror(-result)} (seccomp)")


# --- the trial


def reaches_network() -> bool:
    """Whether there is more than an empty network, asked before sockets are forbidden as well."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside:
        return outside.connect_ex(("192.0.2.1", 9)) == 0  # an address of documentation


def weaknesses() -> list[str]:
    """What a program could do in here that it must not. Nothing, or the sandbox is not used."""
    import random  # noqa: F401  - not imported before: fails where the library cannot be read
    import socket

    found = []

    def must_fail(what: str, attempt, *arguments):
        try:
            attempt(*arguments)
        except OSError:
            return
        found.append(what)

    must_fail("write to the root", os.mkdir, "/x")
    must_fail("write to the library", os.mkdir, os.path.join(os.path.dirname(os.__file__), "x"))
    must_fail("see processes", os.listdir, "/proc/1")
    must_fail("see the system", os.listdir, "/sys/kernel")
    must_fail("see passwords", os.stat, "/etc/passwd")
    must_fail("become root", os.setresuid, 4242, 4242, 4242)
    must_fail("make devices", os.mknod, "/tmp/device", 0o60600, os.makedev(8, 0))
    for family, kind in ((socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_NETLINK, socket.SOCK_RAW)):
        must_fail("open sockets", socket.socket, family, kind)
    if os.getpid() > 10:
        found.append("see numbers of other processes")
    with open("/tmp/trial", "wb") as file:
        must_fail("write large files", os.truncate, file.fileno(), FILE_BYTES + 1)
        must_fail("keep attributes of files", os.setxattr, file.fileno(), "user.trial", b"x")
    links = 0
    with contextlib.suppress(OSError):
        while links <= INODES:
            os.link("/tmp/trial", f"/tmp/trial{links}")
            links += 1
    if links > INODES:
        found.append("make any number of files")
    for name in os.listdir("/tmp"):
        os.unlink(f"/tmp/{name}")
    for call in (libc.unshare, libc.setns):
        if call(0x10000000, 0) == 0:
            found.append("make namespaces")
    children = []
    try:
        while len(children) <= TASKS:
            child = os.fork()
            if child == 0:
                signal.pause()
            children.append(child)
        found.append("start any number of processes")
    except OSError:
        if not children:
            found.append("start no process at all")
    for child in children:
        os.kill(child, signal.SIGKILL)
    return found


# --- the first process and its child


def watch(child: int, lifeline: int):
    """Return when the child ends, or when whoever started all this is gone or has seen enough."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what loses its parent
    poll = select.poll()
    poll.register(os.pidfd_open(child), select.POLLIN)
    poll.register(lifeline, select.POLLIN)
    poll.poll()


def main():
    options = json.loads(sys.argv[1])
    if options["build"] is not None:
        build_root(**options["build"])
    else:
        limit_files()
    with os.fdopen(options["text"], encoding="utf-8", errors="surrogatepass", newline="") as file:
        text = file.read()
    os.chdir("/tmp")
    if os.path.isdir("/packages"):
        sys.path.append("/packages")
    network = options["role"] == "trial" and reaches_network()
    drop_rights(options["user"])
    limit_resources()
    filter_calls()
    child = os.fork()
    if child:
        for descriptor in options["descriptors"]:
            os.close(descriptor)
        watch(child, options["lifeline"])
        os._exit(0)
    os.close(options["lifeline"])
    del sys.path[0]  # what is here is no business of the program's
    role, arguments = options["role"], options["arguments"]
    if role == "program":
        program.run(text, **arguments)
    elif role == "judge":
        judge.run(text, **arguments)
    else:
        found = ["reach a network"] * network + weaknesses()
        os.write(arguments["verdict"], ("\n".join(found) or "none").encode())
    os._exit(0)


if __name__ == "__main__":
    import judge
    import program

    main()
