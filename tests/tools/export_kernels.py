# SPDX-License-Identifier: Apache-2.0
"""Writes the Triton kernels as a kernel repository, as the package `kernels` loads it from a folder or from the Hub.

python tests/tools/export_kernels.py FOLDER

The kernels are `depth/triton_kernels.py`, and their tests `tests/test_triton_kernels.py`, which need neither attnres
nor the package `kernels` there.
"""

import argparse
import base64
import hashlib
import json
import sys
from pathlib import Path

from attnres.depth.kernels import FUNCTIONS, KERNELS_VERSION
from attnres.utils.files import atomic_folder, check_destination


ROOT = Path(__file__).parents[2]
NAME = "attnres-kernels"
MODULE = NAME.replace("-", "_")
# Those of torch that the kernels are for. Triton's interpreter needs the first one
BACKENDS = ("cpu", "cuda", "rocm")

INIT = f'''# SPDX-License-Identifier: Apache-2.0
"""The reads over depth of Attention Residuals in two phases, as Triton kernels."""

from . import triton_kernels
from .triton_kernels import {", ".join(sorted(FUNCTIONS))}


# Of these functions. attnres loads kernels of its own version only
KERNELS_VERSION = {KERNELS_VERSION}

__all__ = {json.dumps(["KERNELS_VERSION", *sorted(FUNCTIONS), "triton_kernels"])}
'''

BUILD = f"""[general]
name = "{NAME}"
version = {KERNELS_VERSION}
edition = 5
license = "Apache-2.0"
backends = {json.dumps(BACKENDS)}

[torch-noarch]
"""

CONFTEST = '''# SPDX-License-Identifier: Apache-2.0
"""The kernels are those of this folder. Without a GPU they run in Triton's interpreter."""

import os
import sys
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "torch-ext"))
if not torch.cuda.is_available():  # read when Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
'''

README = f"""---
library_name: kernels
license: apache-2.0
tags:
- kernels
- triton
- attention-residuals
---

# Triton kernels for Attention Residuals

Models with [Attention Residuals](https://arxiv.org/abs/2603.15031) read their own earlier outputs with an attention
over depth. These kernels compute such reads in two phases: the closed blocks once for many reads, and then for each
read what has been written since. Each phase has a forward and a backward pass.

| function | what it does |
|---|---|
| `read_closed` | phase 1: reads the closed blocks once, for all reads of a chunk |
| `merge` | phase 2: scores the sources written since, merges them, and applies an RMSNorm, in one pass |
| `read_closed_backward` | gradients of the closed blocks and of the queries |
| `merge_backward` | gradients of the inputs of `merge`, and of the norm's weight |

Their docstrings give arguments and shapes. They compute in fp32, from sources in fp32, bf16 or fp16.

**The kernels have not run on a GPU yet.** They are tested in Triton's interpreter, and they compile to machine code
for NVIDIA's Hopper (sm_90) and AMD's MI300 (gfx942). On a CPU they need `TRITON_INTERPRET=1`, which is slow and meant
for tests.

## Use

In attnres, in place of its own kernels. The first read on a device compares them with their definition:

```python
import attnres

attnres.set_backend("OWNER/{NAME}", trust_remote_code=True)
```

By themselves:

```python
import torch
from kernels import get_kernel

kernels = get_kernel("OWNER/{NAME}", version={KERNELS_VERSION}, trust_remote_code=True)
queries = torch.zeros(4, 1024, device="cuda")  # [sites, hidden]
sources = [torch.randn(2, 128, 1024, device="cuda") for _ in range(3)]  # each [batch, seq, hidden]
mixes, states, *_ = kernels.read_closed(queries, sources, eps=1e-6)  # [sites, batch, seq, hidden], and heads
```

`trust_remote_code=True` runs the code of a publisher that the package `kernels` does not trust. From a folder, load
the kernels with `attnres.set_backend("./{NAME}")` or `kernels.get_local_kernel`. The branch is named after the
version: `v{KERNELS_VERSION}`.

## Tests

```
python -m pytest tests
```

compares the kernels and all gradients with their definition in fp64. It needs torch, Triton and pytest, and runs in
Triton's interpreter if there is no GPU.
"""


def replaced(text: str, **lines: str) -> str:
    """A text with some of its lines, named by how they begin, replaced; each is there once."""
    for before, after in lines.items():
        found = [line for line in text.splitlines() if line.startswith(before)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} lines begin with `{before}`")
        text = text.replace(found[0], after)
    return text


def metadata(backend: str, files: dict[str, bytes]) -> dict:
    """What `kernels` reads first. The id is the name that the module gets, so other code has another id."""
    digests = {name: hashlib.sha256(content).digest() for name, content in sorted(files.items())}
    own = hashlib.sha256(b"".join(digests.values())).hexdigest()[:12]
    return {
        "name": NAME,
        "id": f"_{MODULE}_{backend}_{own}",
        "version": KERNELS_VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(digest).decode() for name, digest in digests.items()},
        },
    }


def repository() -> dict[str, bytes]:
    """All files by their path."""
    kernels = (ROOT / "depth" / "triton_kernels.py").read_bytes()
    package = {"__init__.py": INIT.encode(), "triton_kernels.py": kernels}
    tests = replaced(
        (ROOT / "tests" / "test_triton_kernels.py").read_text(encoding="utf-8"),
        **{
            "from attnres.depth import": f"from {MODULE} import triton_kernels as kernels",
            "pytestmark = ": "",
        },
    )
    files = {
        "README.md": README.encode(),
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
        "build.toml": BUILD.encode(),
        "tests/conftest.py": CONFTEST.encode(),
        "tests/test_triton_kernels.py": tests.encode(),
    }
    files |= {f"torch-ext/{MODULE}/{name}": content for name, content in package.items()}
    for backend in BACKENDS:
        variant = package | {"metadata.json": (json.dumps(metadata(backend, package), indent=2) + "\n").encode()}
        files |= {f"build/torch-{backend}/{name}": content for name, content in variant.items()}
    return files


def export(folder: Path) -> Path:
    """Write the kernel repository to a folder, which must not exist or must be empty."""
    path = check_destination(folder, ROOT / "depth")
    with atomic_folder(path) as unfinished:
        for name, content in repository().items():
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            (unfinished / name).write_bytes(content)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the Triton kernels as a kernel repository.")
    parser.add_argument("folder", type=Path, help="Write to this folder, which must not exist or must be empty.")
    try:
        folder = parser.parse_args().folder
        export(folder)
    except (OSError, ValueError) as error:
        sys.exit(f"Error: {error}")
    print(f"Wrote {folder}")
