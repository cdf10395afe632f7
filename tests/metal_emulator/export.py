"""The text that the installed MLX generates around a kernel body, on any machine.

In: a kernel made by `mx.fast.metal_kernel` and the arguments of one call. Out: the text that MLX hands to the Metal
compiler for that call, cut into its parts. (On a Mac MLX puts its `utils.h` in front; the translation includes the
same file.) Nothing here knows MLX's rules for signatures: `mx.export_function` writes the generated text into its
file, also where there is no Metal.
"""

import re
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.metal_emulator.report import KernelFault

_NAME = b"custom_kernel_"  # how MLX begins the function name of every custom kernel
_WRAPPER = re.compile(
    r"(?P<template>template <[^\n]*>\n)?"
    r"\[\[kernel\]\] void (?P<function>\w+)\(\n"
    r"(?P<parameters>(?:  [^\n]+ \[\[[^\n]+\]\],?\n?)*)"
    r"\) \{\n"
)
_PARAMETER = re.compile(r"  (?P<type>.+?)(?P<reference>[*&]?) (?P<name>\w+) \[\[(?P<attribute>[^\]]+)\]\]")
_INSTANCE = re.compile(r"decltype\((?P<instance>[^\n]+)\) ")


@dataclass(frozen=True)
class Parameter:
    """One parameter of the generated kernel function."""

    name: str
    type: str  # without * or &, e.g. "const device float"
    reference: bool  # a scalar, passed as `T&`
    attribute: str  # "buffer(3)", or the name of a thread attribute

    @property
    def is_buffer(self) -> bool:
        return self.attribute.startswith("buffer(")


@dataclass(frozen=True)
class KernelText:
    """Generated text, cut: `header + signature + body + tail` is the whole, character for character."""

    header: str
    signature: str  # template line, function name and parameters, up to the opening brace
    body: str
    tail: str  # the closing brace and, for a template, its explicit instantiation
    instance: str  # the function as called: "custom_kernel_f_float_64<float, 64>"
    parameters: tuple[Parameter, ...]

    @property
    def whole(self) -> str:
        """The text as MLX exports it."""
        return self.header + self.signature + self.body + self.tail


def exported_text(kernel: Callable[..., list[mx.array]], inputs: Sequence[Any], **call: Any) -> str:
    """What MLX generates when `kernel` is called with `inputs` and `call`.

    Errors that MLX raises for wrong arguments pass through.
    """
    arrays = [x for x in inputs if isinstance(x, mx.array)]

    def launch(*traced: mx.array) -> list[mx.array]:
        rest = iter(traced)
        return kernel(inputs=[next(rest) if isinstance(x, mx.array) else x for x in inputs], **call)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.mlxfn"
        mx.export_function(str(path), launch, *arrays)
        blob = path.read_bytes()
    name = _read_string(blob, blob.index(_NAME) - 8)
    text = _read_string(blob, blob.index(_NAME) + len(name))
    return text.decode()


def _read_string(blob: bytes, at: int) -> bytes:
    (length,) = struct.unpack_from("<Q", blob, at)
    return blob[at + 8 : at + 8 + length]


def cut(text: str, *, kernel: str, header: str, source: str) -> KernelText:
    """The parts of a generated text.

    Raises:
        KernelFault: the signature is not one that can compile. MLX 0.32 closes the parameter list early for a kernel
            with several outputs and shape arguments that names no thread attribute.
    """
    wrapper = _WRAPPER.match(text, len(header))
    body_at = wrapper.end() if wrapper else 0
    if not wrapper or not text.startswith(header) or not text.startswith(source + "\n}\n", body_at):
        raise KernelFault(
            kernel,
            [
                "MLX generated a signature that does not compile: name at least one thread attribute in the body"
            ],
        )
    tail = text[body_at + len(source) :]
    instance = _INSTANCE.search(tail)
    return KernelText(
        header=header,
        signature=text[len(header) : body_at],
        body=source,
        tail=tail,
        instance=instance["instance"] if instance else wrapper["function"],
        parameters=tuple(
            Parameter(m["name"], m["type"], m["reference"] == "&", m["attribute"])
            for m in _PARAMETER.finditer(wrapper["parameters"])
        ),
    )
