"""torch.compile, the registered operators, and what a compiled graph must not do."""

import pytest
import torch
import torch._dynamo.testing
from support import INPUTS, assert_bitwise, draw, run
from torch.utils.checkpoint import checkpoint

from wyfast_lib import chunk_local_cumsum, library, prepare_chunks, wy_factor, wy_fast

LENGTHS = (40, 33, 16, 64, 17, 100, 7, 48, 31, 96, 128, 5, 80, 63, 65, 20, 112, 15, 50, 77)
GRADIENTS = ("dk", "dv", "dbeta", "dg")


@pytest.fixture
def graphs():
    """A compiler backend that counts the graphs it gets; they are traced, no code is generated."""
    torch._dynamo.reset()
    yield torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def compiled_run(f, call):
    leaves = [x.detach().requires_grad_() for x in (call.k, call.v, call.beta, call.g) if x is not None]
    outputs = f(*leaves)
    gradients = torch.autograd.grad(outputs, leaves, (call.dw, call.du))
    return dict(zip(("w", "u", *GRADIENTS), (*(x.detach() for x in outputs), *gradients), strict=False))


def test_21_a_full_graph_equals_eager_at_twenty_lengths_with_at_most_two_recompiles(backend, device, graphs):
    operator = torch.compile(wy_fast, fullgraph=True, dynamic=True, backend=graphs)
    for T in LENGTHS:
        call = draw(1, T, 4, 2, device=device)
        results = compiled_run(
            lambda k, v, beta, g, A=call.A: operator(k, v, beta, A, g, backend=backend), call
        )
        assert_bitwise(results, run(call, backend))
    assert 1 <= graphs.frame_count <= 3


def test_21_a_chunk_table_of_any_length_is_one_full_graph_too(backend, device, graphs):
    operator = torch.compile(wy_fast, fullgraph=True, dynamic=True, backend=graphs)
    for T in (40, 70, 33, 25, 96):
        call = draw(1, T, 4, 2, cu=[0, 9, T], device=device)

        def f(k, v, beta, g, c=call):
            return operator(k, v, beta, c.A, g, cu_seqlens=c.chunks, backend=backend)

        assert_bitwise(compiled_run(f, call), run(call, backend))
    assert 1 <= graphs.frame_count <= 3


def test_21_the_whole_layer_is_one_full_graph(backend, device, graphs):
    """Cumsum, factor and operator; of static shape: tracing the blocked inverse symbolically is slow."""

    def layer(k, v, beta, step, chunks):
        g = chunk_local_cumsum(step, 16, chunks)
        return wy_fast(k, v, beta, wy_factor(k, beta, g, 16, chunks), g, cu_seqlens=chunks, backend=backend)

    call = draw(1, 20, 2, 1, cu=[0, 9, 20], device=device)
    call.g = -torch.rand(1, 20, 2).to(device)  # the raw gate
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend=graphs)
    assert_bitwise(
        compiled_run(lambda *x: compiled(*x, call.chunks), call),
        compiled_run(lambda *x: layer(*x, call.chunks), call),
    )
    assert graphs.frame_count == 1


@pytest.mark.parametrize("cu", [None, [0, 0]])
def test_a_compiled_call_without_tokens_gives_empty_results_and_asks_no_backend(graphs, cu):
    call = draw(1, 0, 2, 1, cu=cu)

    @torch.compile(fullgraph=True, dynamic=True, backend=graphs)
    def operator(k, v, beta, g):
        return wy_fast(k, v, beta, call.A, g, cu_seqlens=call.chunks)

    results = compiled_run(operator, call)
    assert len(results) == 6 and all(x.numel() == 0 for x in results.values())


def test_no_gate_compiles_and_has_no_gate_gradient(backend, device, graphs):
    call = draw(gated=False, device=device)
    operator = torch.compile(wy_fast, fullgraph=True, backend=graphs)
    results = compiled_run(lambda k, v, beta: operator(k, v, beta, call.A, backend=backend), call)
    assert_bitwise(results, run(call, backend))


def test_offsets_inside_a_compiled_graph_say_what_to_do(graphs):
    call = draw()
    operator = torch.compile(wy_fast, fullgraph=True, backend=graphs)
    with pytest.raises(Exception, match="prepare_chunks"):
        operator(call.k, call.v, call.beta, call.A, call.g, cu_seqlens=torch.tensor([0, 40]))


def test_a_compiled_checkpoint_equals_eager(backend, device, graphs):
    call = draw(device=device)

    @torch.compile(fullgraph=True, backend=graphs)
    def layer(*x):
        def inner(k, v, beta, g):
            return wy_fast(k, v, beta, call.A, g, backend=backend)

        return checkpoint(inner, *x, use_reentrant=False)

    assert_bitwise(compiled_run(layer, call), run(call, backend))


def test_a_compiled_backward_under_autocast_equals_eager(backend, device, graphs):
    call = draw(device=device)
    operator = torch.compile(wy_fast, fullgraph=True, backend=graphs)
    with torch.autocast(device, torch.bfloat16):
        results = compiled_run(lambda k, v, beta, g: operator(k, v, beta, call.A, g, backend=backend), call)
    assert_bitwise(results, run(call, backend))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("cu", [None, [0, 5, 40]])
def test_the_registered_operators_pass_opcheck(backend, device, gated, cu):
    call = draw(1, 40, 4, 2, gated=gated, cu=cu, device=device)
    inputs = [getattr(call, n) for n in INPUTS]
    table = (None, None) if cu is None else (call.chunks.cu_seqlens, call.chunks.indices)
    torch.library.opcheck(library.recompute_w_u, (*inputs, *table, backend))
    torch.library.opcheck(library.prepare_wy_repr_bwd, (*inputs[:5], call.dw, call.du, *table, backend))


def test_prepared_tables_read_nothing_back(backend, device):
    """With a table, no operator copies from the device or asks for a value; offsets need one such read."""
    call = draw(cu=[0, 5, 40], device=device)
    cu = torch.tensor([0, 5, 40], device=device)

    def reads(cu_seqlens):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            w, u = wy_fast(
                call.k.requires_grad_(),
                call.v,
                call.beta,
                call.A,
                call.g,
                cu_seqlens=cu_seqlens,
                backend=backend,
            )
            torch.autograd.backward((w, u), (call.dw, call.du))
        return sum(e.count for e in profile.key_averages() if e.key in ("aten::item", "aten::nonzero"))

    assert reads(call.chunks) == 0
    assert reads(cu) > 0
    assert prepare_chunks(cu, 16).total == 40
