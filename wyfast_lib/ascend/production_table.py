"""The production kernels as a table, or as the rows of data/ascend_compile.csv:
`python -m wyfast_lib ascend [--kernel NAME] [--target T] [--json] [--csv FILE]`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from wyfast_lib import records
from wyfast_lib.ascend import compile_records, production
from wyfast_lib.ascend.errors import CompileError, WorkerCrashed
from wyfast_lib.ascend.production import NAMES, TARGETS


def main(args: argparse.Namespace) -> int:
    """Compile the production kernels at K = V = 128 and print the table; status 1 if one does not fit.

    args: kernel (a part of its name, or None), target (default Ascend910B2), json, csv (a file to write all
    rows to instead of a table, the peer's beside ours; both generations unless a target is given). Progress
    goes to stderr.
    """
    kernels = [name for name in NAMES if not args.kernel or args.kernel in name]
    if not kernels:
        print(f"--kernel: expected a part of {' or '.join(NAMES)}, got {args.kernel!r}", file=sys.stderr)
        return 1
    if args.target not in (None, *TARGETS):
        print(f"--target: expected one of {', '.join(TARGETS)}, got {args.target!r}", file=sys.stderr)
        return 1
    if args.csv and (args.kernel or args.json):
        print("--csv writes the rows of every kernel: give it without --kernel and --json", file=sys.stderr)
        return 1
    if args.csv:
        targets = (args.target,) if args.target else TARGETS
        rows = [row for target in targets for row in compile_records.records(target)]
        records.write(args.csv, rows)
        return 0
    todo = production.cases(kernels, (args.target or TARGETS[0],), widths=(128,))
    rows, failures = [], []
    for number, case in enumerate(todo, 1):
        begin = time.perf_counter()
        try:
            rows.append(production.count(case, production.build(case)))
        except (CompileError, WorkerCrashed) as problem:
            failures.append(str(case))
            print(f"{case}: {problem}", file=sys.stderr)
        seconds = time.perf_counter() - begin
        print(f"[{number}/{len(todo)}] {case}: {seconds:.1f} s", file=sys.stderr)
    print(json.dumps({"rows": rows, "failures": failures}, indent=1) if args.json else table(rows))
    return 1 if failures else 0


def table(rows: list[dict]) -> str:
    """The rows of `count` as aligned text; sizes in KiB a chunk and head."""
    sizes = ("argument_bytes", "ideal_bytes", "workspace_bytes", "global_bytes", "ub_peak")
    columns = ("arguments", "ideal", "workspace", "total", "UB peak")
    columns += ("bursts", "sync", "discrete", "split", "retries")
    width = max([len(row["case"]) for row in rows] + [4])
    lines = [" ".join([f"{'case':{width}}", *(f"{name:>9}" for name in columns)])]
    for row in rows:
        rest = [f"{row[name]:9.0f}" for name in ("bursts", "sync_instructions", "discrete_calls")]
        split = {True: "yes", False: "NO", None: "-"}[row["split"]]
        cells = [*(f"{row[name] / 1024:9.1f}" for name in sizes), *rest, f"{split:>9}", f"{row['retries']:9}"]
        lines.append(" ".join([f"{row['case']:{width}}", *cells]))
    return "\n".join(lines)
