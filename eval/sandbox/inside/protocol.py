# SPDX-License-Identifier: Apache-2.0
"""Values and calls between two processes of which one does not trust the other.

A message is one line of JSON. Built-in values cross as copies: an instance of a subclass arrives as the built-in value
that it holds, so nothing arrives that has code of the sender, `__eq__` included. Named tuples keep their fields, and
arrays of numpy are arrays here as there: neither is a list. Lists, dicts and sets are numbered within an exchange, so
a call that changes its arguments, or returns one of them, changes and returns them on the caller's side too.
Everything else (functions, iterators, objects of own classes) stays where it is, and the other side holds a number for
it.

What tests ask of such an object is the program's to answer. Where that would let a wrong answer agree to everything,
the tests are refused, and count as unusable.
"""

import builtins
import collections
import functools
import importlib
import json
import keyword
import os
import sys
import threading
import types


MESSAGE_BYTES = 1 << 26
ROOT = 0  # the number of the program's names
DEPTH = 10_000  # of calls that take values apart: enough for lists deeper than Python itself can compare


class Violation(Exception):
    """The other side does not keep to the protocol."""


class Refused(Exception):
    """A value that cannot be handed to a program."""


class Raised(Exception):
    """Carries the exception that a call on the other side ended with."""


class Remote:
    """Something that the other side holds."""

    def __init__(self, peer: "Peer", number: int):
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def _do(self, operation: str, *arguments):
        return self._peer.request(operation, self._number, arguments)


class RemoteFunction(Remote):
    def __call__(self, *arguments, **keywords):
        return self._do("call", arguments, keywords)


class RemoteIterator(Remote):
    def __iter__(self):
        return self

    def __next__(self):
        return self._do("next")


# Methods of built-in values. With such a name, an answer could be taken for a value that has it
CHANGING = {"append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "update", "add", "discard"} | {
    *("setdefault", "popitem", "appendleft", "popleft", "extendleft", "rotate")
}
METHODS = {
    name
    for kind in (str, bytes, int, float, complex, tuple, list, dict, set, frozenset, collections.deque)
    for name in dir(kind)
} - CHANGING
PREDICATES = {name for name in METHODS if name.startswith("is")} | {"startswith", "endswith"}


class RemoteObject(Remote):
    """An object of a class of the other side. It is equal to itself alone.

    It can be asked for its items, which arrive as values. It has attributes and methods only where the tests use the
    class itself by its name. An answer with methods of its own could agree to everything: methods that built-in values
    have too are there only until a call has returned the object, and those that say yes or no are not.
    """

    def __iter__(self):
        return self._do("iterate")

    def __len__(self):
        return self._do("length")

    def __bool__(self):
        return self._do("truth") is not False

    def __getitem__(self, key):
        return self._do("item", key)

    def __setitem__(self, key, value):
        self._do("set item", key, value)

    def __str__(self):
        return self._do("text")

    def __repr__(self):
        return self._do("description")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        is_answer = self._number in self._peer.answered
        if not self._peer.knows_classes:
            if is_answer:
                raise AttributeError(name)
            self._refuse(f"ask `{name}` of an object of a class that is called like a function")
        value = self._do("attribute", name)
        if name in (METHODS if is_answer else PREDICATES) and isinstance(value, Remote):
            self._refuse(f"ask `{name}` of an object of a class of the program's, which could agree to everything")
        return value

    def __setattr__(self, name: str, value):
        if not self._peer.knows_classes or name.startswith("__"):
            raise AttributeError(name)
        self._do("set attribute", name, value)

    def __contains__(self, item):
        try:
            items = iter(self)
        except TypeError:
            return self._operator("in")
        return any(own is item or own == item for own in items)

    def _operator(self, sign: str):
        """Not for the program to compute, where its class is tested; elsewhere there is none."""
        if self._peer.knows_classes:
            self._refuse(f"use `{sign}` on an object of a class of the program's")
        raise TypeError(f"an object of the program has no `{sign}`")

    def _refuse(self, what: str):
        raise self._peer.refusal(f"The tests {what}.")


def _without_operators(kind: type):
    signs = {"lt": "<", "gt": ">", "le": "<=", "ge": ">=", "add": "+", "sub": "-", "mul": "*", "truediv": "/"}
    signs |= {"floordiv": "//", "mod": "%", "pow": "**", "matmul": "@", "and": "&", "or": "|", "xor": "^"}
    reflected = {f"r{name}": sign for name, sign in signs.items() if name not in ("lt", "gt", "le", "ge")}
    for name, sign in {**signs, **reflected, "neg": "-", "abs": "abs", "invert": "~"}.items():
        setattr(kind, f"__{name}__", lambda self, *others, sign=sign: self._operator(sign))


