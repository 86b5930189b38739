# Copyright 2026 The attnres authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""A sandbox for programs that a model has written.

A program runs in a process of its own, in a new session and an own temporary folder, under limits of CPU time, memory,
file size and open files and a wall clock; where the system allows it (`unshare`), in namespaces without network and
without other processes. Inside, `sandboxed.py` ends the interpreter at the first attempt to reach out: to start a
process or a signal, to open a socket, to write outside of the folder, to read what is not the interpreter's.

Programs have the standard library and nothing else. That keeps accidents and mischief away. It is no wall against a
determined attacker: for those there are containers.
"""

import functools
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


WALL_SECONDS = 10
CPU_SECONDS = 8
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 24
NAMESPACES = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")


@functools.lru_cache
def namespaces() -> tuple[str, ...]:
    """The command that puts a program into namespaces of its own; empty where the system does not allow it."""
    if shutil.which("unshare") is None:
        return ()
    allowed = subprocess.run([*NAMESPACES, "true"], capture_output=True, timeout=30).returncode == 0
    return NAMESPACES if allowed else ()


def run_program(program: str, wall_seconds: float = WALL_SECONDS) -> str:
    """Run a program and tell how it ended: `passed`, `failed` or `timed out`.

    Passed means that it ran to its end; an exit on the way, even a successful one, is a failure.
    """
    # Only who got to the end of the program knows what to say
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="attnres-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "program.py")
        path.write_text(program, encoding="utf-8", errors="surrogatepass")
        process = subprocess.Popen(
            [*namespaces(), sys.executable, "-I", str(Path(__file__).with_name("sandboxed.py")), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            start_new_session=True,
            preexec_fn=limit_resources,
        )
        try:
            output, _ = process.communicate(token.encode(), timeout=wall_seconds)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            kill(process)
    return "passed" if output == token.encode() else "failed"


def limit_resources():
    """What the program may use; runs in the new process before it becomes the interpreter."""
    for what, most in (
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def kill(process: subprocess.Popen):
    """The process and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    process.stdout.close()
