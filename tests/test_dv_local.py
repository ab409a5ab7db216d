"""chunk_bwd_dv_local against the float64 reference, and the reference against autograd.

The lowered backend compiles every new shape for a second or two: its cases are chosen, torch takes them all.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from wyfast_lib import BackendUnavailable, backends, chunk_bwd_dv_local, prepare_chunks
from wyfast_lib.backends import ascend_plan, ascend_plan_dv_local, lowered
from wyfast_lib.backends import torch as torch_backend
from wyfast_lib.inputs import Shape, make_inputs
from wyfast_lib.reference import chunk_bwd_dv_local_reference, chunk_ranges, outputs_from_wy
from wyfast_lib.testing import TOLERANCE, error_ratio

LIMIT = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 0.005, torch.bfloat16: 0.005}
RAGGED = [0, 3, 3, 67, 131, 200]
