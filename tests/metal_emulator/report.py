"""How the emulator complains: code addresses become file and line, findings become one exception."""

import re
import shutil
import subprocess
from pathlib import Path

_MARK = re.compile(r"\{code:([0-9a-f]+)\}")


class KernelFault(AssertionError):
    """A kernel does not compile, or did something that Metal leaves undefined.

    Attributes:
        kernel: the kernel's name.
        findings: one sentence for each thing found, the reason why a run ended early first.
    """

    def __init__(self, kernel: str, findings: list[str]):
        super().__init__("\n  - ".join([f"{kernel}: {len(findings)} fault(s)", *findings]))
        self.kernel = kernel
        self.findings = tuple(findings)


def mark(code: int) -> str:
    """The text that `resolve` replaces: `code` is an address inside the kernel's shared object."""
    return f"{{code:{code:x}}}"


def resolve(text: str, library: Path) -> str:
    """Replaces each mark by `file.metal:line`.

    Of the functions that were inlined into one another at an address, the innermost that stands in a `.metal` file
    is named: where a library function of the shim touched memory, the kernel's call of it.
    """
    codes = list(dict.fromkeys(_MARK.findall(text)))
    if not codes:
        return text
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if tool is None:
        return _MARK.sub("an unknown line (install binutils for addr2line)", text)
    command = [tool, "-e", str(library), "-i", "-a", *(f"0x{code}" for code in codes)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    places: dict[int, list[str]] = {}
    frames: list[str] = []
    for line in output.splitlines():
        if line.startswith("0x"):
            frames = places.setdefault(int(line, 16), [])
        else:
            frames.append(Path(line.split(" (")[0]).name)
    return _MARK.sub(lambda match: _innermost(places[int(match[1], 16)]), text)


def _innermost(frames: list[str]) -> str:
    return next((frame for frame in frames if ".metal:" in frame), frames[0])
