"""The logic of the portable CUDA kernels, in Triton's interpreter: no GPU, float32 and float16 only."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wyfast_lib import backends

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

# The interpreter is chosen when triton is imported, so the cases run in a process of their own.
SCRIPT = """
import json, sys
import torch
from support import draw, run, reference
from wyfast_lib.backends import cuda
from wyfast_lib.testing import error_ratio, tolerance

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
out, table = {}, cuda.candidates
for name, case in json.loads(sys.argv[1]).items():
    tiles, gk = case.pop("tiles", None), case.pop("gk", False)
    half = case.pop("half", False)
    call = draw(**case, dtype=torch.float16 if half else torch.float32, gate_dtype=torch.float32)
    if gk:
        call.gk = -torch.rand(call.k.shape)
    cuda._plans.clear()
    cuda.candidates = table
    if tiles:
        cuda.candidates = lambda *_, t=tiles: (cuda.Tiles(*t[:2], KEEP_P=bool(t[2])),)
    results, expected = run(call, "cuda"), reference(call)
    assert set(results) == set(expected)
    errors = {n: error_ratio(x, expected[n]) / tolerance(n, x, call.k, call.v) for n, x in results.items()}
    out[name] = max(errors.values())
print(json.dumps(out))
"""

CASES = {
    "one tile, P kept": dict(B=2, T=37, H=2, Hg=2, K=16, V=16, BT=16, tiles=[16, 16, 1]),
    "one tile, P again": dict(B=1, T=40, H=2, Hg=2, K=16, V=16, BT=16, tiles=[16, 16, 0]),
    "several tiles": dict(B=1, T=33, H=2, Hg=2, K=36, V=20, BT=16, tiles=[16, 16, 0]),
    "a group, P kept": dict(B=1, T=20, H=4, Hg=2, K=16, V=24, BT=16, tiles=[16, 16, 1]),
    "a group, several tiles": dict(B=1, T=20, H=3, Hg=1, K=24, V=16, BT=16, tiles=[16, 16, 0]),
    "no gate": dict(B=1, T=20, H=2, Hg=1, K=16, V=16, BT=16, gated=False),
    "packed": dict(B=1, T=45, H=2, Hg=1, K=16, V=16, BT=16, cu=[0, 0, 5, 5, 45]),
    "a gate a channel": dict(B=1, T=20, H=2, Hg=1, K=20, V=16, BT=16, gk=True),
    "float16": dict(B=1, T=40, H=2, Hg=1, K=16, V=16, BT=32, half=True),
    "one token": dict(B=2, T=1, H=1, Hg=1, K=1, V=1, BT=64),
}


def interpret(code: str, *arguments: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_portable_kernels_equal_the_reference_in_the_interpreter():
    done = interpret(SCRIPT, json.dumps(CASES))
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert set(errors) == set(CASES)
    assert all(error <= 1 for error in errors.values()), errors


def test_bfloat16_is_refused_in_the_interpreter_with_the_reason():
    done = interpret(
        "import torch\nfrom support import draw\nfrom wyfast_lib import wy_fast\n"
        "c = draw(dtype=torch.bfloat16)\n"
        "wy_fast(c.k, c.v, c.beta, c.A, c.g, backend='cuda')\n"
    )
    assert done.returncode != 0
    assert "NotImplementedError" in done.stderr and "bit patterns" in done.stderr


def test_without_a_gpu_the_backend_says_why_and_wide_or_float64_calls_are_refused_by_name():
    module = backends.load("cuda")
    ok, reason = module.available()
    assert reason
    done = interpret(
        "import torch\nfrom support import draw\nfrom wyfast_lib import wy_fast\n"
        "for call in (draw(K=513, T=4), draw(T=4, dtype=torch.float64)):\n"
        "    try: wy_fast(call.k, call.v, call.beta, call.A, call.g, backend='cuda')\n"
        "    except (ValueError, NotImplementedError) as error: print(error)\n"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    wide, double = done.stdout.splitlines()
    assert "512" in wide and "float64" in double


def test_the_launch_table_has_small_tiles_for_every_kind_of_call():
    module = backends.load("cuda")
    for phase in ("forward", "backward", "dv_local"):
        for size in (2, 4):
            for BT in (16, 32, 64, 128):
                for arch in (8, 9, 10):
                    choices = module.candidates(phase, arch, size, 512, 512, BT)
                    assert min(max(t.BK, t.BV) for t in choices) <= 32
                    assert not any(t.KEEP_P for t in choices)
