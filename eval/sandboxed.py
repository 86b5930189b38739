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
"""Runs a program and says the word from standard input when it got to its end. See `sandbox.py`, which starts it.

An audit hook sees every attempt of the interpreter to reach the system and cannot be taken off again.
"""

import os
import sys


def forbid(folder: str):
    # What the interpreter itself reads: its library and the system's
    readable = tuple(
        {os.path.realpath(path) + os.sep for path in (folder, sys.prefix, sys.base_prefix, "/usr", "/lib")}
    )
    devices = {"/dev/null", "/dev/urandom", "/dev/random", "/dev/zero"}
    own = os.path.realpath(folder) + os.sep
    forbidden = (
        *("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "os.system", "os.kill", "os.killpg"),
        *("subprocess.", "socket.", "ctypes.", "pty.", "signal.pthread_kill", "syslog.", "os.putenv", "os.chown"),
        *("os.chflags", "os.lchown", "os.setxattr", "resource.setrlimit", "resource.prlimit", "sys.addaudithook"),
    )
    changing = (
        *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod"),
        *("os.utime", "os.chdir", "shutil."),
    )
    looking = ("os.listdir", "os.scandir", "glob.", "pathlib.Path.glob")

    def inside(path, roots) -> bool:
        if isinstance(path, int):
            return True
        path = os.path.realpath(os.fsdecode(path))
        return path in devices or (path + os.sep).startswith(roots)

    def hook(event: str, arguments: tuple):
        if event.startswith(forbidden):
            os._exit(1)
        if event == "open":
            path, _, flags = arguments
            writes = flags is not None and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            if path is not None and not inside(path, own if writes else readable):
                os._exit(1)
        elif event.startswith(changing):
            if not all(inside(path, own) for path in arguments if isinstance(path, (str, bytes, os.PathLike))):
                os._exit(1)
        elif event.startswith(looking):
            path = arguments[0] if arguments and arguments[0] is not None else "."
            if not inside(path, readable):
                os._exit(1)

    sys.addaudithook(hook)


def main():
    token = sys.stdin.buffer.read()
    path = sys.argv[1]
    say = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the program prints goes nowhere
    with open(path, encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    code = compile(source, "program.py", "exec")
    forbid(os.path.dirname(path))
    try:
        exec(code, {"__name__": "__main__"})
    except BaseException:  # an exit as well: it did not get to its end
        os._exit(1)
    os.write(say, token)
    os._exit(0)


main()
