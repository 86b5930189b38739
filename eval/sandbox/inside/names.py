# SPDX-License-Identifier: Apache-2.0
"""Which names tests take from the program that they test. Only for tests: a program's text is never analysed here."""

import ast
import builtins
import symtable
import sys


BUILTINS = frozenset(dir(builtins))
# What tests compare answers with, or compute them by, under names that hardly any function under test has
TOOLS = {
    name: module
    for module, names in {
        "math": "isclose isnan isinf isfinite fsum pi inf nan sqrt",
        "collections": "Counter OrderedDict defaultdict deque namedtuple",
        "copy": "deepcopy",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "numpy": "allclose array_equal",
    }.items()
    for name in names.split()
}
ALIASES = {"np": "numpy"}


def free_names(tests: str) -> set[str]:
    """The names that tests use and nobody but the program can define.

    The built-in functions of tests are Python's own, whatever the program calls its functions. Tests that use nothing
    else test a function of such a name (MBPP has `sum`): then it is the one that is called within the others.
    """
    top = symtable.symtable(tests, "tests", "exec")
    used: set[str] = set()
    tables = [top]
    for table in tables:
        tables += table.get_children()
        used |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (table is top or symbol.is_global())
        }
    defined = {
        symbol.get_name()
        for symbol in top.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    return used - defined - BUILTINS or {
        call.func.id
        for call in ast.walk(ast.parse(tests))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in BUILTINS - defined
        and not any(isinstance(part, ast.Call) for argument in call.args for part in ast.walk(argument))
    }


def own_names(tests: str) -> dict[str, tuple[str, str | None]]:
    """Names that mean the same whoever defines them: a module, or what it holds under this name.

    Tests of benchmarks leave such imports to the program. What the names stand for is still the tests' to say: a
    program's own `isclose` could agree to everything.
    """
    names = free_names(tests)
    used_otherwise = {node.id for node in _names_without_attribute(ast.parse(tests))}
    found: dict[str, tuple[str, str | None]] = {
        name: (ALIASES.get(name, name), None)
        for name in names - used_otherwise
        if name in ALIASES or name == "numpy" or name in sys.stdlib_module_names
    }
    tools = names & TOOLS.keys()
    if names - found.keys() - tools:  # else it is one of these that is tested
        found |= {name: (TOOLS[name], name) for name in tools}
    return found


def _names_without_attribute(tree: ast.AST):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Name):
            yield node
        elif not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            yield from _names_without_attribute(node)


def names_under_test(tests: str) -> set[str]:
    """The names that tests take from the program."""
    return free_names(tests) - own_names(tests).keys()


def class_names(tests: str) -> set[str]:
    """Those of the names that tests use as one uses a class, or that are written like one.

    A program may define a class where a function is asked for.
    """
    used = set()
    for node in ast.walk(ast.parse(tests)):
        match node:
            case ast.Call(ast.Name("isinstance" | "issubclass"), [_, kinds]):
                used |= {part.id for part in ast.walk(kinds) if isinstance(part, ast.Name)}
            case ast.Attribute(ast.Name(name)) | ast.ExceptHandler(ast.Name(name)):
                used.add(name)
    return {name for name in names_under_test(tests) if name in used or name.lstrip("_")[:1].isupper()}


def helper_names(tests: str) -> set[str]:
    """Names of the prompt's that tests use beside the function that they test, which is the one in `check(name)`.

    HumanEval has three such: without `poly` as the prompt defines it, the zero of a polynomial would be anything.
    """
    last = ast.parse(tests).body[-1:]
    match last:
        case [ast.Expr(ast.Call(ast.Name("check"), [ast.Name(entry_point)]))]:
            return names_under_test(tests) - {entry_point}
    return set()


def text_before_completion(program: str, names: set[str]) -> str:
    """A program up to the first definition of the last one of these names: the part that is the prompt's."""
    found: dict[str, int] = {}
    for statement in ast.parse(program).body:
        for name in bound_names(statement) & names:
            found.setdefault(name, statement.end_lineno)
    return "\n".join(program.split("\n")[: max(found.values(), default=0)]) + "\n"


def bound_names(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            return {name}
        case ast.Import(names) | ast.ImportFrom(names=names):
            return {alias.asname or alias.name.split(".")[0] for alias in names}
        case ast.Assign(targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
    return set()