_without_operators(RemoteObject)


class RemoteComparable(RemoteObject):
    """An object whose class says itself what is equal to it: not to be asked, since it could say so of everything."""

    def __eq__(self, other):
        if self is not other and isinstance(other, RemoteObject):
            self._refuse("compare objects of a class of the program's, which says itself what is equal")
        return self is other

    def __hash__(self):
        if self._peer.knows_classes:
            self._refuse(
                "put objects of a class of the program's, which says itself what is equal, into a set or dict"
            )
        return object.__hash__(self)


class RemoteClass(RemoteObject):
    def __call__(self, *arguments, **keywords):
        known = set(self._peer.answered)
        value = self._do("call", arguments, keywords)
        if isinstance(value, RemoteObject) and value._number not in known:
            self._peer.answered.discard(value._number)  # made by the tests
        return value

    def __instancecheck__(self, value) -> bool:
        if isinstance(value, Record):
            return value._of == (self._peer, self._number)
        return isinstance(value, RemoteObject) and self._do("instance", value) is True

    def __subclasscheck__(self, kind) -> bool:
        return isinstance(kind, RemoteClass) and self._do("subclass", kind) is True

    def __mro_entries__(self, bases):
        self._refuse("derive a class from one of the program's")


class Record:
    """What the judge's copies of a program's named tuples are as well: tuples whose class is held by the program."""

    __slots__ = ()
    _of: tuple["Peer", int]

    def __getattr__(self, name: str):
        peer, number = self._of
        if not peer.knows_classes or name.startswith("__") or name in METHODS:
            raise AttributeError(name)
        return peer.request("attribute of", number, (self, name))


REMOTES = {
    "function": RemoteFunction,
    "iterator": RemoteIterator,
    "object": RemoteObject,
    "comparable": RemoteComparable,
    "class": RemoteClass,
}

OPERATIONS = {
    "call": lambda target, arguments, keywords: target(*arguments, **keywords),
    "next": next,
    "iterate": iter,
    "length": len,
    "item": lambda target, key: target[key],
    "defines": lambda target, key: key in target,
    "set item": lambda target, key, value: target.__setitem__(key, value),
    "truth": bool,
    "text": str,
    "description": repr,
    "attribute": getattr,
    "attribute of": lambda target, value, name: getattr(value, name),
    "set attribute": setattr,
    "instance": lambda target, value: isinstance(value, target),
    "subclass": lambda target, kind: issubclass(kind, target),
}


class Table:
    """The lists, dicts and sets of one exchange, in the order in which both sides meet them."""

    def __init__(self):
        self.values: list = []
        self.numbers: dict[int, int] = {}

    def add(self, value):
        self.numbers[id(value)] = len(self.values)
        self.values.append(value)


def decimal_number(text: str):
    import decimal

    return decimal.Decimal(text)


def fraction(numerator: int, denominator: int):
    import fractions

    return fractions.Fraction(numerator, denominator)


def moment(kind: str):
    def decode(text: str):
        import datetime

        return getattr(datetime, kind).fromisoformat(text)

    return decode


def time_between(days: int, seconds: int, microseconds: int):
    import datetime

    return datetime.timedelta(days, seconds, microseconds)


def typed_array(code: str, items: list):
    import array

    return array.array(code, items)


NUMPY_KINDS = "biufcU"  # numbers and text


def numpy_array(kind: str, shape: tuple, items: list):
    import numpy

    if kind[:1] not in "<>|" or kind[1:2] not in NUMPY_KINDS or not kind[2:].isdecimal():
        raise ValueError(kind)
    return numpy.array(items, dtype=kind).reshape(shape)


def parts_of_numpy_array(value) -> tuple:
    return value.dtype.str, tuple(value.shape), value.ravel().tolist()


