"""Tensors that look like [B, H, T, ...]: a warning that names the expected order (row 50)."""

import warnings
from pathlib import Path

import pytest
import torch
from support import draw

from wyfast_lib import (
    check_factor,
    chunk_bwd_dv_local,
    chunk_local_cumsum,
    prepare_chunks,
    wy_factor,
    wy_fast,
)
from wyfast_lib.integrations import fla

OPERATORS = {
    "wy_fast": lambda c, cu=None: wy_fast(c.k, c.v, c.beta, c.A, c.g, cu_seqlens=cu),
    "wy_factor": lambda c, cu=None: wy_factor(c.k, c.beta, c.g, 16, cu),
    "chunk_local_cumsum": lambda c, cu=None: chunk_local_cumsum(c.g, 16, cu),
    "check_factor": lambda c, cu=None: check_factor(c.A, c.k, c.beta, c.g, cu),
    "chunk_bwd_dv_local": lambda c, cu=None: chunk_bwd_dv_local(c.k, c.k, c.du, c.g, None, cu, chunk_size=16),
    "fla forward": lambda c, cu=None: fla.recompute_w_u_fwd(c.k, c.v, c.beta, c.A, c.g, cu),
    "fla backward": lambda c, cu=None: fla.prepare_wy_repr_bwd(c.k, c.v, c.beta, c.A, c.dw, c.du, c.g, cu),
}
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


@pytest.fixture
def call():
    """Four heads of 40 tokens with heads first: read as 4 tokens of 40 heads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `draw` itself calls the stages before
        return draw(1, 4, 40, 40)


@every_operator
def test_50_heads_before_time_are_warned_of_once_a_call_and_at_the_callers_line(call, operator):
    with pytest.warns(UserWarning) as caught:
        operator(call)
    (warning,) = caught.list
    assert "the expected order is [B, T, H, ...]" in str(warning.message)
    assert "T = 4 tokens and H = 40 heads" in str(warning.message)
    assert Path(warning.filename).name == Path(__file__).name


def test_50_a_loop_warns_once_for_its_line(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            OPERATORS["wy_fast"](call)
    assert len(caught) == 1


@every_operator
@pytest.mark.parametrize("T, H", [(1, 8), (0, 8), (8, 8), (9, 8), (40, 2)], ids=str)
def test_50_usual_layouts_and_a_decoding_step_are_not_warned_of(operator, T, H):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operator(draw(1, T, H, H))


@every_operator
def test_50_packed_rows_have_said_where_time_is(call, operator):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operator(call, torch.tensor([0, 1, 4]))
        operator(call, prepare_chunks(torch.tensor([0, 1, 4]), 16))


def test_50_a_graph_is_traced_whole_and_without_a_warning(call):
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled = torch.compile(lambda c: OPERATORS["wy_fast"](c), fullgraph=True, backend="aot_eager")
        w, _ = compiled(call)
    assert w.shape == call.dw.shape
