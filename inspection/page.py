# Copyright 2026 The attnres authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The same figures as a page to look around in: one file, which loads nothing."""

from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment

from ..outputs import write_file


def write_page(results: dict[str, Any], path: Path):
    """Write the page of the content of a `depth.json`."""
    template = resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    # `tojson` writes <, >, & and quotes as escapes, so no text can end the script that holds it
    write_file(path, Environment(autoescape=True).from_string(template).render(results=results))
