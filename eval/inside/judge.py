# SPDX-License-Identifier: Apache-2.0
"""The judge: runs the tests, in which the names that the program defines stand for what another process does.

It never runs what a program brings, so its word can be taken.
"""

import importlib
import os
import sys

from names import free_names
from wire import ROOT, Module, Peer, Refused, RemoteClass


def run(tests: str, channels: list[list[int]], helpers: list[str], verdict: int):
    """Run tests and write what came of them: `passed`, `failed`, or why they could not be run."""
    peers = [Peer(reader, writer, is_judge=True) for reader, writer in channels]
    word = "failed"
    try:
        namespace: dict = {"__name__": "__main__"}
        for peer in peers:
            peer.request("length", ROOT, ())  # answered when the program has run to its end
        for name in sorted(free_names(tests)):
            add_name(name, peers[-1 if name in helpers else 0], namespace)
        exec(compile(tests, "tests", "exec", dont_inherit=True), namespace)
        if all(peer.failure is None for peer in peers):
            word = "passed"
    except BaseException as error:
        if (
            isinstance(error, ModuleNotFoundError) and error.name
        ):  # the tests' own: a program's has no more than a text
            word = f"unusable: the tests need `{error.name}`, which programs do not have"
    for peer in peers:
        if isinstance(peer.failure, Refused):
            word = f"unusable: {peer.failure}"
    os.write(verdict, word[:1000].encode())


def add_name(name: str, peer: Peer, namespace: dict):
    """Put what the program calls so into the namespace of the tests, if it has it."""
    try:
        value = peer.request("item", ROOT, (name,))
    except KeyError:
        return
    if isinstance(value, Module):
        # The judge's own, and only the one that goes by this name
        module = {"np": "numpy"}.get(name, name)
        if module == "numpy" or module in sys.stdlib_module_names:
            namespace[name] = importlib.import_module(module)
    else:
        peer.knows_classes |= isinstance(value, RemoteClass)
        namespace[name] = value
