"""From the text that MLX generates to a translation unit for a C++ compiler.

In: the cut text and the file names to use in messages. Out: C++ in which every line of header and body still has
its number. Changed is only what C++ has no place for: threadgroup variables, `bf` literals, constructors of `vec<T, N>`
and the attributes of the instantiation; all else is the shim's work (include/msl).
"""

import re
from typing import NamedTuple

from tests.metal_emulator.export import KernelText, Parameter

PRELUDE = (
    '#include "mlx/backend/metal/kernels/utils.h"\n'  # what MLX itself puts in front of every custom kernel
)
_SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
_BFLOAT_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)bf\b")
_VECTOR_CONSTRUCTOR = re.compile(r"\b((?:metal::)?vec\s*<[^<>;()]*>)\s*\(")
_ATTRIBUTE_LIST = re.compile(r"\[\[[^\]]*\]\] ")  # C++ takes none on an instantiation
_DECLARATION = re.compile(
    r"\s*(?P<type>(?:(?:const|volatile|unsigned|struct|alignas\s*\([^)]*\))\s+)*[A-Za-z_][\w:]*\s*(?:<[^;]*?>)?)"
    r"\s*(?P<names>[A-Za-z_]\w*\s*(?:\[|,|$|=).*|[A-Za-z_]\w*\s*)$",
    re.S,
)
_DECLARATOR = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*(?P<extents>(?:\[.*\])?)\s*$", re.S)


class Names(NamedTuple):
    """The files of header and body, as messages shall name them; each text begins at line 1."""

    header: str
    body: str


def translate(text: KernelText, names: Names) -> str:
    """The translation unit, to be compiled after `PRELUDE`."""
    header = _rewrite(text.header, first_variable=0)
    body = _rewrite(text.body, first_variable=header.count("msl_threadgroup_variable"))
    parts = [
        f'#line 1 "{names.header}"\n{header}\n',
        f'#line 1 "<signature>"\n{text.signature}',
        f'#line 1 "{names.body}"\n{body}',
        f'\n#line 1 "<instance>"{_ATTRIBUTE_LIST.sub("", text.tail)}',
        f"#ifndef MSL_LINT\n{_entry(text)}#endif\n",
    ]
    return "".join(parts)


def blank_comments(text: str) -> str:
    """The text with spaces for comments and string literals; offsets and lines stay."""
    return _SKIPPED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _entry(text: KernelText) -> str:
    """The function that the scheduler calls for each thread: buffers in the order of the parameters."""
    arguments = ", ".join(_argument(p) for p in text.parameters)
    return (
        'extern "C" MSL_UNCHECKED __attribute__((visibility("default"))) '
        "void emu_entry(void** buffers, const msl_thread* attributes) {\n"
        f"  {text.instance}({arguments});\n}}\n"
    )


def _argument(parameter: Parameter) -> str:
    if not parameter.is_buffer:
        return f"msl_attribute(attributes->{parameter.attribute})"
    slot = parameter.attribute.removeprefix("buffer(").removesuffix(")")
    return f"{'*' if parameter.reference else ''}({parameter.type}*)buffers[{slot}]"


def _rewrite(text: str, *, first_variable: int) -> str:
    text = _rewrite_threadgroup_variables(text, first_variable)
    text = _BFLOAT_LITERAL.sub(r"bfloat(\1f)", text)
    return _VECTOR_CONSTRUCTOR.sub(r"metal::msl_make<\1>(", text)


def _rewrite_threadgroup_variables(text: str, first: int) -> str:
    """`threadgroup T a[N], b;` becomes references to memory that the scheduler owns; pointers are left alone."""
    clean, pieces, done, number = blank_comments(text), [], 0, first
    for match in re.finditer(r"\bthreadgroup\b", clean):
        before = clean[: match.start()].rstrip()
        if match.start() < done or (before and before[-1] not in ";{}"):
            continue  # inside a parameter list, a cast or a template argument: it qualifies a pointer
        end = _statement_end(clean, match.end())
        declaration = _DECLARATION.match(clean[match.end() : end])
        if declaration is None or re.search(r"[*&]", declaration["type"]):
            continue  # a pointer variable
        replacement = ""
        for declarator in _split_at_commas(declaration["names"]):
            parts = _DECLARATOR.match(declarator)
            if parts is None:
                replacement += 'static_assert(false, "threadgroup variables take no initialiser");'
                continue
            alias = f"msl_type_of_{parts['name']}"
            replacement += (
                f"using {alias} = {declaration['type'].strip()}{parts['extents']}; "
                f"threadgroup {alias}& {parts['name']} = "
                f'*msl_threadgroup_variable<{alias}>({number}, "{parts["name"]}");'
            )
            number += 1
        missing_lines = text[match.start() : end + 1].count("\n") - replacement.count("\n")
        pieces += [text[done : match.start()], replacement, "\n" * missing_lines]
        done = end + 1
    return "".join(pieces) + text[done:]


def _statement_end(clean: str, start: int) -> int:
    """Index of the semicolon that ends the statement."""
    depth = 0
    for i in range(start, len(clean)):
        if clean[i] == ";" and depth == 0:
            return i
        depth += (clean[i] in "([{") - (clean[i] in ")]}")
    return len(clean)


def _split_at_commas(text: str) -> list[str]:
    """Cuts at the commas outside all brackets."""
    depth, parts = 0, [""]
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
