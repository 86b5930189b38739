# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Python imports this when it starts, in all processes of `attnres run`: their `PYTHONPATH` begins with this folder.

Importing attnres takes some milliseconds, as it registers with transformers only once that is imported.
"""

import os
import sys
import warnings
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec


# It hides another module of its name, which runs first, as without it
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
if (spec := PathFinder.find_spec(__name__)) is not None:
    sys.modules[__name__] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[__name__])

if find_spec("attnres") is not None:
    import attnres  # noqa: F401
elif find_spec("transformers") is not None:
    warnings.warn(f"attnres is not installed for {sys.executable}, which does not know its models.", stacklevel=1)
