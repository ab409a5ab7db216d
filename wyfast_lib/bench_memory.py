"""Peak memory of one call on a CPU, from the kernel's own count of a fresh process.

PyTorch has no peak counter for CPUs, and counting its tensors would miss what the matrix library takes for
itself. So a new process runs the call once, and Linux says how far its resident memory rose (VmHWM, set
back just before). Two settings of the C allocator make it give every freed block back at once, so that
memory of an earlier call is not used again unseen. What a first call loads (code, threads) is paid by a
small call before.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def resident(field: str) -> int:
    """Bytes of a field of /proc/self/status, "VmRSS" or "VmHWM"."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(found[1]) << 10


def peak_bytes(call: Callable) -> int:
    """How far this process's resident memory rises during a call, its results included.

    Raises:
        OSError: the system has no /proc/self/clear_refs (not Linux).
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at VmRSS
    before = resident("VmRSS")
    result = call()
    peak = resident("VmHWM") - before
    del result
    return peak


def measure(name: str, T: int, phase: str) -> tuple[int, int] | None:
    """(peak bytes of a call, bytes of its results) in a fresh process; None where it cannot be measured."""
    command = [sys.executable, "-m", "wyfast_lib.bench_memory", name, str(T), phase]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **ALLOCATOR, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        print(f"# no peak memory of {name} at T={T}: {(done.stderr.strip() or 'killed').splitlines()[-1]}")
        return None
    return tuple(json.loads(done.stdout))


def main(name: str, T: str, phase: str) -> None:
    """The fresh process: print (peak bytes, bytes of the results)."""
    import torch

    from wyfast_lib.bench_cpu_providers import PROVIDERS, shape_at
    from wyfast_lib.bench_providers import make_case

    shape = shape_at(int(T))
    PROVIDERS[name].passes(make_case(shape_at(2 * shape.BT), torch.float32, "cpu"))[phase]()
    call = PROVIDERS[name].passes(make_case(shape, torch.float32, "cpu"))[phase]
    sizes = []

    def counted():
        result = call()
        sizes.append(sum(x.nbytes for x in result))
        return result

    print(json.dumps([peak_bytes(counted), sizes[0]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
