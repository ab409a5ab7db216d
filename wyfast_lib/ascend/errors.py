"""The errors of the Ascend compiler package, apart so that the worker process can use them too."""

from __future__ import annotations

import re


class ToolchainMissing(RuntimeError):
    """The Ascend toolchain is not installed (or cannot be); the message names the command that installs
    it.
    """


class CompileError(RuntimeError):
    """A kernel did not pass the Ascend compiler, or could not be lowered for this CPU.

    `stage` says where: "kernel" (finding and importing it), "ttir", "linalg", "hivm" or "native" (lowered for
    this CPU, or running there). The message carries the last lines of the compiler's own output. `ttir` and
    `linalg` are the texts of the stages that the kernel did pass, "" otherwise.
    """

    def __init__(self, message: str, stage: str, ttir: str = "", linalg: str = "") -> None:
        super().__init__(message)
        self.stage, self.ttir, self.linalg = stage, ttir, linalg


class WorkerCrashed(CompileError):
    """The worker process died (signal, exit, timeout) while it compiled or ran a kernel.

    The next call starts a new worker, so one crash never spoils the session.
    """


class MemoryOverflowError(CompileError):
    """The tiles of a kernel do not fit a local memory of the AI core.

    Attributes: `kernel` (name), `target`, `space` ("ub", "cbuf" = L1, "cc" = L0C, ...), `required` and
    `available` in bytes, `constexprs` (the tile sizes that were asked for), `notes` (what the compiler
    tried before it gave up).
    """

    def __init__(
        self,
        kernel: str,
        target: str,
        space: str,
        required: int,
        available: int,
        constexprs: dict,
        notes: list[str],
    ) -> None:
        self.kernel, self.target, self.space = kernel, target, space
        self.required, self.available = required, available
        self.constexprs, self.notes = dict(constexprs), list(notes)
        super().__init__(self._describe(), "hivm")

    def __reduce__(self):
        """Made again from its own arguments, so that it crosses to another process."""
        sizes = self.required, self.available
        parts = self.kernel, self.target, self.space, *sizes, self.constexprs, self.notes
        return type(self), parts, {"ttir": self.ttir, "linalg": self.linalg}

    def _describe(self) -> str:
        sizes = {
            name: value
            for name, value in self.constexprs.items()
            if isinstance(value, int) and not isinstance(value, bool)
        }
        tiles = sorted((name for name, value in sizes.items() if value > 1), key=lambda name: -sizes[name])
        tiles = [name for name in tiles if name[0] == "B" and name[1:].isupper()] or tiles  # BT, BK, BV, ...
        shrink = " or ".join(tiles[:3]) if tiles else "the tiles"
        shown = ", ".join(f"{name}={value}" for name, value in sizes.items()) or "no integer constexprs"
        return (
            f"{self.kernel} needs {self.required / 1024:.1f} KiB of {SPACES.get(self.space, self.space)} on "
            f"{self.target}, which has {self.available / 1024:.1f} KiB ({shown}). Shrink {shrink}; or look "
            "for a padded tile: with an inner stride, a load or store takes a 32-byte block an element."
        )


class UBOverflowError(MemoryOverflowError):
    """The tiles of a kernel do not fit UB, the unified buffer of a vector core: see MemoryOverflowError."""


_NOISE = re.compile(r"#\d+ |Stack dump|PLEASE submit|.*Program arguments|.*\bhivmc|Extension modules:")


def last_lines(text: str, count: int = 12) -> str:
    """The last lines that say something: no stack frames of a compiler, no request for bug reports."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return "\n".join(([line for line in lines if not _NOISE.match(line.strip())] or lines)[-count:])


#: What the compiler's address spaces are called in the documentation of the chip.
SPACES = {"ub": "UB", "cbuf": "L1", "ca": "L0A", "cb": "L0B", "cc": "L0C"}
