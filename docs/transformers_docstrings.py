# SPDX-License-Identifier: Apache-2.0
"""An extension of Griffe, which reads docstrings for the reference: arguments as transformers writes them.

Transformers' own tools take the lines of a class as they are, without `Args:`, and types stand in the docstring:

    block_size (`int`, *optional*):
        Sublayers per block.

The help of a field of a dataclass is in its metadata, as `HfArgumentParser` has it.
"""

import ast
import re
import textwrap

import griffe


ARGUMENT = re.compile(r"^( *)(\w+) \(`.*\):$", flags=re.MULTILINE)
# Arguments at the left edge, with the indented lines below each
BARE_ARGUMENTS = re.compile(r"(?:^\w+:\n(?:^ +.*\n)+)+", flags=re.MULTILINE)


class TransformersDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs):
        if obj.docstring is not None and ARGUMENT.search(obj.docstring.value):
            text = ARGUMENT.sub(r"\1\2:", obj.docstring.value)
            if "Args:\n" not in text:
                text = BARE_ARGUMENTS.sub(lambda found: "Args:\n" + textwrap.indent(found.group(), "    "), text)
            obj.docstring.value = text

    def on_attribute_instance(self, *, node, attr: griffe.Attribute, **kwargs):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            metadata = next((keyword.value for keyword in node.value.keywords if keyword.arg == "metadata"), None)
            if metadata is not None:
                attr.docstring = griffe.Docstring(ast.literal_eval(metadata)["help"], parent=attr)
