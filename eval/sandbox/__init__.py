# SPDX-License-Identifier: Apache-2.0
"""A sandbox for programs that a model has written, and a judge that no program can reach.

**The wall** is the kernel's. A program runs in namespaces of its own (processes, mounts, network, shared memory,
names; and users, where it is not root who starts it), made by bubblewrap where that is installed and by `unshare`
elsewhere. Its root is read-only and holds the interpreter, the standard library and numpy; /tmp is in memory, small
and its own; there is no /proc, no network and no program to start. It belongs to no user of the machine, has no
capabilities, cannot get any, and fails in the system calls that have led out of sandboxes or keep memory that nothing
counts (libseccomp). Time, memory, files, processes and threads are limited, and all that it started ends with it. The
kernel's own memory is limited where a control group can be made. Elsewhere many processes can still fill some 0.6 GB
of it with pairs of sockets, and as much with mappings. Where memory runs out, it is taken from the program. Where the
system does not allow a sandbox, nothing is run.

**The judge** is another process in another such sandbox. It runs the tests. In them, the names that the program
defines stand for calls over a pipe: arguments go to the program as plain data, results come back as plain data, and
the judge's interpreter compares. Nothing that the program does to itself matters: it holds neither the tests nor the
expected values nor the verdict. It can only give right answers. See `inside/`.
"""

import collections
import contextlib
import functools
import importlib.util
import itertools
import json
import logging
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from .inside.names import helper_names


logger = logging.getLogger(__name__)

# Why tests could not be run, and with how many programs, since the harness last emptied it
UNUSABLE: collections.Counter[str] = collections.Counter()

WALL_SECONDS = 20
# Of all processes of a program together; one alone may have half of it
TOTAL_MEMORY_BYTES = 1 << 31
INSIDE = Path(__file__).with_name("inside")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


# In the process that becomes the sandbox, so that everything in there inherits it: where memory runs out, it is taken
# from here, and what the kernel keeps counts as well
FIRST = """
{ echo 1000 > /proc/self/oom_score_adj; [ "$0" = None ] || echo $$ > "$0/cgroup.procs"; } 2> /dev/null
exec "$@"
"""
# Nobody's, neither of systemd nor of containers (systemd.io/UIDS-GIDS): 64 for each process that starts sandboxes
FIRST_USER, USERS = 0x70000000, 64
counter = itertools.count()


class NoSandbox(ValueError):
    """This system cannot shut programs in."""


def available() -> "Wall":
    """The way in which this system shuts programs in.

    Raises:
        NoSandbox: if there is none, with what to do about it.
    """
    reasons = []
    for wall in (Wall("bubblewrap"), Wall("unshare")):
        reason = reason_against(wall)
        if reason is None:
            return wall
        reasons.append(f"{wall.name}: {reason}")
    raise NoSandbox(
        f"Generated code runs in a sandbox only, and this system allows none ({'; '.join(reasons)})."
        " Install bubblewrap (`apt-get install bubblewrap`), allow user namespaces (`sysctl"
        " kernel.unprivileged_userns_clone=1`, `sysctl kernel.apparmor_restrict_unprivileged_userns=0`), or run in a"
        " virtual machine or in a container that may make namespaces (`--security-opt seccomp=unconfined`)."
    )


@functools.lru_cache
def read_only() -> list[tuple[str, str]]:
    """What a program sees of this machine's files, and where: libraries, the interpreter, numpy, and `inside/`."""
    base = Path(sys.base_prefix)
    paths = [Path("/lib"), Path("/lib64"), Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/share/zoneinfo")]
    paths += [Path("/etc/ld.so.cache"), Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))]
    if base != Path("/usr"):
        paths += [base / "lib", base / "lib64"]
    paths = [path for path in paths if path.exists()]
    shown = [path for path in paths if not any(path.is_relative_to(other) for other in paths if other != path)]
    found = importlib.util.find_spec("numpy")
    packages = [] if found is None else [Path(found.origin).parent, Path(found.origin).parents[1] / "numpy.libs"]
    return [
        *((str(path), str(path)) for path in dict.fromkeys(shown)),
        *((str(path), f"/packages/{path.name}") for path in packages if path.is_dir()),
        (str(INSIDE), "/inside"),
    ]


