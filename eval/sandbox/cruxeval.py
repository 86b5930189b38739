# SPDX-License-Identifier: Apache-2.0
"""CRUXEval, judged in our sandbox: a model predicts what a function returns, or what it has to be given to do so.

lm-eval writes the prediction, which may be any expression, into an assertion and executes that beside the function.
Here the sandboxed program holds nothing but the prediction, and the judge has the function and compares.
"""

import ast
import json
from typing import Any

from . import judged


def put_into_sandbox(task: Any):
    """Replace what lm-eval's CRUXEval executes programs with. Its functions find each other by name."""
    functions = [*task._metric_fn_list.values()]
    functions += [
        step.filter_fn for ensemble in task._filters for step in ensemble.filters if hasattr(step, "filter_fn")
    ]
    for function in functions:
        names = getattr(function, "__self__", function).__globals__  # lm-eval keeps the `__call__` of metrics
        names["check_correctness"] = judge
        for kind in ("input", "output"):
            extract = names[f"extract_code_{kind}"]
            if not hasattr(extract, "of_lm_eval"):
                names[f"extract_code_{kind}"] = _WithDoc(extract)


class _WithDoc:
    """An extraction of lm-eval whose assertion keeps its question."""

    def __init__(self, extract):
        self.of_lm_eval = extract

    def __call__(self, doc: dict, generation: str, cot: bool) -> str:
        assertion = self.of_lm_eval(doc, generation, cot)[len(doc["code"]) + 1 :]
        return json.dumps({**{name: doc[name] for name in ("code", "input", "output")}, "assertion": assertion})


def judge(check_program: str, timeout: float = 3) -> bool:
    """Whether the prediction is right. `timeout` is lm-eval's; ours leaves time to start the sandbox."""
    question = json.loads(check_program)
    try:
        program, tests = program_and_tests(**question)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return judged(program, tests) == "passed"


judge.sandboxed = True  # type: ignore[attr-defined]  # what `benchmarks.in_sandbox` looks for


def program_and_tests(code: str, input: str, output: str, assertion: str) -> tuple[str, str]:
    """The prediction as a program, and the function with the comparison as its tests.

    Raises:
        ValueError, SyntaxError: if the assertion is anything but `assert f(input) == output`, one of them as asked.
    """
    given, wanted = _compared(f"assert f({input}) == {output}")
    call, value = _compared(assertion)
    if ast.dump(call) == ast.dump(given):
        predicted, comparison = ast.unparse(value), f"f({input}) == predicted_by_model()"
    elif ast.dump(value) == ast.dump(wanted):
        keywords = ast.Dict(
            [ast.Constant(k.arg) if k.arg else None for k in call.keywords], [k.value for k in call.keywords]
        )
        predicted = ast.unparse(ast.Tuple([ast.List(call.args, ast.Load()), keywords], ast.Load()))
        comparison = f"(lambda predicted: f(*predicted[0], **predicted[1]))(predicted_by_model()) == {output}"
    else:
        raise ValueError(assertion)
    return f"def predicted_by_model():\n    return {predicted}\n", f"{code}\nassert {comparison}\n"


def _compared(assertion: str) -> tuple[ast.Call, ast.expr]:
    match ast.parse(assertion).body:
        case [ast.Assert(ast.Compare(ast.Call(ast.Name("f")) as call, [ast.Eq()], [value]))]:
            return call, value
    raise ValueError(assertion)
