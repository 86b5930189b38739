# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Programs that want to be scored as right without being right, or to get out of their sandbox.

All cheats are given the tests `TESTS`, and none defines an `add` that adds. `{name}` is filled in by the test.
"""

TESTS = """
def check(candidate):
    assert candidate(2, 3) == 5
    assert candidate(-7, 7) == 0
    assert candidate([1], [2]) == [1, 2]
    assert abs(candidate(0.5, 0.25) - 0.75) < 1e-9

check(add)
"""

WRONG = "def add(a, b):\n    return None\n"

# What has a method or an operator that agrees to everything
YES = """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __le__(self, other): return True
    def __gt__(self, other): return True
    def __ge__(self, other): return True
    def __sub__(self, other): return self
    def __rsub__(self, other): return self
    def __abs__(self): return 0
    def __bool__(self): return True
    def __hash__(self): return 0
    def __contains__(self, item): return True
    def __getattr__(self, name): return lambda *args: True
"""

CHEATS = {
    # --- ends the process before the tests, or says what they would say
    "exit": "import sys; sys.exit(0)",
    "hard exit": "import os; os._exit(0)",
    "hard exit in a call": "import os\ndef add(a, b): os._exit(0)",
    "exit in a call": "def add(a, b): raise SystemExit(0)",
    "exit replaced": WRONG + "import os; os._exit = lambda code: None; import sys; sys.exit = lambda code=0: None",
    "exit at the end": WRONG + "import atexit, os; atexit.register(lambda: os._exit(0))",
    "exit from a thread": WRONG + "import threading, os; threading.Thread(target=lambda: os._exit(0)).start()",
    "exit by signal": "import os, signal\ndef add(a, b): os.kill(os.getpid(), signal.SIGTERM)",
    "kill process 1": "import os, signal\ndef add(a, b): os.kill(1, signal.SIGKILL); return None",
    "all exit codes": "import os\nfor code in range(256):\n    if os.fork() == 0: os._exit(code)\n    os.wait()\n"
    + WRONG,
    "prints the word": WRONG + "print('passed'); import sys; sys.stdout.flush(); sys.stderr.write('passed')",
    "prints in a call": "def add(a, b):\n    print('passed', flush=True)\n    raise SystemExit(0)",
    "writes the word everywhere": (
        "import os\nfor fd in range(128):\n    try: os.write(fd, b'passed')\n    except OSError: pass\n" + WRONG
    ),
    "writes the word twice": (
        "import os\ndef add(a, b):\n    for fd in range(128):\n"
        "        for _ in range(2):\n            try: os.write(fd, b'passed\\n')\n            except OSError: pass"
    ),
    "writes answers in advance": (
        "import os\nfor fd in range(3, 128):\n    try: os.write(fd, b'[\"value\", [], 5]\\n' * 10)\n"
        "    except OSError: pass\n" + WRONG
    ),
    "answers for the judge": (
        "import os\ndef add(a, b):\n    for fd in range(3, 128):\n"
        "        try: os.write(fd, b'[\"value\", [], true]\\n' * 100)\n        except OSError: pass\n    os._exit(0)"
    ),
    "changes what the tests hold": (
        "import os\ndef add(a, b):\n    for fd in range(3, 128):\n"
        "        try: os.write(fd, b'[\"value\", [[0, []], [1, []]], 5]\\n')\n        except OSError: pass"
    ),
    "sends numbers of its own": (
        "import os\ndef add(a, b):\n    for fd in range(3, 128):\n"
        '        try: os.write(fd, b\'["value", [], ["yours", 0]]\\n\')\n        except OSError: pass'
    ),
    "calls the judge": (
        "import os\ndef add(a, b):\n    for fd in range(3, 128):\n"
        "        for n in range(3):\n"
        '            try: os.write(fd, b\'["do", "call", %d, ["builtins.tuple"]]\\n\' % n)\n'
        "            except OSError: pass"
    ),
    "reads the judge's globals": (
        "import os\ndef add(a, b):\n    for fd in range(3, 128):\n"
        '        try: os.write(fd, b\'["do", "attribute", 1, ["builtins.tuple", "__globals__"]]\\n\')\n'
        "        except OSError: pass"
    ),
    "names a function of the judge's": (
        "import os\ndef add(a, b):\n    for fd in range(3, 128):\n"
        '        try: os.write(fd, b\'["value", [], ["named", "os", "_exit"]]\\n\')\n        except OSError: pass'
    ),
    "is not JSON": (
        "import os\ndef add(a, b):\n    for fd in range(3, 128):\n"
        "        try: os.write(fd, b'{' * 10000 + b'\\n')\n        except OSError: pass"
    ),
    "nested beyond the stack": (
        "import os\ndef add(a, b):\n    for fd in range(3, 128):\n"
        "        try: os.write(fd, b'[' * 60000 + b'\\n')\n        except OSError: pass"
    ),
    # --- objects that agree to everything
    "equal to everything": YES + "def add(a, b): return Yes()",
    "number equal to everything": "class Yes(int):\n    __eq__ = lambda *a: True\ndef add(a, b): return Yes(1)",
    "text equal to everything": "class Yes(str):\n    __eq__ = lambda *a: True\ndef add(a, b): return Yes('')",
    "list equal to everything": "class Yes(list):\n    __eq__ = lambda *a: True\ndef add(a, b): return Yes([1])",
    "float equal to everything": (
        "class Yes(float):\n    __eq__ = __lt__ = lambda *a: True\n    __sub__ = __abs__ = lambda s, *a: s\n"
        "def add(a, b): return Yes(1)"
    ),
    "metaclass equal to everything": (
        "class Meta(type):\n    __eq__ = lambda *a: True\n    __hash__ = lambda s: 0\n"
        "class Yes(metaclass=Meta): pass\ndef add(a, b): return Yes"
    ),
    "mock": "from unittest import mock\ndef add(a, b): return mock.ANY",
    "mocks": "from unittest.mock import MagicMock\ndef add(a, b): return MagicMock(__eq__=lambda *a: True)",
    "reflected comparison": YES + "def add(a, b): return [Yes(), Yes()]",
    "exception equal to everything": YES + "class E(Yes, Exception): pass\ndef add(a, b): return E()",
    "not a number": "def add(a, b): return float('nan')",
    "claims to be an int": YES + "Yes.__class__ = property(lambda self: int)\ndef add(a, b): return Yes()",
    "named like a plain type": (
        "class int(object):\n    __module__ = 'builtins'\n    __qualname__ = 'int'\n    __eq__ = lambda *a: True\n"
        "def add(a, b): return int()"
    ),
    # --- replaces what the tests use
    "abs replaced": WRONG + "def abs(x): return 0",
    "built-in functions replaced": (
        WRONG + "import builtins\nfor name in ('abs', 'len', 'all', 'any', 'isinstance', 'sorted', 'round'):\n"
        "    setattr(builtins, name, lambda *a, **k: 0)"
    ),
    "check replaced": WRONG + "def check(candidate): pass",
    "check hidden": WRONG + "import builtins\nbuiltins.check = lambda candidate: None",
    "AssertionError replaced": (
        WRONG + "import builtins\nclass Fine(Exception): pass\nbuiltins.AssertionError = Fine\nAssertionError = Fine"
    ),
    "assertions off": WRONG + "import sys, ctypes\n__debug__x = False\nsys.flags = None",
    "compile replaced": WRONG + "import builtins\nbuiltins.compile = builtins.exec = lambda *a, **k: None",
    "tests swallowed by a string": WRONG + "text = '''",
    "tests swallowed by a bracket": WRONG + "text = (",
    "tests swallowed by a line": WRONG + "x = 1 \\",
    "tests swallowed by an if": WRONG + "if False:\n  pass\n  ",
    "tests in a generator": WRONG + "def rest():\n    yield\n",
    "hook for exceptions": WRONG + "import sys; sys.excepthook = lambda *a: __import__('os')._exit(0)",
    "hook for traces": WRONG + "import sys; sys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)",
    "import replaced": WRONG + "import builtins; builtins.__import__ = lambda *a, **k: None",
    "modules replaced": WRONG + "import sys\nfor n in list(sys.modules): sys.modules[n] = None",
    "os of main replaced": WRONG
    + "import sys, types\nsys.modules['__main__'].os = types.SimpleNamespace(_exit=print)",
    "json replaced": WRONG + "import json; json.dumps = lambda *a, **k: '[\"value\", [], 5]'",
    "the server replaced": (
        WRONG + "import sys\nfor module in list(sys.modules.values()):\n    if hasattr(module, 'Peer'):\n"
        "        module.Peer.encode = lambda self, value, table: 5\n"
        "        module.plain_type = lambda kind: 'builtins.int'"
    ),
    "judge imported": (
        WRONG + "import sys\nfor m in list(sys.modules.values()):\n    run = getattr(m, 'run', None)\n"
        "    if run and 'judge' in getattr(m, '__name__', ''):\n"
        "        for fd in range(3, 128):\n            try: run('', [], [], fd)\n            except OSError: pass"
    ),
    # --- looks for the tests, the expected values or a token
    "frames": (
        "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n"
        "            if isinstance(value, str) and 'assert cand' + 'idate' in value:\n"
        "                return a + b\n        frame = frame.f_back"
    ),
    "traceback": (
        "def add(a, b):\n    try: 1 / 0\n    except Exception as error:\n        frame = error.__traceback__.tb_frame\n"
        "        while frame:\n            if 'candidate' in frame.f_locals: return a + b\n"
        "            frame = frame.f_back"
    ),
    "thread that looks": (
        "import sys, threading, time\nseen = []\ndef look():\n    while True:\n"
        "        for frame in sys._current_frames().values():\n            while frame:\n"
        "                if 'candidate' in frame.f_locals: seen.append(frame)\n                frame = frame.f_back\n"
        "        time.sleep(0.001)\n"
        "threading.Thread(target=look, daemon=True).start()\ndef add(a, b): return a + b if seen else None"
    ),
    "garbage": (
        "import gc\ndef add(a, b):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, dict) and 'check' in o and 'candidate' in str(o.get('check')): return a + b"
    ),
    "garbage as text": (
        "import gc\ndef add(a, b):\n    text = ''.join(('candidate(2', ', 3) == 5'))\n    for o in gc.get_objects():\n"
        "        if isinstance(o, (list, tuple)) and any(isinstance(i, str) and text in i for i in o): return a + b"
    ),
    "arguments of the process": (
        "import sys\ndef add(a, b):\n    if any('candidate' in text for text in sys.argv + sys.orig_argv): return a + b"
    ),
    "files of the process": (
        "import os\ndef add(a, b):\n    for root, _, names in os.walk('/tmp'):\n        for name in names:\n"
        "            if 'candidate' + '(2' in open(os.path.join(root, name)).read(): return a + b"
    ),
    "open files": (
        "import os\ndef add(a, b):\n    for fd in range(3, 128):\n        try:\n            os.lseek(fd, 0, 0)\n"
        "            if b'candidate' + b'(2' in os.read(fd, 10000): return a + b\n        except OSError: pass"
    ),
    "memory of the parent": (
        "import os\ndef add(a, b):\n    for pid in (1, os.getppid()):\n        try:\n"
        "            open(f'/proc/{pid}/mem', 'rb'); return a + b\n        except OSError: pass"
    ),
    "environment": "import os\ndef add(a, b):\n    if 'add' in str(os.environ): return a + b",
    "inspects its callers": (
        "import inspect\ndef add(a, b):\n    for f in inspect.stack():\n"
        "        if f.code_context and 'candidate' in ''.join(f.code_context): return a + b"
    ),
    "warns with the caller": ("import linecache\ndef add(a, b):\n    if linecache.getline('tests', 3): return a + b"),
    # --- slow or endless
    "endless result": "import itertools\ndef add(a, b): return itertools.count()",
    "huge result": "def add(a, b): return 'x' * (1 << 27)",
    "raises AssertionError": "def add(a, b): raise AssertionError",
    "raises a made-up exception": "class E(BaseException): pass\ndef add(a, b): raise E",
    "raises what iteration raises": "def add(a, b): raise StopIteration",
    "generator exit": "def add(a, b): raise GeneratorExit",
}

# What the tests of HumanEval/32, /38 and /50 take from the prompt, defined anew by the completion
HELPERS = {
    "HumanEval/32": "    return 0.0\n\ndef poly(xs, x):\n    return 0\n",
    "HumanEval/38": "    return s\n\ndef encode_cyclic(s):\n    return s\n",
    "HumanEval/50": "    return s\n\ndef encode_shift(s):\n    return s\n",
}

# Tests, and a program that is wrong for them
CHEATS_WITH_TESTS = {
    "method of an answer": (
        "assert words('a') and words('ab').startswith('ab')",
        YES + "def words(x): return Yes()",
    ),
    "membership": ("assert 5 in values(3)", YES + "def values(x): return Yes()"),
    "order": ("assert value(3) < 5", YES + "def value(x): return Yes()"),
    "subset": ("assert letters('ab').issubset({'a', 'b'})", YES + "def letters(x): return Yes()"),
    "difference": ("assert abs(value(3) - 5) < 1e-6", YES + "def value(x): return Yes()"),
    "set": ("assert set(values(3)) == {1, 2}", YES + "def values(x): return [Yes(), Yes()]"),
    "called sum": (
        "assert sum(10, 15) == 25 and abs(sum(1, 1)) == 2",
        "def sum(a, b): return 3\ndef abs(x): return 2",
    ),
    "import under another name": (
        "assert math.isclose(root(4), 2.0)",
        "import types\nmath = types.ModuleType('math')\nmath.isclose = lambda *a: True\ndef root(x): return 7",
    ),
    "class of an answer": (
        "assert isinstance(value(3), int) and value(3) == 5",
        YES + "Yes.__class__ = property(lambda self: int)\ndef value(x): return Yes()",
    ),
    "helper of its own process": (
        "assert list(map(double, [1, 2])) == [2, 4]",
        YES + "def double(x): return Yes()",
    ),
    "class for a module": (
        "assert math.isclose(root(4), 2.0)",
        "class math:\n    isclose = staticmethod(lambda *a: True)\ndef root(x): return 7",
    ),
    "object for numpy": (
        "assert np.allclose(root(4), 2.0)",
        "from types import SimpleNamespace\nnp = SimpleNamespace(allclose=lambda *a: True)\ndef root(x): return 7",
    ),
    "own isclose": (
        "assert isclose(root(4), 2.0)",
        "def isclose(*a): return True\ndef root(x): return 7",
    ),
    "own Counter": (
        "assert Counter(letters('aab')) == Counter('aab')",
        "def Counter(x): return 7\ndef letters(x): return 7",
    ),
    "own pi": ("assert area(2) == 4 * pi", "pi = 0\ndef area(x): return 0"),
    "named tuple with a method": (
        "assert words('ab').startswith('ab')",
        "from typing import NamedTuple\nclass Yes(NamedTuple):\n    x: int = 1\n"
        "    def startswith(self, other): return True\ndef words(x): return Yes()",
    ),
    "named tuple with a function": (
        "assert words('ab').startswith('ab')",
        "import collections\nYes = collections.namedtuple('Yes', 'startswith')\n"
        "def words(x): return Yes(lambda other: True)",
    ),
    "named tuple of a class under test": (
        "assert len(Word('ab')) == 1 and Word('ab').text().startswith('ab')",
        "from typing import NamedTuple\nclass Word(NamedTuple):\n    x: int = 1\n"
        "    def startswith(self, other): return True\n    def text(self): return self",
    ),
    "named tuple with other fields than before": (
        "assert words('a')[0] == 1 and words('ab').startswith('ab')",
        "import sys\nPeer = sys.modules['protocol'].Peer\nencode = Peer.encode\ndef lie(self, value, table):\n"
        "    self.held[99] = lambda *a: True\n"
        "    if value == 'a': return ['record', 7, 'A', ['startswith'], 1]\n"
        "    if value == 'ab': return ['record', 7, 'A', ['x'], ['mine', 99, 'function', None]]\n"
        "    return encode(self, value, table)\nPeer.encode = lie\ndef words(x): return x",
    ),
    "array that agrees": (
        "assert (values(3) == np.array([1, 2])).all()",
        "import numpy as np\nclass Yes(np.ndarray):\n    __eq__ = lambda *a: Yes((1,))\n    all = lambda s: True\n"
        "def values(x): return Yes((2,), buffer=np.zeros(2))",
    ),
    "array for a list": (
        "assert values(3) == [1, 2]",
        "import numpy as np\ndef values(x): return np.array([1, 2])",
    ),
    "view equal to everything": (
        "assert keys(3) == {1: 2}.keys()",
        "class Yes(dict):\n    __eq__ = lambda *a: True\ndef keys(x): return Yes({3: 4}).keys()",
    ),
    "ends well": ("assert f(1) == 2", "import sys\ndef f(x): return 1\nsys.exit(0)"),
    "waits for the tests to be thrown": ("assert f(1) == 2\n", "def f(x):\n    import time\n    time.sleep(100)"),
    "equal handles": ("a = f(1)\nb = f(2)\nassert a == b and a == 3", YES + "y = Yes()\ndef f(x): return y"),
    "changes its argument": (
        "a = [3, 1]\nassert order(a) == [1, 3] and a == [3, 1]",
        "def order(a): a.sort(); return a",
    ),
    "returns its argument": (
        "a = [3, 1]\nb = order(a)\nassert b is not a and b == [1, 3]",
        "def order(a): a.sort(); return a",
    ),
}

WORD = (
    YES
    + """
