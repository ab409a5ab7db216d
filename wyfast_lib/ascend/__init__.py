"""Compile, audit and run any Triton kernel through the real Ascend compiler, on a machine without an NPU."""

from wyfast_lib.ascend.audit import Audit, audit
from wyfast_lib.ascend.compile import Compiled, compile_kernel
from wyfast_lib.ascend.errors import (
    CompileError,
    MemoryOverflowError,
    ToolchainMissing,
    UBOverflowError,
    WorkerCrashed,
)
from wyfast_lib.ascend.run import run

__all__ = [
    "Audit",
    "CompileError",
    "Compiled",
    "MemoryOverflowError",
    "ToolchainMissing",
    "UBOverflowError",
    "WorkerCrashed",
    "audit",
    "compile_kernel",
    "run",
]
