"""Which devices this machine has, and the one to use when nobody chose."""

from __future__ import annotations

import torch

from wyfast_lib import backends


def device_names() -> dict[str, str]:
    """Device to description, e.g. {"cpu": "...", "cuda:0": "NVIDIA H200"}; the CPU always comes first."""
    names = {"cpu": f"{torch.get_num_threads()} threads"}
    for kind in ("cuda", "npu", "xpu"):
        module = getattr(torch, kind, None)  # torch.npu exists once torch_npu is imported
        if module is not None and module.is_available():
            names |= {f"{kind}:{i}": module.get_device_name(i) for i in range(module.device_count())}
    if torch.backends.mps.is_available():
        names["mps"] = "Apple GPU"
    return names


def best_device() -> torch.device:
    """The first CUDA device or NPU whose own backend runs here, else the CPU."""
    for name in device_names():
        device = torch.device(name)
        if device.type in ("cuda", "npu") and backends.load(backends.DEFAULT[device.type]).available()[0]:
            return device
    return torch.device("cpu")
