"""`python -m wyfast_lib profile KERNEL|FILE.py:KERNEL ...`: where a kernel's time goes, before and after.

python -m wyfast_lib profile chunk_bwd_dv_local_kernel --shape B=2,T=2048,H=8,Hg=4,K=64,V=64 \\
    --flag G_T_CONTIG=0,1 --out build/dv_local
python -m wyfast_lib profile mine.py:gate_kernel --shape T=4096,H=32,BT=64 --arg "g=fp32[T, H]" \\
    --arg "y=fp32[T, H]" --grid "cdiv(T, BT), H" --flag G_T_CONTIG=0,1
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

KERNEL_HELP = (
    "recompute_w_u_fwd_kernel, prepare_wy_repr_bwd_kernel, chunk_bwd_dv_local_kernel, or FILE.py:KERNEL for "
    "a kernel of your own"
)
SHAPE_HELP = (
    "sizes as T=4096,H=32 (of ours: B, T, H, Hg, K, V, BT, those left out as in a training shape), or a name "
    "such as train-8k"
)
ARG_HELP = (
    "of a kernel of your own: NAME=bf16[T, H] a tensor of these sizes, NAME=i64(0, T) one of these values, "
    "NAME=EXPRESSION a number; names of --shape and --flag fill parameters of theirs"
)
CSV_HELP = (
    "measured elsewhere: op_summary_*.csv (msprof), kernel_details.csv (torch_npu) or ncu --csv; the n-th is "
    "of the n-th variant, files of several groups joined by commas"
)
METRICS_HELP = (
    "groups of counters by msprof's names, one run each: PipeUtilization (default), ArithmeticUtilization, "
    "Memory, MemoryL0, MemoryUB, ResourceConflictRatio, L2Cache; on a GPU ncu's counters of them"
)
EPILOG = """\
A file may say by itself what its kernel is launched with, in place of --arg and --grid:

    def profile_case(shape, device, **flags):      # or profile_case_KERNEL
        g = torch.randn(shape["T"], shape["H"], device=device)
        return {"args": {"g": g, "y": torch.empty_like(g), "T": shape["T"]},
                "constexprs": {"HV": shape["H"], "BT": 64, **flags},
                "grid": (-(-shape["T"] // 64), shape["H"])}

On an NPU the times are measured by its profilers, on a GPU by CUDA graphs and ncu, without either they are
modelled from the compiled Ascend code; the column `source` of the report says which: measured, modelled, or
published by others. A flag with two values gives two variants and the factor between them. The code that
drives the NPU's profilers has not been run on hardware.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `profile`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("kernel", help=KERNEL_HELP)
    parser.add_argument("--shape", default="", help=SHAPE_HELP)
    parser.add_argument("--dtype", default="bfloat16", help="float32, float16, bfloat16 (default)")
    parser.add_argument("--lengths", default="", help="of ours: token counts of packed sequences, as 100,28")
    parser.add_argument("--flag", action="append", default=[], metavar="NAME=BEFORE,AFTER",
                        help="one value, or several: a variant each")  # fmt: skip
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=...", help=ARG_HELP)
    parser.add_argument("--grid", default="", help='of a kernel of your own: programs, as "cdiv(T, BT), H"')
    parser.add_argument("--metrics", help=METRICS_HELP)
    parser.add_argument("--on", default="", help="npu, gpu, model, or several joined by commas; default: the "
                        "device that is there, else the model")  # fmt: skip
    parser.add_argument("--tool", choices=("torch_npu", "msprof"), default="torch_npu", help="on an NPU")
    parser.add_argument("--target", default="Ascend910B2", help="chip of the model: Ascend910B2 (default) or "
                        "Ascend950PR_9589")  # fmt: skip
    parser.add_argument("--launches", type=int, default=10, help="recorded a variant by a profiler (10)")
    parser.add_argument("--csv", action="append", default=[], metavar="FILE", help=CSV_HELP)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write report.txt, report.json, profile.svg "
                        "and .png there; the tools' own files stay there too")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--commands", action="store_true", help="print the command lines of msprof and ncu "
                        "for every variant and run nothing; needs --out for the files they read")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Run the command. Expected errors are one line on stderr and status 1."""
    from wyfast_lib.ascend.errors import CompileError, ToolchainMissing
    from wyfast_lib.profile.request import ProfileError

    try:
        return _run(args)
    except (ProfileError, CompileError, ToolchainMissing, ValueError) as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    from wyfast_lib.profile import run
    from wyfast_lib.profile.request import ProfileError, Request, parse_flags, parse_lengths, parse_shape

    if args.launches < 1:
        raise ProfileError(f"--launches: expected at least 1, got {args.launches}")
    request = Request(
        args.kernel, parse_shape(args.shape), dtype=args.dtype, lengths=parse_lengths(args.lengths),
        arguments=tuple(args.arg), grid=args.grid, target=args.target,
    )  # fmt: skip
    flags = parse_flags(args.flag)
    if args.commands:
        return _print_commands(args, request.variants(flags))
    report = run.profile(
        request, flags, groups=args.metrics, on=[p.strip() for p in args.on.split(",") if p.strip()],
        tool=args.tool, launches=args.launches, measured=args.csv, folder=args.out,
    )  # fmt: skip
    text = json.dumps(report.to_dict(), indent=1)
    print(text if args.json else report)
    if args.out:
        from wyfast_lib.profile import figure

        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "report.json").write_text(text + "\n")
        (args.out / "report.txt").write_text(f"{report}\n")
        figure.save(report, args.out.resolve())
        print(f"written: {args.out}/report.txt, report.json, profile.svg, profile.png", file=sys.stderr)
    return 0


def _print_commands(args: argparse.Namespace, requests: list) -> int:
    from wyfast_lib.profile import gpu, metrics, npu, targets
    from wyfast_lib.profile.request import ProfileError

    if args.out is None:
        raise ProfileError("--commands needs --out: the tools read the requests from files there")
    groups = metrics.groups(args.metrics)
    for number, request in enumerate(requests):
        targets.is_ours(request)
        for group in groups:
            folder = args.out / f"msprof-{number}-{group}"
            print(shlex.join(npu.msprof_command(request, group, args.launches, folder)))
        if counters := metrics.of_gpu(groups):
            print(shlex.join(gpu.commands(request, counters, args.launches, args.out / f"ncu-{number}")))
    return 0