class Word:
    def __init__(self, text=""): pass
    def text(self): return Yes()
    def itself(self): return self
    def __len__(self): return 1
    startswith = issubset = __add__ = __lt__ = __getitem__ = lambda *a: True
    get = staticmethod(lambda *a: True)
    __eq__ = lambda *a: True
    __hash__ = lambda s: 0
"""
)
# Tests that ask a program's objects for what these can say of everything, or that hand over what cannot cross: they are
# not run to their end
REFUSED = {
    "method of an answer of a class": ("assert len(Word()) == 1 and Word().text().startswith('ab')", WORD),
    "method of a set": ("assert len(Word()) == 1 and Word().text().issubset({1})", WORD),
    "method of a dict": ("assert len(Word()) == 1 and Word().text().get('a')", WORD),
    "method of what returns itself": ("assert Word('ab').itself().get('a')", WORD),
    "method that says yes": ("assert Word('ab').startswith('ab')", WORD),
    "class for a function": ("assert words('ab').startswith('ab')", WORD.replace("Word", "words")),
    "class for a function with a name like a class": (
        "assert Words('ab').issubset({1})",
        WORD.replace("Word", "Words"),
    ),
    "equal objects": ("assert Word('ab') == Word('ab')", WORD),
    "unequal objects": ("assert Word('ab') != Word('b')", WORD),
    "equal answers": ("assert Word('ab').text() == Word('cd')", WORD),
    "equal in a list": ("assert [Word('ab')] == [Word('ab')]", WORD),
    "equal in a set": ("assert {Word('ab')} == {Word('ab')}", WORD),
    "equal objects of no class of the tests": ("assert f(1) == f(2)", YES + "def f(x): return Yes()"),
    "dataclasses": (
        "assert Point(1, 2).twice() == Point(2, 4)",
        "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: int\n"
        "    def twice(self): return Point(2 * self.x, 2 * self.y)",
    ),
    "sum": ("assert Word('ab') + Word('cd')", WORD),
    "order": ("assert Word('ab') < Word('cd')", WORD),
    "reflected order": ("assert 5 > Word('cd')", WORD),
    "class of the tests": ("class Sub(Word): pass\nassert Sub()", WORD),
    "object of the tests": ("class Own: pass\nassert f(Own()) == 1", "def f(x): return 1"),
    "caught": ("assert len(Word()) == 1\ntry:\n    Word() == Word()\nexcept BaseException: pass", WORD),
}

# --- ways out: `attempt` returns something true if it got out. What a test has put outside is named in `OUTSIDE`

WAY_OUT = """
import ctypes, errno, os, platform, signal, socket, sys, threading, time
{outside}
libc = ctypes.CDLL(None, use_errno=True)

