"""Buffers that notice when a kernel leaves them, also in builds without checks.

In: bytes, or a size. Out: memory whose end touches an inaccessible page (up to 15 bytes for alignment, which carry a
pattern), read-only for inputs and full of the pattern for outputs.
"""

import ctypes
import mmap
from typing import Self

_PAGE = mmap.PAGESIZE
_GUARD = 16 * _PAGE
_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_PRIVATE_ANONYMOUS = 0x22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class GuardedBuffer:
    """One buffer of a launch; release it with `with`."""

    def __init__(self, size: int, pattern: int, content: bytes | None = None):
        """Maps `size` bytes that hold `pattern`, or `content`, which the kernel then cannot write."""
        self.size = size
        self._pattern = bytes([pattern])
        span = -(-max(size, 1) // _PAGE) * _PAGE
        self._mapped = span + 2 * _GUARD
        self._base = _libc.mmap(None, self._mapped, _PROT_NONE, _MAP_PRIVATE_ANONYMOUS, -1, 0)
        if self._base in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"cannot map a buffer of {size} bytes")
        self._low = self._base + _GUARD
        self._high = self._low + span
        self.address = (self._high - max(size, 1)) // 16 * 16
        _libc.mprotect(self._low, span, _PROT_READ | _PROT_WRITE)
        ctypes.memset(self._low, pattern, span)
        if content is not None:
            ctypes.memmove(self.address, content, size)
            _libc.mprotect(self._low, span, _PROT_READ)

    def fill(self, content: bytes) -> None:
        """Overwrites the whole buffer."""
        ctypes.memmove(self.address, content, self.size)

    def read(self) -> bytes:
        """A copy of the content."""
        return ctypes.string_at(self.address, self.size)

    def intact(self) -> bool:
        """Nothing was written just outside."""
        end = self.address + self.size
        around = ctypes.string_at(self._low, self.address - self._low) + ctypes.string_at(
            end, self._high - end
        )
        return around.count(self._pattern) == len(around)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _libc.munmap(self._base, self._mapped)
