# SPDX-License-Identifier: Apache-2.0
"""Which names tests take from the program that they test. Only for tests: a program's text is never analysed here."""

import ast
import builtins
import symtable


BUILTINS = frozenset(dir(builtins))


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


def helper_names(tests: str) -> set[str]:
    """Names of the prompt's that tests use beside the function that they test, which is the one in `check(name)`.

    HumanEval has three such: without `poly` as the prompt defines it, the zero of a polynomial would be anything.
    """
    last = ast.parse(tests).body[-1:]
    match last:
        case [ast.Expr(ast.Call(ast.Name("check"), [ast.Name(entry_point)]))]:
            return free_names(tests) - {entry_point}
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
