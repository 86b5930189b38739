# SPDX-License-Identifier: Apache-2.0
"""The side of the program: runs it, then does what the judge asks of its names."""

import os
import sys
import types

from protocol import ROOT, Peer, Violation


PATH = "/tmp/program.py"
NAME = "program"  # and not `__main__`: what a script does at its end is no part of the answer


def run(source: str, reader: int, writer: int, helpers: list[str]):
    """Run a program to its end and serve the judge until it hangs up. With helpers, only what the prompt defines."""
    try:
        if helpers:
            from names import text_before_completion

            source = text_before_completion(source, set(helpers))
        with open(PATH, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(source)
        code = compile(source, PATH, "exec", dont_inherit=True)
        module = types.ModuleType(NAME)
        module.__file__, module.__builtins__ = PATH, __builtins__
        sys.modules[NAME] = sys.modules["__main__"] = module
        sys.argv, sys.orig_argv = [PATH], [sys.executable, PATH]
        try:
            exec(code, module.__dict__)
        except SystemExit as end:  # as `unittest.main` ends, by whose account all is well or not
            if end.code not in (None, 0, False):
                raise
        peer = Peer(reader, writer, is_judge=False)
        peer.held[ROOT] = module.__dict__
        while True:
            peer.serve(peer.receive())
    except (Violation, OSError):
        os._exit(0)  # the judge has seen enough
    except BaseException:
        os._exit(1)
