"""The study's table and figures come from its committed results."""

import shutil
import subprocess
import sys
from pathlib import Path


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_report_rebuilds(tmp_path):
    shutil.copytree(BENCHMARKS / "study", tmp_path / "study")
    for name in ("table.md", "differences.png", "differences.svg"):
        (tmp_path / "study" / name).unlink()
    command = [sys.executable, str(BENCHMARKS / "study.py"), "report", "--results", str(tmp_path / "study")]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "study/table.md").read_text() == (BENCHMARKS / "study/table.md").read_text()
    assert (tmp_path / "study/differences.png").exists() and (tmp_path / "study/differences.svg").exists()
