# SPDX-License-Identifier: Apache-2.0
"""What the `attnres` script runs: the program, quiet when it is interrupted, be it while packages are imported."""

import os
import signal
import sys
import threading
import time


def main():
    """Run the program. After SIGINT it ends with one line and exit code 130, whatever became of the exception."""
    interrupted = -1.0  # when, in seconds
    ending = False

    def interrupt(number, frame):
        nonlocal interrupted
        again = interrupted >= 0 and time.monotonic() < interrupted + 1  # a key held down is pressed once
        if not (ending or again):
            interrupted = time.monotonic()
            raise KeyboardInterrupt

    def unraisable(event):
        nonlocal interrupted
        if ending:  # one more signal while it is switched off
            return
        if issubclass(event.exc_type, KeyboardInterrupt):  # lost in a destructor or the like: once more, a bit later
            interrupted = 0.0
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            sys.__unraisablehook__(event)

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = unraisable
    try:
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
