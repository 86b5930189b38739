# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Time and memory: `attnres bench` against the PreNorm twin, and scripts with what else was measured.

- `twin.py`: AttnRes models against their PreNorm twin; `peers.py`: the read alone, against other implementations
- `conversion.py`: conversion against `cp`; `long_context.py`; `depth.py`: what a small model reads
- `study.py`: what AttnRes brings to a small model, from the runs in `study_arms.py` to the tables in `study_tables.py`
- `query_rate.py`: the measured learning rate of the depth queries
- `read_study.py`, `weights_study.py`, `retrofit_study.py`, `two_depths.py`, `recipe_study.py`: studies, each with a
  protocol in the folder of its results; `make studies-report` makes their tables and figures
"""
