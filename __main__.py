# SPDX-License-Identifier: Apache-2.0
"""What the `attnres` script runs: the program, quiet when it is interrupted, be it while packages are imported."""

import os
import signal
import sys
import threading


def main():
    """Run the program. After SIGINT it ends with one line and exit code 130, whatever became of the exception."""
    interrupted = False

    def interrupt(number, frame):
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def unraisable(event):
        if issubclass(event.exc_type, KeyboardInterrupt):  # lost in a destructor or the like: once more, a bit later
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            sys.__unraisablehook__(event)

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = unraisable
    try:
        from .cli import main as run

        run()
    except BaseException:  # an import in C, for one, makes an ImportError of it
        if not interrupted:
            raise
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done but for what Python does at its end


if __name__ == "__main__":
    main()
