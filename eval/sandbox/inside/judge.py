# SPDX-License-Identifier: Apache-2.0
"""The judge: runs the tests, in which the names that the program defines stand for what another process does.

It never runs what a program brings, so its word can be taken.
"""

import importlib
import os

from names import class_names, names_under_test, own_names
from protocol import ROOT, Module, Peer, Refused, RemoteClass


def run(tests: str, channels: list[list[int]], helpers: list[str], verdict: int):
    """Run tests and write what came of them: `passed`, `failed`, or why they could not be run."""
    peers = [Peer(reader, writer, is_judge=True) for reader, writer in channels]
    word = "failed"
    try:
        namespace: dict = {"__name__": "__main__"}
        for peer in peers:
            peer.request("length", ROOT, ())  # answered when the program has run to its end
        classes = class_names(tests)
        for name in sorted(names_under_test(tests)):
            add_name(name, peers[-1 if name in helpers else 0], namespace, name in classes)
        for name, (module, attribute) in own_names(tests).items():
            if is_defined(name, peers[0]):
                own = importlib.import_module(module)
                namespace[name] = own if attribute is None else getattr(own, attribute)
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


def add_name(name: str, peer: Peer, namespace: dict, is_class: bool):
    """Put what the program calls so into the namespace of the tests, if it has it."""
    try:
        value = peer.request("item", ROOT, (name,))
    except KeyError:
        return
    if isinstance(value, RemoteClass) and is_class:
        peer.knows_classes = True
        peer.answered.discard(value._number)
    if not isinstance(value, Module):
        namespace[name] = value


def is_defined(name: str, peer: Peer) -> bool:
    """Whether a program has a name. Without it, tests fail, as they do where they run in the program's own names."""
    return peer.request("defines", ROOT, (name,)) is True
