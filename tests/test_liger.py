# SPDX-License-Identifier: Apache-2.0
"""`use_liger_kernel=True`: Liger's kernels, in Triton's interpreter where there is no GPU, against the model without."""

import importlib

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, convert, randomize_queries, relative_error, tiny_base_model


pytest.importorskip("liger_kernel")
triton = pytest.importorskip("triton")
import triton.language as tl
from liger_kernel.transformers import _apply_liger_kernel_to_instance
from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
from transformers import TrainingArguments, Trainer


@pytest.fixture(autouse=True)
def interpreter_with_floats(monkeypatch):
    """Numbers arrive in kernels as fp32 scalars, as on a GPU; the interpreter leaves those of Python as they are."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    convert_argument = interpreter._implicit_cvt

    def convert_floats(argument):
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert_argument(argument)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert_floats)
