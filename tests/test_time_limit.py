# SPDX-License-Identifier: Apache-2.0
"""`pytest --minutes`, with which CI runs the slow tests."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("minutes, outcome", [("-1", "skipped"), ("60", "passed")])
def test_what_is_left_out_is_counted(minutes, outcome):
    """In two processes, whose lists of tests have to agree: xdist runs nothing if they do not."""
    files = ["tests/test_time_limit.py", "tests/test_words.py"]
    run = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "--minutes", minutes, *files]
    result = subprocess.run(
        [*run, "-k", "test_words and how_to"], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert result.returncode == 0, result.stdout
    assert (f" tests were not run, as {minutes} minutes were over" in result.stdout) == (minutes == "-1")
    assert outcome in result.stdout.splitlines()[-1]
