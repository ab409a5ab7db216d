"""One launch of one kernel, whoever wrote it: what a compiler and a device need."""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`address`: "package.module:kernel" or "file.py:kernel". `args`: run-time arguments by name, tensors
    (those of floats may be without storage when nothing is launched) and numbers. `grid`: programs.
    """

    address: str
    args: dict
    constexprs: dict
    grid: tuple[int, ...]

    @property
    def signature(self) -> dict[str, str]:
        """Type of every run-time argument as Triton spells it."""
        return {name: type_of(name, value) for name, value in self.args.items()}

    def compile(self, target: str):
        """The kernel through the Ascend compiler -> `Compiled`; errors as of `compile_kernel`."""
        from wyfast_lib.ascend import compile_kernel

        return compile_kernel(self.address, self.signature, self.constexprs, target)


def type_of(name: str, value) -> str:
    """"*bf16" for a tensor of bfloat16, "i32" for an int, "fp32" for a float."""
    numbers = {bool: "i1", int: "i32", float: "fp32"}
    if type(value) in numbers:
        return "i64" if type(value) is int and not -(1 << 31) <= value < 1 << 31 else numbers[type(value)]
    spelled = {dtype: f"*{text}" for text, dtype in dtypes().items()}
    if getattr(value, "dtype", None) not in spelled:
        raise TypeError(f"{name}: expected a tensor or a number, got {type(value).__name__}")
    return spelled[value.dtype]


@functools.cache
def dtypes() -> dict:
    """Triton's name of an element type -> torch's."""
    import torch

    return {
        "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64,
        "i1": torch.bool, "i8": torch.int8, "u8": torch.uint8, "i16": torch.int16, "i32": torch.int32,
        "i64": torch.int64,
    }  # fmt: skip