def call(x86_64, aarch64, *arguments):
    result = libc.syscall({{"x86_64": x86_64, "aarch64": aarch64}}[platform.machine()], *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return True

def did(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return True

def attempt():
{body}

def got_out():
    try:
        return bool(attempt())
    except (OSError, ImportError, MemoryError, RuntimeError, ValueError):
        return False
    except Exception as error:
        return False if type(error).__module__ == "sqlite3" else repr(error)
"""

WAYS_OUT = {
    # --- files
    "read a file": "return open(FILE).read()",
    "write a file": "return open(FILE, 'w').write('x')",
    "append to a file": "return os.open(FILE, os.O_WRONLY | os.O_APPEND)",
    "new file beside": "return open(FOLDER + '/new', 'w')",
    "folder by descriptor": "return os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=os.open(FOLDER, os.O_RDONLY))",
    "path by C": "return did(libc.open(FILE.encode(), 0))",
    "symbolic link": "os.symlink(FILE, '/tmp/link'); return open('/tmp/link').read()",
    "hard link": "os.link(FILE, '/tmp/hard'); return True",
    "rename": "os.rename(FILE, '/tmp/mine'); return True",
    "remove": "os.remove(FILE); return True",
    "truncate": "os.truncate(FILE, 0); return True",
    "realpath replaced": "os.path.realpath = lambda path, **k: '/tmp/x'; return open(FILE).read()",
    "up from /tmp": "return open('/tmp/../../../../../..' + FILE).read()",
    "root again and again": (
        "os.mkdir('/tmp/jail'); fd = os.open('/', os.O_RDONLY); os.chroot('/tmp/jail'); os.fchdir(fd)\n"
        "for _ in range(50): os.chdir('..')\nos.chroot('.'); return True"
    ),
    "sqlite": "import sqlite3; sqlite3.connect(FOLDER + '/x.db').execute('create table t (x)'); return True",
    "sqlite attached": "import sqlite3; sqlite3.connect(':memory:').execute(f'attach {FILE!r} as a'); return True",
    "fifo outside": "os.mkfifo(FOLDER + '/fifo'); return True",
    "device": "os.mknod('/tmp/sda', 0o60600, os.makedev(8, 0)); return True",
    "device of memory": "return open('/dev/mem', 'rb')",
    "kernel messages": "return open('/dev/kmsg', 'rb')",
    "terminal": "return open('/dev/tty', 'rb')",
    "home": "return [n for n in os.listdir(HOME) if not sys.base_prefix.startswith(HOME + '/' + n)]",
    "folder of the tests": "return os.listdir(FOLDER)",
    "passwords": "return open('/etc/passwd').read() or open('/etc/shadow').read()",
    "keys": "return [n for n in os.listdir(HOME + '/.ssh')]",
    "the library": "return open(os.__file__, 'a')",
    "beside the library": "return open(os.path.dirname(os.__file__) + '/x.py', 'w')",
    "the judge": "return open('/inside/judge.py', 'a')",
    "packages beside the library": "return any(os.listdir(p) for p in sys.path if p.endswith('-packages'))",
    "programs": "return os.execv('/bin/sh', ['sh', '-c', 'true'])",
    "shell": "import subprocess; return subprocess.run('cat ' + FILE, shell=True).returncode == 0",
    "core pattern": "return open('/proc/sys/kernel/core_pattern', 'w')",
    "sysrq": "return open('/proc/sysrq-trigger', 'w')",
    "control groups": "return os.listdir('/sys/fs/cgroup')",
    "root of process 1": "return os.listdir('/proc/1/root')",
    "own descriptors": "return os.listdir('/proc/self/fd')",
    "environment of the parent": "return open('/proc/1/environ', 'rb').read()",
    "own environment": "return SECRET in str(os.environ)",
    "inherited descriptors": (
        "import stat\nfor fd in range(128):\n    try: mode = os.fstat(fd).st_mode\n    except OSError: continue\n"
        "    if not stat.S_ISFIFO(mode) and not (stat.S_ISCHR(mode) and os.fstat(fd).st_rdev == os.makedev(1, 3)):\n"
        "        return True"
    ),
    "up from a descriptor": (
        "for fd in range(128):\n    try: return os.open('../' * 20 + FILE, os.O_RDONLY, dir_fd=fd)\n"
        "    except OSError: pass"
    ),
    "handle of a file": "return call(303, 264, -100, b'/', ctypes.create_string_buffer(128), ctypes.c_int(), 0)",
    "open by handle": "return call(304, 265, -100, ctypes.create_string_buffer(128), 0)",
    # --- mounts and namespaces
    "mount memory": "return did(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None))",
    "mount processes": "return did(libc.mount(b'proc', b'/tmp', b'proc', 0, None))",
    "writable again": "return did(libc.mount(None, b'/', None, 0x20 | 0x1000, None))",
    "unmount": "return did(libc.umount2(b'/tmp', 2))",
    "unmount the root": "return did(libc.umount2(b'/', 2))",
    "chroot": "os.chroot('/tmp'); return True",
    "pivot": "return did(libc.pivot_root(b'/', b'/tmp'))",
    "new mount calls": "return call(430, 430, b'tmpfs', 0)",
    "copy of the tree": "return call(428, 428, -100, b'/', 1)",
    "users": "return did(libc.unshare(0x10000000))",
    "mounts": "return did(libc.unshare(0x20000))",
    "networks": "return did(libc.unshare(0x40000000))",
    "processes": "return did(libc.unshare(0x20000000))",
    "join namespaces": "return did(libc.setns(os.pidfd_open(1), 0x10000000))",
    "clone with users": "return call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "return call(435, 435, ctypes.create_string_buffer(88), 88)",
    # --- processes
    "signal the test": "os.kill(PID, 0); return True",
    "signal by descriptor": "os.pidfd_open(PID); return True",
    "trace": "return did(libc.ptrace(16, 1, 0, 0))",
    "memory of process 1": "return call(310, 270, 1, ctypes.create_string_buffer(16), 1, 0, 0, 0)",
    "descriptor of process 1": "return call(438, 438, os.pidfd_open(1), 0, 0)",
    "priority": "os.nice(-5); return True",
    "real time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); return True",
    "limits": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (9999, 9999)); return True",
    "limits of the test": ("import resource; resource.prlimit(PID, resource.RLIMIT_NOFILE, (1, 1)); return True"),
    "root": "os.setuid(0); return os.getuid() != 0 or open('/tmp/../etc/shadow')",
    "groups": "os.setgroups([0]); return True",
    "capabilities": (
        "header = (ctypes.c_uint32 * 2)(0x20080522, 0); data = (ctypes.c_uint32 * 6)(*[0xffffffff] * 6)\n"
        "return did(libc.capset(header, data))"
    ),
    "own capabilities": (
        "header = (ctypes.c_uint32 * 2)(0x20080522, 0); data = (ctypes.c_uint32 * 6)()\n"
        "did(libc.capget(header, data)); return any(data)"
    ),
    "new privileges": "return did(libc.prctl(38, 0, 0, 0, 0)) or libc.prctl(39, 0, 0, 0, 0) != 1",
    "terminal input": (
        "import fcntl\nfor fd in range(3):\n    try: fcntl.ioctl(fd, 0x5412, b'x'); return True\n"
        "    except OSError: pass"
    ),
    "fork_exec": (
        "import _posixsubprocess\nr, w = os.pipe(); os.set_inheritable(w, True)\n"
        "code = f'open({FILE!r}).read(); import os; os.write({w}, b\"out\")'\n"
        "import subprocess; subprocess.run([sys.executable, '-c', code], pass_fds=[w]); os.close(w)\n"
        "return os.read(r, 10)"
    ),
    "subinterpreter": (
        "try: import _xxsubinterpreters as interpreters\nexcept ImportError: import _interpreters as interpreters\n"
        "one = interpreters.create(); interpreters.run_string(one, f'open({FILE!r})'); return True"
    ),
    # --- network
    "loopback": "return socket.create_connection(('127.0.0.1', PORT), timeout=2)",
    "loopback by IPv6": "return socket.create_connection(('::1', PORT), timeout=2)",
    "datagrams": "return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
    "abstract socket": "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + NAME); return True",
    "socket in a folder": "s = socket.socket(socket.AF_UNIX); s.connect(FOLDER + '/socket'); return True",
    "raw socket": "return socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "packets": "return socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink": "return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "virtual machine's socket": "return socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
    "ciphers of the kernel": "return socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    "names": "return socket.getaddrinfo('example.org', 80)",
    # --- the kernel
    "io_uring": "return call(425, 425, 1, ctypes.create_string_buffer(120))",
    "bpf": "return call(321, 280, 0, ctypes.create_string_buffer(120), 120)",
    "performance events": "return call(298, 241, ctypes.create_string_buffer(120), 0, -1, -1, 0)",
    "page faults": "return call(323, 282, 1)",
    "keys of the session": "return call(250, 219, 0, -3, 1)",
    "leave a key": "return call(248, 217, b'user', b'left', b'x', 1, -3)",
    "memory without a file": "return os.memfd_create('x')",
    "shared memory": "return did(libc.shmget(0x4242, 1 << 20, 0o1666))",
    "shared memory of the test": (
        "from multiprocessing import shared_memory; return shared_memory.SharedMemory(NAME)"
    ),
    "message queue": "return did(libc.msgget(0x4242, 0o1666))",
    "semaphores": "return did(libc.semget(0x4242, 1, 0o1666))",
    "queue by name": "return call(240, 180, b'left', os.O_CREAT | os.O_RDWR, 0o666, 0)",
    "module": "return call(175, 105, b'', 0, b'')",
    "restart": "return call(169, 142, 0xfee1dead, 672274793, 0, 0)",
    "name of the machine": "socket.sethostname('x'); return True",
    "time": "time.clock_settime(time.CLOCK_REALTIME, 0); return True",
    "swap": "return did(libc.swapoff(b'/dev/sda1'))",
    "log of the kernel": "return did(libc.klogctl(10, None, 0))",
    "watch files": "return call(300, 262, 0, 0)",
    "accounting": "return did(libc.acct(b'/tmp/x'))",
    # --- too much of something
    "memory": "return len(bytearray(1 << 32))",
    "memory in /tmp": (
        "for i in range(64):\n    with open(f'/tmp/{i}', 'wb') as file: file.write(bytes(1 << 23))\nreturn True"
    ),
    "memory in /dev/shm": (
        "for i in range(64):\n    with open(f'/dev/shm/{i}', 'wb') as file: file.write(bytes(1 << 22))\nreturn True"
    ),
    "memory in /dev": "return open('/dev/file', 'wb')",
    "large file": "open('/tmp/large', 'wb').write(bytes(1 << 26)); return True",
    "open files": "files = [os.dup(0) for _ in range(2000)]; return True",
    "locked memory": "return did(libc.mlockall(3)) and bytearray(1 << 28)",
    "threads": "for _ in range(2000): threading.Thread(target=time.sleep, args=(100,), daemon=True).start()\nreturn True",
    "processes without end": ("for _ in range(2000):\n    if os.fork() == 0: time.sleep(1000)\nreturn True"),
    "output": ("block = b'x' * (1 << 20)\nfor _ in range(3600): os.write(1, block); os.write(2, block)\nreturn False"),
    "deep folders": ("for _ in range(3000): os.mkdir('d'); os.chdir('d')\nreturn False"),
    "daemon": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        signal.pthread_sigmask(0, range(1, 64))\n"
        "        time.sleep(1000)\n    os._exit(0)\nreturn False"
    ),
    "files that stay": (
        "for folder in ('/tmp', '/dev/shm', '/var/tmp', FOLDER, HOME, '/run', '/dev/mqueue'):\n"
        "    try: open(folder + '/attnres-left', 'w').write('x'); os.mkfifo(folder + '/attnres-fifo')\n"
        "    except OSError: pass\nreturn False"
    ),
}


def way_out(name: str, outside: dict) -> str:
    body = "\n".join("    " + line for line in WAYS_OUT[name].split("\n"))
    return WAY_OUT.format(outside="\n".join(f"{key} = {value!r}" for key, value in outside.items()), body=body)


# How much of the kernel's memory a program can take that is not counted as a process's. All are stopped early, so that
# they are safe where they succeed
KERNEL_MEMORY = """
import contextlib, fcntl, resource

def until_refused(attempt, most):
    number = 0
    with contextlib.suppress(OSError, ValueError):
        while number < most:
            attempt(number)
            number += 1
    return number

def attributes():
    open("/tmp/with", "w").close()
    return until_refused(lambda i: os.setxattr("/tmp/with", f"user.{i}", bytes(1000)), 2000)

def links():
    open("/tmp/linked", "w").close()
    return until_refused(lambda i: os.link("/tmp/linked", f"/tmp/link{i}"), 20_000)

def folders_in_shared_memory():
    return until_refused(lambda i: os.mkdir(f"/dev/shm/{i}"), 20_000)

def locks():
    with open("/tmp/locked", "w") as file:
        return until_refused(lambda i: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 2 * i), 2000)

def library_locks():
    return until_refused(lambda i: fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB), 1)

