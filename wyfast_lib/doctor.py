"""`python -m wyfast_lib doctor`: what works on this machine, and a numeric check that it works right.

Nothing here may end in a traceback: a doctor who faints is no help. So everything that can fail (torch
itself, a broken torch_npu, a triton that another package overwrote) is asked through `attempt`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import sys
import warnings
from collections.abc import Callable
from importlib import metadata

from wyfast_lib.version import __version__

PACKAGES = ("torch", "triton", "triton-ascend", "torch-npu", "numpy", "matplotlib", "jupyterlab", "nbmake")
CHECK_DTYPES = ("float32", "bfloat16")
CHECK_SHAPE = {"B": 1, "T": 160, "H": 4, "Hg": 2, "K": 64, "V": 64, "BT": 64}  # ragged: 160 = 64 + 64 + 32
TF32_LIMIT = 2e-3  # float32 on cuda with WYFAST_FLOAT32_PRECISION=tf32, about 3e-4
VARIABLES = {
    "WYFAST_ASCEND_TOOLCHAIN",
    "WYFAST_BACKEND",
    "WYFAST_CACHE",
    "WYFAST_COMMIT",
    "WYFAST_FIGURES",
    "WYFAST_FLOAT32_PRECISION",
    "WYFAST_LOWERED_TARGET",
}
OWN_DEVICE = {"cuda": "cuda", "ascend": "npu", "lowered": "cpu"}  # the torch backend runs on all of them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--npu-report", action="store_true", help="on an NPU: accuracy and times of every kernel, as CSV"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command; 0 when torch imports, every check passed and every WYFAST_* variable fits, else 1."""
    if args.npu_report:
        from wyfast_lib import npu_report

        return npu_report.main()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = examine()
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0 if report["ok"] else 1


def examine() -> dict:
    """Look at everything; returns the report that `--json` prints."""
    report = {
        "wyfast": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in PACKAGES},
        "environment": {
            k: os.environ[k] for k in sorted(os.environ) if k.startswith(("WYFAST_", "TORCH_DEVICE"))
        },
        "imports": {},
        "devices": {},
        "backends": [],
        "settings": [],
    }
    for module in ("torch", "triton", "torch_npu"):
        if module == "torch" or report["packages"][module.replace("_", "-")] or module in sys.modules:
            _, problem = attempt(importlib.import_module, module)
            report["imports"][module] = problem
    torch_works = report["imports"]["torch"] is None
    if torch_works:
        devices, problem = attempt(lambda: importlib.import_module("wyfast_lib.devices").device_names())
        report["devices"] = devices or {"cpu": f"only the CPU: {problem}"}
        names, _ = attempt(lambda: importlib.import_module("wyfast_lib.backends").NAMES)
        report["backends"] = [examine_backend(name, report["devices"]) for name in names or ()]
        report["settings"] = setting_problems(report)
    checks = [check for backend in report["backends"] for check in backend["checks"]]
    passed = bool(checks) and all(check["passed"] for check in checks)
    report["ok"] = torch_works and passed and not report["settings"]
    report["hints"] = hints(report)
    return report


def attempt(function: Callable, *args):
    """(result, None), or (None, what went wrong in one line)."""
    try:
        return function(*args), None
    except (Exception, SystemExit) as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        return None, f"{type(error).__name__}: {first}"


def version(package: str) -> str | None:
    """The installed version, without importing the package."""
    return attempt(metadata.version, package)[0]


def examine_backend(name: str, devices: dict[str, str]) -> dict:
    """{name, available, reason, checks} of one backend; the checks run where it is available."""
    result, problem = attempt(lambda: importlib.import_module("wyfast_lib.backends").load(name).available())
    available, reason = result or (False, problem)
    if problem and problem.startswith("ModuleNotFoundError: No module named 'wyfast_lib"):
        reason = "not part of this version of wyfast"
    kinds = {OWN_DEVICE[name]} if name in OWN_DEVICE else {device.split(":")[0] for device in devices}
    present = [kind for kind in sorted(kinds) if any(device.split(":")[0] == kind for device in devices)]
    checks = [run_check(name, kind, dtype) for kind in present for dtype in CHECK_DTYPES] if available else []
    return {"name": name, "available": available, "reason": reason, "checks": checks}