@functools.lru_cache
def hidden() -> list[str]:
    """Packages that are installed beside the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    return [str(library / name) for name in ("site-packages", "dist-packages") if (library / name).is_dir()]


def users() -> list[int]:
    """Whom programs run as, by turns, each in its own sandbox. Root has users to give; others can only hide."""
    if os.geteuid() != 0:
        return []
    mapped = [int(line.split()[0]) + int(line.split()[2]) for line in open("/proc/self/uid_map")]
    if max(mapped) > 0x80000000:
        return [FIRST_USER + os.getpid() * USERS + number for number in range(USERS)]
    return [61184 + (os.getpid() * USERS + number) % 4336 for number in range(USERS)]  # as systemd's dynamic users


def next_user() -> int | None:
    ours = users()
    return ours[next(counter) % USERS] if ours else None


def control_groups() -> list[tuple[Path, dict[str, str]]]:
    """Folders in which a control group with a limit of memory may be made, and what to write there."""
    found = []
    own = [line.rstrip("\n").split(":", 2) for line in open("/proc/self/cgroup")]
    for line in open("/proc/self/mountinfo"):
        before, after = line.split(" - ")
        root, place = before.split()[3:5]
        kind, _, options = after.split()[:3]
        for _, controllers, path in own:
            if kind == "cgroup2" and not controllers:
                limits = {"memory.max": str(TOTAL_MEMORY_BYTES), "memory.swap.max": "0", "memory.oom.group": "1"}
            elif kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(","):
                limits = {"memory.limit_in_bytes": str(TOTAL_MEMORY_BYTES)}
            else:
                continue
            if Path(path).is_relative_to(root):
                folder = Path(place) / Path(path).relative_to(root)
                # The second version has no processes in a group that others are in, so they are side by side
                found += [(folder, limits)] + [(folder.parent, limits)] * (kind == "cgroup2" and path != root)
    return found


def make_group() -> Path | None:
    """A new control group with the limit of memory, where one can be made."""
    for parent, limits in control_groups():
        group = parent / f"attnres-sandbox-{os.getpid()}-{next(counter)}"
        try:
            group.mkdir()
            if (group / next(iter(limits))).exists() and os.access(parent / "cgroup.procs", os.W_OK):
                for file, value in limits.items():
                    with contextlib.suppress(FileNotFoundError):  # there is no swap to limit
                        (group / file).write_text(value)
                return group
        except OSError:
            pass
        remove_group(group)
    return None


def remove_group(group: Path | None):
    """When the last process in there is gone."""
    deadline = time.monotonic() + 2
    while group is not None and group.exists() and time.monotonic() < deadline:
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.01)


@dataclass(frozen=True)
class Wall:
    """A way to shut a program in: its name and what it takes to start one."""

    name: str

    def command(self) -> list[str]:
        """What starts the interpreter inside."""
        python = [str(Path(sys.executable).resolve()), "-I", "-S", "-B"]
        if self.name == "unshare":
            namespaces = ["--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child"]
            users = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
            return ["unshare", *users, *namespaces, *python, str(INSIDE)]
        users = ["--unshare-user", "--uid", "65534", "--gid", "65534"]
        if os.geteuid() == 0:
            users = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        users += ["--cap-add", "CAP_SYS_ADMIN"]  # to limit the number of files, and given up before the program starts
        namespaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        # It would take over the rights of the folders above, and those of root are root's alone
        above = sorted({str(parent) for _, target in read_only() for parent in Path(target).parents if parent.name})
        files = [part for folder in above for part in ("--perms", "755", "--dir", folder)]
        files += [part for source, target in read_only() for part in ("--ro-bind", source, target)]
        files += [part for path in hidden() for part in ("--tmpfs", path, "--remount-ro", path)]
        files += [
            "--size",
            str(1 << 26),
            "--perms",
            "1777",
            "--tmpfs",
            "/tmp",
            "--size",
            str(1 << 16),
            "--tmpfs",
            "/dev",
        ]
        files += ["--size", str(1 << 24), "--perms", "1777", "--tmpfs", "/dev/shm"]
        for device in ("null", "zero", "full", "random", "urandom"):
            files += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        files += ["--remount-ro", "/dev", "--remount-ro", "/"]
        once = ["--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"]
        return ["bwrap", *users, *namespaces, *once, *files, *python, "/inside"]

    @contextlib.contextmanager
    def start(self, role: str, text: str, descriptors: list[int], arguments: dict, stderr: int) -> Iterator:
        """A process in a new sandbox; everything in there is gone when the context is left."""
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as afterwards:
            group = make_group()
            afterwards.callback(remove_group, group)
            lifeline, end = os.pipe()
            stack.callback(os.close, lifeline)
            source = os.memfd_create("text")
            stack.callback(os.close, source)
            with os.fdopen(os.dup(source), "wb") as file:
                file.write(text.encode("utf-8", "surrogatepass"))
            os.lseek(source, 0, os.SEEK_SET)
            build = {"read_only": read_only()[:-1], "hidden": hidden()} if self.name == "unshare" else None
            options = {"role": role, "build": build, "user": next_user(), "text": source, "lifeline": lifeline}
            options |= {"descriptors": descriptors, "arguments": arguments}
            process = subprocess.Popen(
                ["/bin/sh", "-c", FIRST, str(group), *self.command(), json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                cwd="/",
                env=ENVIRONMENT,
                pass_fds=[lifeline, source, *descriptors],
                start_new_session=True,
            )
            afterwards.pop_all()
        try:
            yield process
        finally:
            os.close(end)  # process 1 in there sees this and ends, and with it everything
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            remove_group(group)


@functools.lru_cache
def reason_against(wall: Wall) -> str | None:
    """Why this cannot be used here: it cannot be started, or a trial found it weak."""
    if shutil.which(wall.command()[0], path=ENVIRONMENT["PATH"]) is None:
        return "not installed"
    reader, writer = os.pipe()
    with open(reader, "rb") as verdict, contextlib.ExitStack() as stack:
        with open(writer, "wb"):
            process = stack.enter_context(
                wall.start("trial", "", [writer], {"verdict": writer}, stderr=subprocess.PIPE)
            )
        word = verdict.read() if select.select([verdict], [], [], 60)[0] else b"no answer"
    if word == b"none":
        return None
    if word:
        return f"programs could {word.decode()}".replace("\n", ", ")
    return (process.stderr.read().decode(errors="replace").strip().splitlines() or ["it ended at once"])[-1]


def judged(program: str, tests: str) -> str:
    """As `run_program`, with tests that cannot be run noted for the report."""
    outcome = run_program(program, tests)
    kind, _, reason = outcome.partition(": ")
    if kind == "unusable":
        UNUSABLE[reason] += 1
    return outcome


def run_program(program: str, tests: str, wall_seconds: float = WALL_SECONDS) -> str:
    """Judge a program by tests: `passed`, `failed`, `timed out`, or `unusable: ` and why the tests cannot be run.

    Raises:
        NoSandbox: if this system allows none.
    """
    wall = available()
    try:
        helpers = sorted(helper_names(tests))
    except (SyntaxError, ValueError) as error:
        return f"unusable: {error}"
    with contextlib.ExitStack() as stack:
        verdict, writer = os.pipe()
        stack.callback(os.close, verdict)
        channels, processes = [], []
        with contextlib.ExitStack() as ours:
            ours.callback(os.close, writer)
            for names in [[], helpers] if helpers else [[]]:
                answers, answer_writer = os.pipe()
                requests, request_writer = os.pipe()
                for descriptor in (answers, answer_writer, requests, request_writer):
                    ours.callback(os.close, descriptor)
                channels.append((answers, request_writer))
                arguments = {"reader": requests, "writer": answer_writer, "helpers": names}
                processes.append(
                    stack.enter_context(
                        wall.start("program", program, [requests, answer_writer], arguments, subprocess.DEVNULL)
                    )
                )
            descriptors = [writer, *(descriptor for channel in channels for descriptor in channel)]
            arguments = {"channels": channels, "helpers": helpers, "verdict": writer}
            processes.append(
                stack.enter_context(wall.start("judge", tests, descriptors, arguments, subprocess.DEVNULL))
            )
        return wait_for_verdict(verdict, processes, wall_seconds)


def wait_for_verdict(verdict: int, processes: list[subprocess.Popen], wall_seconds: float) -> str:
    """What the judge says, if it says it in time and nobody takes too much memory."""
    deadline = time.monotonic() + wall_seconds
    while time.monotonic() < deadline:
        if select.select([verdict], [], [], min(0.25, max(0, deadline - time.monotonic())))[0]:
            return os.read(verdict, 1000).decode(errors="replace") or "failed"
        if memory_in_use(processes) > TOTAL_MEMORY_BYTES:
            return "failed"
    return "timed out"


def memory_in_use(processes: list[subprocess.Popen]) -> int:
    """Of these and of everything that they have started, in bytes."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    total += child.memory_info().rss
    return total


def pass_at_k(predictions: list[list[str]], references: list[str], k: list[int]) -> tuple[dict[str, float], list]:
    """Judge programs, several for each reference, and estimate how often one of k passes.

    Returns:
        `pass@k` by its name, for every k, and the outcomes.
    """
    outcomes = [[judged(program, tests) for program in programs] for programs, tests in zip(predictions, references)]
    for reason in {outcome for row in outcomes for outcome in row if outcome.startswith("unusable")}:
        logger.warning("Tests count as failed that could not be run: %s", reason.removeprefix("unusable: "))
    passed = [(len(row), row.count("passed")) for row in outcomes]
    scores = {
        f"pass@{k_}": sum(1 - math.comb(n - right, k_) / math.comb(n, k_) for n, right in passed) / len(passed)
        for k_ in k
        if all(n >= k_ for n, _ in passed)
    }
    return scores, outcomes
