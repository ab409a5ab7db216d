"""`python -m wyfast_lib doctor --npu-report`: accuracy and wall-clock time of the Ascend kernels on an NPU.

Written for whoever has an NPU; untested on hardware. Its logic is tested with the `lowered` backend, whose
times mean nothing. Rows carry their provenance (device, versions, command).
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections.abc import Callable, Sequence

#: The backward table of the source document (float32, K = V = 128, BT = 64, B = 1).
SOURCE_SHAPES = (
    dict(T=4096, H=32, Hg=32),
    dict(T=8192, H=32, Hg=32),
    dict(T=32768, H=32, Hg=32),
    dict(T=32768, H=32, Hg=8),
    dict(T=65536, H=16, Hg=16),
)
WIDE = dict(K=128, V=128, BT=64)
ACCURACY = dict(B=1, T=160, K=64, V=64, BT=64)
HEADS = {"MHA": dict(H=4, Hg=4), "GQA": dict(H=4, Hg=2), "MQA": dict(H=4, Hg=1)}
WARM_UP, REPEATS = 3, 10
COLUMNS = (
    "suite", "phase", "shape", "dtype", "metric", "unit", "value", "limit", "passed",
    "device", "driver", "backend", "torch", "triton", "commit", "date", "command",
)  # fmt: skip


def report(
    backend: str = "ascend",
    device: str = "npu",
    *,
    timed_shapes: Sequence[dict] | None = None,
    widths: dict = WIDE,
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16"),
) -> list[dict]:
    """All rows: accuracy of every output, strided against contiguous times, the source's backward table.

    timed_shapes, widths: other sizes than the source document's, for a test. Progress goes to stderr.

    Raises:
        BackendUnavailable: the backend cannot run here; the message says why.
    """
    from wyfast_lib import backends, records

    backends.pick(device, backend)
    shapes = SOURCE_SHAPES if timed_shapes is None else timed_shapes
    rows = []
    for dtype in dtypes:
        for heads in HEADS:
            for packed in (False, True):
                rows += accuracy(backend, device, dtype, heads, packed)
    rows += layouts(backend, device, shapes[0], widths)
    for sizes in shapes:
        rows.append(backward_time(backend, device, sizes, widths))
    common = {**records.provenance(), "device": _device_name(device), "backend": backend,
              "triton": _triton()}  # fmt: skip
    return [{**dict.fromkeys(COLUMNS, ""), **row, **common} for row in rows]


def accuracy(backend: str, device: str, dtype: str, heads: str, packed: bool) -> list[dict]:
    """Error ratio of w, u, dk, dv, dbeta, dg against the float64 reference on the same rounded inputs."""
    import torch

    from wyfast_lib import prepare_chunks, wy_fast
    from wyfast_lib.inputs import Shape, make_inputs
    from wyfast_lib.reference import wy_adjoint_reference, wy_fast_reference
    from wyfast_lib.testing import TOLERANCE, error_ratio

    sizes = {**ACCURACY, **HEADS[heads]}
    cu = torch.tensor([0, 5, 70, 70, sizes["T"]]) if packed else None
    chunks = None if cu is None else prepare_chunks(cu, sizes["BT"])
    kind = getattr(torch, dtype)
    x = make_inputs(Shape(**sizes), kind, chunks=chunks)  # on the CPU, where the reference has its float64
    expected = wy_fast_reference(*x.call, cu_seqlens=cu)
    random = torch.Generator().manual_seed(1)
    dw, du = (torch.randn(y.shape, generator=random).to(kind) for y in expected)
    expected = (*expected, *wy_adjoint_reference(*x.call, dw, du, cu_seqlens=cu))
    leaves = [y.to(device).requires_grad_(n != 3) for n, y in enumerate(x.call)]
    table = None if cu is None else prepare_chunks(cu.to(device), sizes["BT"])
    outputs = wy_fast(*leaves, cu_seqlens=table, backend=backend)
    wanted = [leaves[n] for n in (0, 1, 2, 4)]
    results = (*outputs, *torch.autograd.grad(outputs, wanted, (dw.to(device), du.to(device))))
    shape, rows = f"{heads} {'varlen' if packed else 'dense'}", []
    for name, got, true in zip(("w", "u", "dk", "dv", "dbeta", "dg"), results, expected, strict=True):
        error, limit = error_ratio(got, true), TOLERANCE[kind]
        rows.append({"suite": "accuracy", "phase": name, "shape": shape, "dtype": dtype,
                     "metric": "error_ratio", "unit": "1", "value": error, "limit": limit,
                     "passed": error <= limit})  # fmt: skip
    _progress(f"accuracy {dtype} {shape}")
    return rows


def layouts(backend: str, device: str, sizes: dict, widths: dict) -> list[dict]:
    """Time of each kernel with gates stored [B, H, T] and [B, T, H], host transposes not counted."""
    from wyfast_lib import backends
    from wyfast_lib.backends import ascend_plan as plan

    module = backends.load(backend)
    k, v, beta, A, g, dw, du = _inputs(sizes, widths, "bfloat16", device)
    rows = []
    for label, layout in (("contiguous", plan.Layout()), ("strided", plan.Layout(*[False] * 4))):
        forward = plan.plan_forward(k, v, beta, A, g, None, None, module.device(), layout)[0]
        backward = plan.plan_backward(k, v, beta, A, g, dw, du, None, module.device(), layout)[0]
        for phase, launch in (("forward", forward), ("backward", backward)):
            ms = median_ms(lambda launch=launch: module.execute(launch), device)
            rows.append({"suite": "layout", "phase": phase, "shape": name(sizes), "dtype": dtype_of(k),
                         "metric": f"{label}_median", "unit": "ms", "value": ms})  # fmt: skip
            _progress(f"{label} {phase}: {ms:.3f} ms")
    return rows


def backward_time(backend: str, device: str, sizes: dict, widths: dict) -> dict:
    """Median time of one backward in float32 by the source document's protocol."""
    from wyfast_lib import backends

    module = backends.load(backend)
    x = _inputs(sizes, widths, "float32", device)
    ms = median_ms(lambda: module.backward(*x, None), device)
    _progress(f"backward {name(sizes)}: {ms:.3f} ms")
    return {"suite": "source_table", "phase": "backward", "shape": name(sizes), "dtype": dtype_of(x[0]),
            "metric": "median", "unit": "ms", "value": ms}  # fmt: skip


