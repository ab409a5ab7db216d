"""`python -m wyfast_lib ascend ...`: compile the production kernels and print what they move, install the
toolchain, compile or audit a kernel of the reader's own.

python -m wyfast_lib ascend --kernel bwd
python -m wyfast_lib ascend install
python -m wyfast_lib ascend audit my_kernels.py:scale --signature "x=*bf16, y=*bf16, T=i32" --constexpr BT=64
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

KERNEL_HELP = "package.module:kernel or file.py:kernel"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands on the parser of `ascend`."""
    parser.add_argument("--kernel", metavar="NAME", help="only production kernels whose name holds NAME")
    parser.add_argument("--target", help="Ascend910B2 (default; both with --csv) or Ascend950PR_9589")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write counts of our kernels and the peer's (needs fla-core)"
    )
    commands = parser.add_subparsers(dest="ascend_command", metavar="COMMAND")
    commands.add_parser("install", help="install the pinned Ascend toolchain (0.95 GB) into the user's cache")
    commands.add_parser("where", help="say where the toolchain is, or why it is not there")
    for name, text in (
        ("compile", "compile a kernel and print what the compiler says about it"),
        ("audit", "compile a kernel and print every data movement of it"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("kernel", help=KERNEL_HELP)
        command.add_argument(
            "--signature",
            action="append",
            default=[],
            metavar="NAME=TYPE,...",
            help='run-time parameters and their types, such as "x=*bf16, T=i32"',
        )
        command.add_argument(
            "--constexpr",
            action="append",
            default=[],
            metavar="NAME=VALUE,...",
            help='constants, such as "BT=64, USE_G=True, gk=None"',
        )
        command.add_argument(
            "--target", default="Ascend910B2", help="Ascend910B2 (default) or Ascend950PR_9589"
        )
        command.add_argument(
            "--save", type=Path, metavar="DIR", help="write the ttir, linalg and hivm texts there"
        )
        command.add_argument(
            "--no-cache", action="store_true", help="compile even when a cached result exists"
        )
        if name == "audit":
            command.add_argument(
                "--at",
                action="append",
                default=[],
                metavar="NAME=VALUE,...",
                help='run-time values to evaluate sizes at, such as "T=4096, grid=(64, 32), program=(63, 0)"',
            )


def main(args: argparse.Namespace) -> int:
    """Run one sub-command; returns the exit status. Expected errors are one line on stderr and status 1."""
    from wyfast_lib.ascend import toolchain
    from wyfast_lib.ascend.errors import CompileError, ToolchainMissing

    try:
        if args.ascend_command is None:
            from wyfast_lib.ascend import production_table

            return production_table.main(args)
        if args.ascend_command == "install":
            toolchain.install()
            return 0
        if args.ascend_command == "where":
            ready, text = toolchain.available()
            print(text)
            return 0 if ready else 1
        compiled = _compile(args)
        if args.ascend_command == "compile":
            print(summary(compiled))
            return 0
        from wyfast_lib.ascend.audit import audit

        values = parse_values(args.at)
        print(audit(compiled, values) if values else audit(compiled))
        return 0
    except (CompileError, ToolchainMissing, ValueError, TypeError) as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        return 1


def _compile(args: argparse.Namespace):
    from wyfast_lib.ascend.compile import compile_kernel

    if "" not in sys.path:
        sys.path.insert(0, "")  # the reader's own module, in the folder where the command runs
    compiled = compile_kernel(
        args.kernel,
        parse_pairs(args.signature),
        parse_values(args.constexpr),
        args.target,
        cache=not args.no_cache,
    )
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
        for stage in ("ttir", "linalg", "hivm"):
            path = args.save / f"{compiled.kernel}.{stage}.mlir"
            path.write_text(getattr(compiled, stage), encoding="utf-8")
    return compiled


def parse_pairs(texts: list[str]) -> dict[str, str]:
    """{"x": "*bf16", "T": "i32"} from ["x=*bf16, T=i32"]; ":" works for "=". ValueError names a bad part."""
    pairs = {}
    for part in re.split(r",(?![^(\[]*[)\]])", ",".join(texts)):  # not inside (2, 32) or [0, 64]
        if not part.strip():
            continue
        name, sign, value = part.replace(":", "=", 1).partition("=")
        if not sign or not name.strip().isidentifier() or not value.strip():
            raise ValueError(f"expected NAME=VALUE, got {part.strip()!r}")
        pairs[name.strip()] = value.strip()
    return pairs


def parse_values(texts: list[str]) -> dict:
    """As `parse_pairs`, with Python literals as values; a word that is none stays a string."""
    values = {}
    for name, text in parse_pairs(texts).items():
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return values


def summary(compiled) -> str:
    """What the compiler says about a kernel, in a few lines."""
    kib = {
        "UB": compiled.ub_peak,
        "L1": compiled.l1_peak,
        "L0A": compiled.l0a_peak,
        "L0B": compiled.l0b_peak,
        "L0C": compiled.l0c_peak,
    }
    workspace = (
        "unknown" if compiled.workspace_bytes is None else f"{compiled.workspace_bytes / 1024:.1f} KiB"
    )
    kind = {"aiv": "vector only", "mix": "cube and vector"}.get(compiled.mix_mode, compiled.mix_mode)
    lines = [
        f"{compiled.kernel} for {compiled.target}: {kind}",
        "peak: " + ", ".join(f"{name} {size / 1024:.1f} KiB" for name, size in kib.items() if size),
        f"workspace between cube and vector, a program: {workspace}",
        f"retries with fewer optimisations: {compiled.retries}",
    ]
    if compiled.crashes:
        lines.append(f"the compiler crashed and was run again: {compiled.crashes} times")
    notes = [f"{'warning' if note in compiled.warnings else 'note'}: {note}" for note in compiled.notes]
    return "\n".join(lines + notes)