def setting_problems(report: dict) -> list[str]:
    """What is wrong with the caller's WYFAST_* variables: each line is a reason not to be well."""
    found, backends = [], {backend["name"]: backend for backend in report["backends"]}
    forced, toolchain = (os.environ.get(name) for name in ("WYFAST_BACKEND", "WYFAST_ASCEND_TOOLCHAIN"))
    if forced and forced not in backends:
        found.append(f"WYFAST_BACKEND={forced}: every call raises, it must be one of {', '.join(backends)}")
    elif forced and not backends[forced]["available"]:
        found.append(f"WYFAST_BACKEND={forced}: every call raises, {backends[forced]['reason']}")
    elif forced and not backends[forced]["checks"]:
        found.append(f"WYFAST_BACKEND={forced}: nothing could be checked, it has no device here")
    if toolchain and "lowered" in backends and not backends["lowered"]["available"]:
        found.append(f"WYFAST_ASCEND_TOOLCHAIN={toolchain}: {backends['lowered']['reason']}")
    _, problem = attempt(lambda: importlib.import_module("wyfast_lib.precision").current())
    if problem:
        found.append(f"every call raises {problem}")
    target = os.environ.get("WYFAST_LOWERED_TARGET")
    if target and "lowered" in backends and backends["lowered"]["available"]:
        _, problem = attempt(lambda: importlib.import_module("wyfast_lib.backends.lowered").device())
        found += [f"WYFAST_LOWERED_TARGET={target}: {problem}"] if problem else []
    return found


def run_check(backend: str, device: str, dtype: str) -> dict:
    """One forward and backward against the float64 reference.

    Returns:
        {device, dtype, limit, errors: {output or gradient: error ratio}, problem, passed}
    """
    result, problem = attempt(self_check, backend, device, dtype)
    errors, limit = result or ({}, None)
    if not all(map(math.isfinite, errors.values())):  # JSON has no infinity either
        problem = "NaN or infinity in " + ", ".join(n for n, e in errors.items() if not math.isfinite(e))
        errors = {n: e for n, e in errors.items() if math.isfinite(e)}
    passed = problem is None and all(error <= limit for error in errors.values())
    return {
        "device": device,
        "dtype": dtype,
        "limit": limit,
        "errors": errors,
        "problem": problem,
        "passed": passed,
    }


def self_check(backend: str, device: str, dtype: str) -> tuple[dict[str, float], float]:
    """Error ratios of w, u, dk, dv, dbeta and dg on a small ragged GQA call, and the limit for this dtype."""
    import torch

    from wyfast_lib import precision, wy_fast
    from wyfast_lib.inputs import Shape, make_inputs
    from wyfast_lib.reference import wy_adjoint_reference, wy_fast_reference
    from wyfast_lib.testing import TOLERANCE, error_ratio

    kind = getattr(torch, dtype)
    x = make_inputs(Shape(**CHECK_SHAPE), kind)  # on the CPU, where the reference has its float64
    random = torch.Generator().manual_seed(1)
    dw, du = (torch.randn(*s.shape, generator=random).to(kind) for s in wy_fast_reference(*x.call))
    expected = (*wy_fast_reference(*x.call), *wy_adjoint_reference(*x.call, dw, du))

    y = x.to(device).requires_grad_()
    outputs = wy_fast(*y.call, backend=backend)
    gradients = torch.autograd.grad(outputs, (y.k, y.v, y.beta, y.g), (dw.to(device), du.to(device)))
    names = ("w", "u", "dk", "dv", "dbeta", "dg")
    errors = {n: error_ratio(a, b) for n, a, b in zip(names, (*outputs, *gradients), expected, strict=True)}
    tf32 = backend == "cuda" and kind == torch.float32 and precision.current() == "tf32"
    return errors, TF32_LIMIT if tf32 else TOLERANCE[kind]