# By the full name of a type: the parts from which a value of it is built, and what builds it. Named, not imported: an
# interpreter that starts for every program should start fast
BUILT = {
    "builtins.int": (lambda value: (hex(int.__int__(value)),), lambda text: int(text, 16)),
    "builtins.str": (
        lambda value: (str.__str__(value).encode("utf-8", "surrogatepass").hex(),),
        lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    ),
    "builtins.bytes": (lambda value: (bytes.hex(value),), bytes.fromhex),
    "builtins.complex": (lambda value: (value.real, value.imag), complex),
    "builtins.range": (lambda value: (value.start, value.stop, value.step), range),
    "builtins.slice": (lambda value: (value.start, value.stop, value.step), slice),
    "builtins.tuple": (tuple.__iter__, lambda *items: items),
    "builtins.frozenset": (frozenset.__iter__, lambda *items: frozenset(items)),
    "builtins.ellipsis": (lambda value: (), lambda: ...),
    "builtins.dict_keys": (iter, lambda *items: dict.fromkeys(items).keys()),
    "builtins.dict_values": (iter, lambda *items: dict(enumerate(items)).values()),
    "builtins.dict_items": (iter, lambda *items: dict(items).items()),
    "numpy.ndarray": (parts_of_numpy_array, numpy_array),
    "array.array": (lambda value: (value.typecode, value.tolist()), typed_array),
    "decimal.Decimal": (lambda value: (str(value),), decimal_number),
    "fractions.Fraction": (lambda value: (value.numerator, value.denominator), fraction),
    "datetime.datetime": (lambda value: (value.isoformat(),), moment("datetime")),
    "datetime.date": (lambda value: (value.isoformat(),), moment("date")),
    "datetime.time": (lambda value: (value.isoformat(),), moment("time")),
    "datetime.timedelta": (lambda value: (value.days, value.seconds, value.microseconds), time_between),
}
# Those that can change: what they hold, and what puts other contents into one
FILLED = {
    "builtins.list": (list, list.__iter__, lambda value, items: value.__setitem__(slice(None), items)),
    "builtins.set": (set, set.__iter__, lambda value, items: (value.clear(), value.update(items))),
    "builtins.dict": (dict, dict.items, lambda value, items: (value.clear(), value.update(items))),
    "builtins.bytearray": (bytearray, bytearray.__iter__, lambda value, items: value.__setitem__(slice(None), items)),
    "collections.Counter": (
        collections.Counter,
        dict.items,
        lambda value, items: (value.clear(), dict.update(value, items)),
    ),
    "collections.OrderedDict": (
        collections.OrderedDict,
        dict.items,
        lambda value, items: (value.clear(), value.update(items)),
    ),
    "collections.deque": (
        collections.deque,
        collections.deque.__iter__,
        lambda value, items: (value.clear(), value.extend(items)),
    ),
}


@functools.lru_cache(maxsize=1000)
def plain_type(kind: type) -> str | None:
    """The name of the built-in type that a type is or derives from."""
    for base in kind.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in BUILT or name in FILLED or base in (bool, float):
            return name
    return None


def builtin_exception(kind: type) -> type:
    """The nearest exception that Python itself has."""
    return next(
        base
        for base in kind.__mro__
        if getattr(builtins, base.__name__, None) is base and not base.__name__.endswith("Group")
    )


