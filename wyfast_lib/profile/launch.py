"""`python -m wyfast_lib.profile.launch FILE DEVICE TIMES`: launch the kernel of a request on a device.

The program that msprof and ncu watch. It does nothing else, so that what they record is the kernel, and the
few operators that fill its inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from wyfast_lib.profile.request import Request, loads


def application(request: Request, device: str, times: int, folder: Path) -> list[str]:
    """The command line of this program for a request, which is written to a file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "request.json"
    file.write_text(request.dumps())
    return [sys.executable, "-m", "wyfast_lib.profile.launch", str(file), device, str(times)]


def main(arguments: Sequence[str]) -> int:
    """Launch as often as asked, and wait for the device."""
    import torch

    file, device, times = arguments
    if device == "npu":
        import torch_npu  # noqa: F401  makes torch.npu
    from wyfast_lib.profile import targets

    call = targets.call(loads(Path(file).read_text()), device)
    for _ in range(int(times)):
        call()
    getattr(torch, device).synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
