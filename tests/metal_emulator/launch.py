"""One launch on the runtime: the structures of runtime/launch.h and the call.

In: a compiled kernel, its buffers, the grid and a seed. Out: nothing; the outputs are in the buffers, and a fault is
an exception.
"""

import ctypes
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.metal_emulator.memory import GuardedBuffer
from tests.metal_emulator.report import KernelFault, mark, resolve
from tests.metal_emulator.toolchain import runtime_library

_FINDINGS = 32
_OUTPUT, _INITIALISED = 1, 2
_RACE = 2
_running = threading.Lock()  # the runtime has room for one launch in a process

_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", _u64),
        ("item_bytes", _u32),
        ("flags", _u32),
        ("name", ctypes.c_char_p),
    ]


class _Finding(ctypes.Structure):
    _fields_ = [
        ("kind", _u32),
        ("times", _u32),
        ("code", _u64),
        ("other_code", _u64),
        ("text", ctypes.c_char * 360),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("grid", _u32 * 3),
        ("threadgroup", _u32 * 3),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", _u32),
        ("check", _u32),
        ("seed", _u64),
        ("poison", _u32),
        ("finding_room", _u32),
        ("findings", ctypes.POINTER(_Finding)),
        ("finding_count", _u32),
        ("reserved", _u32),
        ("simd_operations", _u64),
        ("barriers", _u64),
        ("threadgroup_bytes", _u64),
        ("error", ctypes.c_char * 1024),
    ]


@dataclass(frozen=True)
class Argument:
    """One buffer argument, in the order of the kernel's parameters."""

    name: str
    buffer: GuardedBuffer
    item_bytes: int
    output: bool = False
    initialised: bool = False  # an output that MLX fills before the launch


@dataclass(frozen=True)
class Counts:
    """What a launch did."""

    simd_operations: int
    barriers: int
    threadgroup_bytes: int


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """A compiled kernel, with the runtime loaded before it."""
    _runtime()
    return ctypes.CDLL(str(path))


@functools.cache
def _runtime() -> ctypes.CDLL:
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)
    sizes = [library.emu_struct_bytes(i) for i in range(3)]
    assert sizes == [ctypes.sizeof(s) for s in (_Launch, _Buffer, _Finding)], sizes
    return library


def launch(
    library: Path,
    arguments: Sequence[Argument],
    *,
    kernel: str,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    seed: int,
    poison: int,
    check: bool,
) -> Counts:
    """Runs the kernel over the whole grid.

    Raises:
        KernelFault: with everything that was found, if anything was.
    """
    buffers = (_Buffer * max(len(arguments), 1))()
    for slot, a in zip(buffers, arguments, strict=False):
        flags = (_OUTPUT if a.output else 0) | (_INITIALISED if a.initialised else 0)
        slot.data, slot.bytes, slot.item_bytes = a.buffer.address, a.buffer.size, a.item_bytes
        slot.flags, slot.name = flags, a.name.encode()
    findings = (_Finding * _FINDINGS)()
    record = _Launch(
        entry=ctypes.cast(load(library).emu_entry, ctypes.c_void_p).value,
        grid=grid,
        threadgroup=threadgroup,
        buffers=buffers,
        buffer_count=len(arguments),
        check=check,
        seed=seed,
        poison=poison,
        finding_room=_FINDINGS,
        findings=findings,
    )
    with _running:
        _runtime().emu_launch(ctypes.byref(record))
    faults = [record.error.decode()] if record.error else []
    faults += [_sentence(f) for f in findings[: record.finding_count]]
    faults += [f"write just outside buffer {a.name}" for a in arguments if not a.buffer.intact()]
    if faults:
        raise KernelFault(kernel, [resolve(f, library) + f" (seed {seed})" for f in faults])
    return Counts(record.simd_operations, record.barriers, record.threadgroup_bytes)


def _sentence(finding: _Finding) -> str:
    text = str(finding.text.decode())
    if finding.code:
        text += f" [{mark(finding.code)}"
        text += f", other access {mark(finding.other_code)}]" if finding.kind == _RACE else "]"
    return text + (f" (x{finding.times})" if finding.times > 1 else "")