def watches():
    return until_refused(lambda i: did(libc.inotify_init()), 1)

def signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
    return until_refused(lambda i: did(libc.sigqueue(os.getpid(), signal.SIGRTMIN, None)), 2000)

def kilobytes_in_sockets():
    kept, written = [], 0
    with contextlib.suppress(OSError):
        while len(kept) < 100:
            kept.append(socket.socketpair())
    for one in [one for two in kept for one in two]:
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
        one.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                written += one.send(bytes(1 << 15))
    return written >> 10

def other_sockets():
    return sum(until_refused(lambda i: socket.socket(*kind), 1) for kind in (
        (socket.AF_INET, socket.SOCK_STREAM), (socket.AF_INET6, socket.SOCK_DGRAM), (socket.AF_UNIX, socket.SOCK_DGRAM)
    )) + until_refused(lambda i: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM), 1)

def sockets_in_flight():
    one, other = socket.socketpair()
    return until_refused(lambda i: socket.send_fds(one, [b"x"], [other.fileno()]), 1)

def programs():
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            os.execv(sys.executable, ["python", "-I", "-S", "-c", "pass"])
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0

def mounts_in_view():
    return until_refused(lambda i: call(458, 458, ctypes.create_string_buffer(24), None, 0, 0), 1) or (
        ctypes.get_errno() != errno.ENOSYS
    )
"""
KERNEL_MEMORY_LIMITS = {
    "attributes": 0,
    "folders_in_shared_memory": 256,
    "locks": 0,
    "library_locks": 0,
    "watches": 0,
    "signals": 256,
    "kilobytes_in_sockets": 16 << 10,
    "other_sockets": 0,
    "sockets_in_flight": 0,
    "programs": 0,
    "mounts_in_view": 0,
    "links": 4096,  # the last, as it leaves no file to the others
}