class Peer:
    """One end of the line, by two file descriptors.

    The judge's end lets the program call functions that the tests define and have handed over, and nothing else; the
    program's end lets the judge do everything, and takes it at its word.
    """

    def __init__(self, reader: int, writer: int, is_judge: bool):
        self.reader, self.writer = os.fdopen(reader, "rb"), os.fdopen(writer, "wb")
        self.is_judge = is_judge
        self.knows_classes = False  # whether the tests name a class of the program
        self.answered: set[int] = set()  # objects that did not only come from a class that the tests have called
        self.records: dict[tuple, type] = {}
        self.failure: BaseException | None = None  # what no test may catch
        self.held: dict[int, object] = {}
        self.numbers: dict[int, int] = {}
        self.remotes: dict[int, object] = {}
        self.exceptions: dict[type, int] = {}
        self.lock = threading.RLock()

    # --- messages

    def send(self, message: list):
        self.writer.write(deeply(json.dumps, message).encode() + b"\n")
        self.writer.flush()

    def receive(self) -> list:
        line = self.reader.readline(MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            raise Violation("the line ended")
        try:
            message = deeply(json.loads, line)
        except (ValueError, RecursionError) as error:
            raise Violation(str(error)) from None
        if type(message) is not list or not message:
            raise Violation("not a message")
        return message

    def request(self, operation: str, number: int, arguments: tuple):
        """Let the other side do something with what it holds; serves its own requests while it waits."""
        with self.lock:
            try:
                return self._request(operation, number, arguments)
            except Raised as raised:
                raise raised.args[0] from None
            except (Violation, Refused, OSError) as failure:
                self.failure = self.failure or failure
                raise

    def _request(self, operation: str, number: int, arguments: tuple):
        table = Table()
        self.send(["do", operation, number, deeply(self.encode, arguments, table)])
        while True:
            message = self.receive()
            if message[0] == "do" and len(message) == 4:
                self.serve(message)
            elif message[0] == "value" and len(message) == 3:
                return self.guarded(self._take, message[1], message[2], table)
            elif message[0] == "error" and len(message) == 4:
                raise Raised(self.guarded(self._exception, *message[1:]))
            else:
                raise Violation("not an answer")

    def refusal(self, reason: str) -> Refused:
        """Why tests cannot be run, noted so that they cannot catch it."""
        refused = Refused(reason)
        self.failure = self.failure or refused
        return refused

    def guarded(self, decode, *data):
        try:
            return deeply(decode, *data)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            raise Violation(f"{type(error).__name__}: {error}") from None

    def _take(self, changes: list, value, table: Table):
        for number, contents in changes:
            target = table.values[number]
            _, _, fill = FILLED[plain_type(type(target))]
            fill(target, [self.decode(item, table) for item in contents])
        return self.decode(value, table)

    def _exception(self, number: int | None, name: str, text: str) -> BaseException:
        kind = getattr(builtins, name) if number is None else self.remotes[number]
        if not (isinstance(kind, type) and issubclass(kind, BaseException)) or type(text) is not str:
            raise TypeError(name)
        error = kind.__new__(kind, text)
        error.args = (text,)
        return error

    def serve(self, message: list):
        """Do what was asked for and answer."""
        _, operation, number, data = message
        table = Table()
        arguments = self.guarded(self.decode, data, table)
        if number not in self.held or operation not in OPERATIONS or type(arguments) is not tuple:
            raise Violation("not an operation")
        if self.is_judge and operation not in ("call", "next"):
            raise Violation("not allowed")
        before = [self.contents(value) for value in table.values]
        try:
            result = OPERATIONS[operation](self.held[number], *arguments)
            answer = deeply(self.answer, result, before, table)
        except (Violation, Refused):
            raise
        except BaseException as error:  # an exit as well: it ends the call, and whoever called decides
            own = self.exceptions.get(type(error))
            answer = ["error", own, builtin_exception(type(error)).__name__, self.text(error)]
        self.send(answer)

    def answer(self, result, before: list, table: Table) -> list:
        """The result, and the contents of those arguments that have changed."""
        changes = []
        for number, items in enumerate(before):
            now = self.contents(table.values[number])
            if len(now) != len(items) or any(new is not old for new, old in zip(now, items)):
                changes.append(number)
        encoded = [
            [number, [self.encode(item, table) for item in self.items(table.values[number])]] for number in changes
        ]
        return ["value", encoded, self.encode(result, table)]

    @staticmethod
    def text(error: BaseException) -> str:
        try:
            return str(error)[:1000].encode("utf-8", "replace").decode()
        except BaseException:
            return ""

    # --- values

    @staticmethod
    def items(value) -> list:
        _, read, _ = FILLED[plain_type(type(value))]
        return list(read(value))

    def contents(self, value) -> list:
        """The things in a container themselves, to see whether it has changed."""
        items = self.items(value)
        return [part for item in items for part in item] if isinstance(value, dict) else items

    def encode(self, value, table: Table):
        if value is None or value is True or value is False:
            return value
        name = plain_type(type(value))
        if name == "builtins.float":
            return float.__float__(value)
        if name == "builtins.int" and -(2**63) < value < 2**63:
            return int.__int__(value)
        if name == "builtins.str" and str.isascii(value):
            return str.__str__(value)
        if name in FILLED:
            if id(value) in table.numbers:
                return ["same", table.numbers[id(value)]]
            table.add(value)
            return [name, *(self.encode(item, table) for item in self.items(value))]
        if name == "builtins.tuple" and are_fields(getattr(type(value), "_fields", None)):
            return [*self.encode_fields(type(value)), *(self.encode(item, table) for item in tuple.__iter__(value))]
        if name == "numpy.ndarray" and value.dtype.kind not in NUMPY_KINDS:
            name = None
        if name is not None:
            parts, _ = BUILT[name]
            return [name, *(self.encode(part, table) for part in parts(value))]
        if type(value).__module__ == "numpy" and not self.is_judge and hasattr(value, "item"):
            plain = value.item()  # of a scalar, which counts as the number that it holds
            return self.encode(plain, table) if type(plain) is not type(value) else float(value)
        return self.encode_other(value)

    def encode_fields(self, kind: type) -> list:
        """A class of named tuples: the number of the program's, or the fields of one of the tests' own."""
        if not self.is_judge:
            return ["record", self.hold(kind), kind.__name__, list(kind._fields)]
        number = kind._of[1] if issubclass(kind, Record) and kind._of[0] is self else None
        return ["record", number, kind.__name__, list(kind._fields)]

    def encode_other(self, value):
        """What stays here, but for types that both sides have."""
        if isinstance(value, Remote) and value._peer is self:
            return ["yours", value._number]
        if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
            return ["type", value.__name__]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        kind = kind_of(value)
        if self.is_judge:
            if named(value):
                # Its own one: the judge's `eval` is not for a program to call
                return ["named", *named(value)]
            if kind not in ("function", "iterator"):
                raise Refused(f"The tests hand a `{type(value).__name__}` to the program, which cannot cross.")
        number = self.hold(value)
        if kind == "exception":
            self.exceptions[value] = number
        base = builtin_exception(value).__name__ if kind == "exception" else None
        return ["mine", number, kind, base]

    def hold(self, value) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = number = len(self.held) + 1
            self.held[number] = value  # which keeps its id its own
        return self.numbers[id(value)]

    def decode(self, data, table: Table):
        if data is None or type(data) in (bool, int, float, str):
            return data
        name, *parts = data
        if name == "same":
            return table.values[parts[0]]
        if name in FILLED:
            make, _, fill = FILLED[name]
            value = make()
            table.add(value)
            fill(value, [self.decode(part, table) for part in parts])
            return value
        if name in BUILT:
            return BUILT[name][1](*(self.decode(part, table) for part in parts))
        if name == "record":
            return self.record(*parts[:3], [self.decode(part, table) for part in parts[3:]])
        if name == "type":
            kind = getattr(builtins, parts[0])
            if not isinstance(kind, type):
                raise TypeError(parts[0])
            return kind
        if name == "module":
            return Module(parts[0])
        if name == "named" and not self.is_judge:
            return functools.reduce(getattr, parts[1].split("."), importlib.import_module(parts[0]))
        if name == "yours":
            return self.held[parts[0]]
        if name == "mine":
            return self.remote(*parts)
        raise ValueError(name)

    def record(self, number: int | None, name: str, fields: list[str], items: list) -> tuple:
        """A named tuple. In the judge it has the fields, and its class in the program is known."""
        if not self.is_judge and number is not None:
            return tuple.__new__(self.held[number], items)
        fields = tuple(fields)
        if not are_fields(fields) or len(fields) != len(items):
            raise ValueError(fields)
        if any(isinstance(item, Remote) and field in METHODS for field, item in zip(fields, items)):
            return tuple(items)  # which would have methods of its own
        key = (number, *fields)
        if key not in self.records:
            kind = collections.namedtuple(name, fields)
            if self.is_judge:
                kind = type(name, (Record, kind), {"__slots__": (), "_of": (self, number)})
            self.records[key] = kind
        return tuple.__new__(self.records[key], items)

    def remote(self, number: int, kind: str, base: str | None):
        """What stands for a thing of the other side: always the same for the same thing."""
        if type(number) is not int:
            raise TypeError(number)
        if self.is_judge:
            self.answered.add(number)
        if number not in self.remotes:
            if kind == "exception":
                self.remotes[number] = type("ProgramError", (getattr(builtins, base),), {})
            else:
                self.remotes[number] = REMOTES[kind](self, number)
        return self.remotes[number]


def deeply(function, *arguments):
    """Call what takes values apart with room for deep ones. A program's own calls have the usual room."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, DEPTH))
    try:
        return function(*arguments)
    finally:
        sys.setrecursionlimit(limit)


def are_fields(names) -> bool:
    """Whether these are the names of a named tuple's fields."""
    return type(names) is tuple and all(
        type(name) is str and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")
        for name in names
    )


class Module:
    """That a name means a module."""

    def __init__(self, name: str):
        self.name = name


def named(value) -> tuple[str, str] | None:
    """Module and name of a function or class of the standard library."""
    owner = getattr(value, "__objclass__", None)
    module = owner.__module__ if owner is not None else getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if type(module) is str and type(name) is str and module.split(".")[0] in sys.stdlib_module_names | {"builtins"}:
        found = functools.reduce(lambda at, part: getattr(at, part, None), name.split("."), sys.modules.get(module))
        return (module, name) if found is value and module != "__main__" else None
    return None


def kind_of(value) -> str:
    if isinstance(value, type):
        return "exception" if issubclass(value, BaseException) else "class"
    if hasattr(type(value), "__next__"):
        return "iterator"
    if callable(value):
        return "function"
    return "object" if type(value).__eq__ is object.__eq__ else "comparable"
