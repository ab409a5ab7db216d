"""Times that others published of kernels like ours, shown beside a profile at the same sizes.

They are of their kernels on their chips: a row says which, and never enters a factor with one of ours.
"""

from __future__ import annotations

from wyfast_lib.profile.report import Row
from wyfast_lib.profile.request import Request

DV_LOCAL = {"G_T_CONTIG=0": 6500.0, "G_T_CONTIG=1": 180.0}
DV_LOCAL_SIZES = {"B": 2, "T": 2048, "H": 8, "Hg": 4, "K": 64, "V": 64, "BT": 64}
DV_LOCAL_HOW = "flash-linear-attention's kernel, chip not named"
DV_LOCAL_LINK = (
    "https://github.com/fla-org/flash-linear-attention/blob/bc3b101d/"
    ".agents/skills/fla-ascend-performance/references/g-contiguous-loading.md"
)

# (T, H, Hg) -> us, float32, K = V = 128, BT = 64, B = 1
BACKWARD = {
    (4096, 32, 32): 2140.0, (8192, 32, 32): 3940.0, (32768, 32, 32): 13690.0, (32768, 32, 8): 14570.0,
    (65536, 16, 16): 13880.0,
}  # fmt: skip
BACKWARD_HOW = "MindSpeed-Ops's kernel on a 910B"
BACKWARD_LINK = "docs/triton/wy_fast.md of MindSpeed-Ops"


def rows(request: Request) -> list[Row]:
    """What is published at exactly these sizes, or []."""
    from wyfast_lib.profile import ours

    if request.kernel not in ours.PHASES or request.lengths:
        return []
    s, phase = ours.sizes(request), ours.PHASES[request.name]
    if phase == "dv_local" and vars(s) == DV_LOCAL_SIZES and request.variant in DV_LOCAL:
        return [Row("time", DV_LOCAL[request.variant], "us", "published", DV_LOCAL_HOW, link=DV_LOCAL_LINK)]
    wide = (s.B, s.K, s.V, s.BT) == (1, 128, 128, 64) and request.dtype == "float32"
    if phase == "backward" and wide and not request.flags and (s.T, s.H, s.Hg) in BACKWARD:
        us = BACKWARD[s.T, s.H, s.Hg]
        return [Row("time", us, "us", "published", BACKWARD_HOW, link=BACKWARD_LINK)]
    return []