def name(sizes: dict) -> str:
    """As the source document names a shape: T=32K H=32 GQA-4:1."""
    T, H, Hg = sizes["T"], sizes["H"], sizes["Hg"]
    length = f"{T // 1024}K" if T % 1024 == 0 else T
    return f"T={length} H={H} {'MHA' if H == Hg else f'GQA-{H // Hg}:1'}"


def dtype_of(x) -> str:
    """Its dtype, as rows name it."""
    return str(x.dtype).removeprefix("torch.")


def median_ms(run: Callable[[], object], device: str) -> float:
    """Median of REPEATS calls after WARM_UP others, in ms, waiting for the device around each."""
    import torch

    def wait():
        if device != "cpu":
            getattr(torch, device).synchronize()

    for _ in range(WARM_UP):
        run()
    samples = []
    for _ in range(REPEATS):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        samples.append(1000 * (time.perf_counter() - begin))
    return statistics.median(samples)


def write(rows: list[dict], file) -> None:
    """The rows as CSV."""
    out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    out.writeheader()
    out.writerows(rows)


def main() -> int:
    """Print the report as CSV; status 1 when the NPU cannot be used or a result is wrong."""
    from wyfast_lib.backends import BackendUnavailable

    try:
        rows = report()
    except BackendUnavailable as problem:
        print(problem, file=sys.stderr)
        return 1
    write(rows, sys.stdout)
    return 0 if all(row["passed"] is not False for row in rows) else 1


def _inputs(sizes: dict, widths: dict, dtype: str, device: str) -> list:
    """k, v, beta, A, g, dw, du of the realistic distribution, on the device."""
    import torch

    from wyfast_lib.inputs import Shape, make_inputs

    shape = Shape(B=1, **sizes, **widths)
    x = make_inputs(shape, getattr(torch, dtype))
    dw = torch.randn(1, shape.T, shape.H, shape.K).to(x.k.dtype)
    du = torch.randn(1, shape.T, shape.H, shape.V).to(x.k.dtype)
    return [y.to(device) for y in (*x.call, dw, du)]


def _device_name(device: str) -> str:
    import torch

    return "cpu" if device == "cpu" else getattr(torch, device).get_device_name(0)


def _triton() -> str:
    """Both packages that install `triton`, with their versions."""
    from importlib import metadata

    names = [name for name in ("triton-ascend", "triton") if _installed(metadata, name)]
    return " ".join(f"{name} {metadata.version(name)}" for name in names)


def _installed(metadata, name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _progress(text: str) -> None:
    print(text, file=sys.stderr)
