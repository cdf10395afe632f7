"""What Metal or MLX refuse and a C++ compiler would let pass, found in the text.

In: the cut text of a kernel. Out: one sentence for each thing found, with file and line. Address spaces that are
wrong, not missing, are found by the lint build (toolchain.py), which knows types.
"""

import re
from collections.abc import Iterator

from tests.metal_emulator.export import KernelText
from tests.metal_emulator.translate import Names, blank_comments

_BUFFER_LIMIT = 31

# pattern -> why it is refused
_FORBIDDEN = {
    r"\bstd::": "std:: does not exist in Metal",
    r"\b(?:new|delete|throw|try|catch|goto|typeid|dynamic_cast|virtual|thread_local)\b": "not part of Metal",
    r"#\s*include\s*<(?!metal)": "only metal_* headers exist where MLX compiles",
    r"\bdouble\b": "double does not exist in Metal",
    r"\(\s*(?:half|float|bfloat|u?int|u?char|u?short)[234]\s*\)": "C-style vector cast: write type(x)",
    r"\bstatic\s+(?!_?assert|constexpr|inline|const\w*\s+constexpr)(?=\w[\w\s]*[=\[;])": "static local variable",
}
# a pointer or reference declaration whose type is a scalar, a vector or a template parameter
_POINTER = re.compile(
    r"(?<![\w>])(?:float|half|bfloat(?:16_t)?|float16_t|u?int(?:8|16|32|64)?(?:_t)?|u?char|u?short|u?long|bool|T|U"
    r"|[A-Z]\w*T|vec\s*<[^<>]*>|(?:u?int|u?short|u?char|float|half|bfloat)[234])"
    r"\s*(?:const\s*)?[*&]\s*(?:const\s+)?[A-Za-z_]\w*\s*(?=[=;,)\[])"
)
_ADDRESS_SPACE_OR_EXPRESSION = re.compile(
    r"\b(device|constant|threadgroup|thread|return|case)\b|[=+\-/%<>!?:]"
)


def lint(text: KernelText, names: Names) -> list[str]:
    """Everything found in header and body, in this order."""
    found = [*_lint_part(text.header, names.header), *_lint_part(text.body, names.body)]
    buffers = [p for p in text.parameters if p.is_buffer]
    if len(buffers) > _BUFFER_LIMIT:
        found.append(f"{len(buffers)} buffer arguments: Metal takes {_BUFFER_LIMIT}")
    clean = blank_comments(text.body)
    for parameter in text.parameters:
        if not parameter.is_buffer:
            local = re.search(rf"\b(?:u?int|auto|uint3|const)\s+{parameter.name}\b", clean)
            if local:
                line = 1 + clean.count("\n", 0, local.start())
                found.append(
                    f"{names.body}:{line}: a local variable `{parameter.name}` collides with the thread "
                    "attribute of that name, which MLX makes a parameter"
                )
    return found


def _lint_part(text: str, name: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.isascii():
            yield f"{name}:{number}: non-ASCII character (MLX hands the text over as ASCII)"
    clean = blank_comments(text)

    def place(match: re.Match[str]) -> str:
        return f"{name}:{1 + clean.count(chr(10), 0, match.start())}: `{match[0].strip()}`"

    for pattern, reason in _FORBIDDEN.items():
        for match in re.finditer(pattern, clean):
            yield f"{place(match)}: {reason}"
    for match in _POINTER.finditer(clean):
        start = max(clean.rfind(c, 0, match.start()) for c in ";{}(,") + 1
        before = clean[start : match.start()]
        declares = not re.search(r"[\w)]\s*$", re.sub(r"\b(const|volatile)\b", "", before))
        if declares and not _ADDRESS_SPACE_OR_EXPRESSION.search(before):
            yield f"{place(match)}: a pointer or reference needs an address space"