def hints(report: dict) -> list[str]:
    """What to do about what was found, most urgent first."""
    unknown = [
        f"{name} is no variable of wyfast, it has no effect; there are {', '.join(sorted(VARIABLES))}"
        for name in report["environment"]
        if name.startswith("WYFAST_") and name not in VARIABLES
    ]
    return [*install_hints(report["packages"], report["imports"]), *backend_hints(report), *unknown]


def install_hints(packages: dict[str, str | None], imports: dict[str, str | None]) -> list[str]:
    """About packages that are missing, broken, or in each other's way."""
    found = []
    torch_problem = imports["torch"] or ""
    if "backend extension" in torch_problem:
        found.append(
            "an installed torch_npu stops `import torch` because CANN is not here: set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0, or uninstall torch_npu"
        )
    elif "No module named 'torch'" in torch_problem:
        found.append(
            "PyTorch is not installed: `make env` in the clone, or `pip install -r requirements.txt`"
        )
    elif torch_problem:
        found.append("`import torch` fails, so nothing else was checked: reinstall it in a clean environment")
    if packages["triton"] and packages["triton-ascend"]:
        found.append(
            "triton and triton-ascend are in one environment and overwrite each other's files: uninstall "
            "both, `pip install triton` again; `python -m wyfast_lib ascend install` keeps the other apart"
        )
    if imports.get("triton"):
        found.append("`import triton` fails: `pip install --force-reinstall triton`")
    if imports.get("torch_npu"):
        found.append(
            "torch_npu is installed but does not load (no CANN here, or its set_env.sh was not sourced): "
            "keep TORCH_DEVICE_BACKEND_AUTOLOAD=0 on this machine"
        )
    return found


def backend_hints(report: dict) -> list[str]:
    """About devices whose own backend cannot run, and checks that failed."""
    found = []
    kinds = {device.split(":")[0] for device in report["devices"]}
    for backend in report["backends"]:
        name, kind = backend["name"], OWN_DEVICE.get(backend["name"])
        if kind != "cpu" and kind in kinds and not backend["available"]:
            found.append(
                f"wy_fast on {kind} tensors raises until this is solved: {backend['reason']}; "
                "backend='torch' runs there"
            )
        for check in backend["checks"]:
            if not check["passed"] and not report["settings"]:  # of a wrong setting there is no more to say
                found.append(
                    f"do not trust backend {name!r} on {check['device']} in {check['dtype']}; please report "
                    "it with the output of `python -m wyfast_lib doctor --json`"
                )
    return found


def render(report: dict) -> str:
    """The report for people."""
    installed = [f"{name} {number}" for name, number in report["packages"].items() if number]
    lines = [
        f"wyfast {report['wyfast']}, Python {report['python']}, {report['platform']}",
        f"packages   {', '.join(installed)}",
    ]
    lines += [f"import     {name} fails: {why}" for name, why in report["imports"].items() if why]
    lines += [f"variable   {name}={value}" for name, value in report["environment"].items()]
    lines += [f"setting    {text}" for text in report["settings"]]
    lines += [f"device     {name}: {text}" for name, text in report["devices"].items()]
    for backend in report["backends"]:
        state = "available" if backend["available"] else "not available"
        lines.append(f"backend    {backend['name']}: {state} ({backend['reason']})")
        lines += [f"  check    {render_check(check)}" for check in backend["checks"]]
    lines += [f"hint       {text}" for text in report["hints"]]
    lines.append("all checks passed" if report["ok"] else "NOT WELL: see above")
    return "\n".join(lines)


def render_check(check: dict) -> str:
    """One line: where, pass or FAIL, the largest error ratio and its limit."""
    where = f"{check['device']} {check['dtype']}:"
    if check["problem"]:
        return f"{where} FAIL, {check['problem']}"
    name, worst = max(check["errors"].items(), key=lambda item: item[1])
    verdict = "pass" if check["passed"] else "FAIL"
    return f"{where} {verdict}, largest error ratio {worst:.1e} ({name}), limit {check['limit']:.0e}"
