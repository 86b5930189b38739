# SPDX-License-Identifier: Apache-2.0
"""What the `attnres` script runs: the program, quiet when it is interrupted, be it while packages are imported."""

import _imp
import os
import signal
import sys
import threading
import time


def is_initialising_extension(frame) -> bool:
    """Whether Python code is run by a module in C that is being imported: it may not survive an exception.

    nanobind, which Triton is bound by, ends the process with a core dump.
    """
    while frame is not None:
        if frame.f_code.co_name == "_call_with_frames_removed":  # of importlib, around what it calls
            if frame.f_locals["f"] in (_imp.create_dynamic, _imp.exec_dynamic):
                return True
        frame = frame.f_back
    return False


def refuse_another_package():
    """End the program if `__init__.py` beside this file is not ours: another distribution has replaced it."""
    import attnres

    if "AttnResConfig" not in getattr(attnres, "__all__", ()):
        from .utils.installation import mixed_up

        folder = os.path.dirname(os.path.abspath(__file__))
        print(f"Error: {mixed_up(folder, 'its `__init__.py` is of something else')}", file=sys.stderr)
        sys.exit(1)


def main():
    """Run the program. After SIGINT it ends with one line and exit code 130, whatever became of the exception."""
    interrupted = -1.0  # when, in seconds
    ending = False
    waiting = False

    def interrupt_again():
        nonlocal waiting
        waiting = False
        os.kill(os.getpid(), signal.SIGINT)

    def interrupt_later():
        nonlocal waiting
        if not waiting:
            waiting = True
            threading.Timer(0.05, interrupt_again).start()

    def interrupt(number, frame):
        nonlocal interrupted
        again = interrupted >= 0 and time.monotonic() < interrupted + 1  # a key held down is pressed once
        if ending or again:
            return
        if is_initialising_extension(frame):
            interrupt_later()
        else:
            interrupted = time.monotonic()
            raise KeyboardInterrupt

    def unraisable(event):
        nonlocal interrupted
        if ending:  # one more signal while it is switched off
            return
        if issubclass(event.exc_type, KeyboardInterrupt):  # lost in a destructor or the like: once more, a bit later
            interrupted = 0.0
            interrupt_later()
        else:
            sys.__unraisablehook__(event)

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = unraisable
    try:
        refuse_another_package()
        from .cli import main as run

        run()
        ending = True
    except BaseException as error:  # an import in C, for one, makes an ImportError of it
        ending = True
        if interrupted < 0:
            raise
        if not getattr(error, "is_said", False):
            print("Interrupted.", file=sys.stderr)
        eval("0")  # or Python dies of SIGINT if the last one that it evaluated, a dataclass say, was interrupted
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done but for what Python does at its end


if __name__ == "__main__":
    main()
