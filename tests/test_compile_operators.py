"""torch.compile of every public operator: a full graph, as eager, of one backend and precision (row 42)."""

import os
import threading

import pytest
import torch
import torch._dynamo.testing
from support import draw

from wyfast_lib import (
    check_factor,
    chunk_bwd_dv_local,
    chunk_local_cumsum,
    library,
    wy_factor,
    wy_fast,
)
from wyfast_lib.backends import cuda, load
from wyfast_lib.integrations import fla
from wyfast_lib.precision import current, float32_precision

LENGTHS = (40, 33, 64, 17, 100)


@pytest.fixture
def graphs():
    """A compiler backend that counts the graphs it gets; they are traced, no code is generated."""
    torch._dynamo.reset()
    yield torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def dv_local(c, backend):
    return chunk_bwd_dv_local(c.k, c.k, c.du, c.g, None, c.chunks, chunk_size=16, backend=backend)


def dv_local_without_gate(c, backend):
    return chunk_bwd_dv_local(c.k, c.k, c.du, None, 0.3, c.chunks, chunk_size=16, backend=backend)


def operator(c, backend):
    return wy_fast(c.k, c.v, c.beta, c.A, c.g, cu_seqlens=c.chunks, backend=backend)


def cumsum(c, backend):
    return chunk_local_cumsum(c.g, 16, c.chunks)


@pytest.mark.parametrize("heads", [(2, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("function", [dv_local, dv_local_without_gate, operator, cumsum])
def test_42_a_graph_of_any_length_equals_eager_after_at_most_two_recompiles(
    backend, device, graphs, function, packed, heads
):
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=graphs)
    for T in LENGTHS:
        call = draw(1, T, *heads, cu=[0, 5, 9, T] if packed else None, device=device)
        expected, found = function(call, backend), compiled(call, backend)
        assert torch.utils._pytree.tree_all(bool, torch.utils._pytree.tree_map(torch.equal, found, expected))
    assert 1 <= graphs.frame_count <= 3


def test_42_the_factor_of_any_length_is_one_graph(graphs):
    compiled = torch.compile(wy_factor, fullgraph=True, dynamic=True, backend=graphs)
    for T in (40, 33):
        call = draw(1, T, 2, 1)
        found = compiled(call.k, call.beta, call.g, 16)
        assert torch.equal(found, wy_factor(call.k, call.beta, call.g, 16))
    assert graphs.frame_count == 1


def test_42_the_gradient_of_the_cumulated_gate_equals_eager(graphs):
    compiled = torch.compile(chunk_local_cumsum, fullgraph=True, dynamic=True, backend=graphs)
    g, weight = (-torch.rand(1, 40, 2) for _ in range(2))
    gradients = []
    for function in (compiled, chunk_local_cumsum):
        x = g.clone().requires_grad_()
        gradients.append(torch.autograd.grad((function(x, 16) * weight).sum(), x)[0])
    assert torch.equal(*gradients)


def test_42_a_call_without_tokens_gives_an_empty_result(backend, device, graphs):
    call = draw(1, 0, 2, 1, device=device)
    compiled = torch.compile(dv_local, fullgraph=True, dynamic=True, backend=graphs)
    assert compiled(call, backend).shape == (1, 0, 2, 12)


def test_42_a_scale_may_change_from_call_to_call_and_a_bad_one_is_refused(backend, device, graphs):
    call = draw(1, 40, 2, 1, device=device)

    def scaled(scale):
        return chunk_bwd_dv_local(call.k, call.k, call.du, call.g, scale, chunk_size=16, backend=backend)

    compiled = torch.compile(scaled, fullgraph=True, dynamic=True, backend=graphs)
    for scale in (0.25, 0.5, 2, 3.0, -1.5):
        assert torch.equal(compiled(scale), scaled(scale))
    with pytest.raises(ValueError, match="scale must be finite, got inf"):
        compiled(float("inf"))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("cu", [None, [0, 5, 40]])
def test_42_the_registered_operator_passes_opcheck(backend, device, gated, cu):
    call = draw(1, 40, 4, 2, gated=gated, cu=cu, device=device)
    table = (None, None) if cu is None else (call.chunks.cu_seqlens, call.chunks.indices)
    arguments = (call.k, call.k, call.du, call.g, 0.3, *table, 16, backend, "ieee")
    torch.library.opcheck(library.chunk_bwd_dv_local_op, arguments)


def test_42_the_registered_operators_pass_opcheck_without_tokens(backend, device):
    call = draw(1, 0, 4, 2, device=device)
    inputs, end = (call.k, call.v, call.beta, call.A, call.g), (None, None, backend, "ieee")
    torch.library.opcheck(library.recompute_w_u, (*inputs, None, *end))
    torch.library.opcheck(library.prepare_wy_repr_bwd, (*inputs, call.dw, call.du, *end))
    torch.library.opcheck(
        library.chunk_bwd_dv_local_op, (call.k, call.k, call.du, call.g, 0.3, None, None, 16, backend)
    )


def test_42_what_cannot_be_in_a_graph_says_what_to_do(graphs):
    call = draw(1, 40, 2, 1, cu=[0, 5, 40])
    compiled = torch.compile(check_factor, fullgraph=True, backend=graphs)
    with pytest.raises(Exception, match="must be called outside of torch.compile"):
        compiled(call.A, call.k, call.beta, call.g)
    compiled = torch.compile(fla.recompute_w_u_fwd, fullgraph=True, backend=graphs)
    inputs = (call.k, call.v, call.beta, call.A, call.g)
    with pytest.raises(Exception, match="pass the table of wyfast_lib.prepare_chunks as cu_seqlens"):
        compiled(*inputs, call.chunks.cu_seqlens, call.chunks.indices)
    found, expected = (f(*inputs, call.chunks) for f in (compiled, fla.recompute_w_u_fwd))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


# ---- one backend and one precision from forward to backward ----


class Recorder:
    """Stands in for the kernels of every backend, notes which one ran in which precision, and computes."""

    def __init__(self, monkeypatch):
        self.seen, real = [], load("torch")
        forward, backward = real.forward, real.backward
        for name in ("torch", "lowered"):
            monkeypatch.setattr(load(name), "forward", self.record(name, "forward", forward))
            monkeypatch.setattr(load(name), "backward", self.record(name, "backward", backward))
            monkeypatch.setattr(load(name), "check_call", lambda *_: None)

    def record(self, name, phase, function):
        def run(*call):
            self.seen.append((name, phase, call[-1]))
            return function(*call)

        return run

    def take(self):
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.delenv("WYFAST_BACKEND", raising=False)
    monkeypatch.delenv("WYFAST_FLOAT32_PRECISION", raising=False)
    return Recorder(monkeypatch)


def as_it_is(function):
    return function


def compiled_whole(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


WAYS = [as_it_is, compiled_whole]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first, then", [("lowered", "torch"), ("torch", "lowered"), ("lowered", "nonsense")])
def test_forward_and_backward_run_on_one_backend(recorder, monkeypatch, way, first, then):
    call, function = draw(1, 40, 2, 1), way(wy_fast)
    monkeypatch.setenv("WYFAST_BACKEND", first)
    outputs = function(call.k.requires_grad_(), call.v, call.beta, call.A, call.g)
    monkeypatch.setenv("WYFAST_BACKEND", then)
    torch.autograd.grad(outputs, call.k, (call.dw, call.du))
    assert recorder.take() == [(first, "forward", "ieee"), (first, "backward", "ieee")]


def test_a_graph_keeps_the_backend_that_it_was_traced_with(recorder, monkeypatch):
    call, function = draw(1, 40, 2, 1), compiled_whole(wy_fast)
    inputs = (call.k, call.v, call.beta, call.A, call.g)
    monkeypatch.setenv("WYFAST_BACKEND", "lowered")
    function(*inputs)
    monkeypatch.setenv("WYFAST_BACKEND", "torch")
    function(*inputs)
    assert recorder.take() == [("lowered", "forward", "ieee")] * 2


@pytest.mark.parametrize("way", WAYS)
def test_the_precision_of_a_forward_holds_for_its_backward_wherever_that_runs(recorder, way):
    call, function = draw(1, 40, 2, 1), way(wy_fast)
    inputs = (call.k.requires_grad_(), call.v, call.beta, call.A, call.g)
    with float32_precision("tf32"):
        inside = function(*inputs)
    outside = function(*inputs)
    with float32_precision("tf32"):
        torch.autograd.grad(outside, call.k, (call.dw, call.du))
    thread = threading.Thread(target=torch.autograd.grad, args=(inside, call.k, (call.dw, call.du)))
    thread.start()
    thread.join()
    assert recorder.take() == [
        ("torch", "forward", "tf32"),
        ("torch", "forward", "ieee"),
        ("torch", "backward", "ieee"),
        ("torch", "backward", "tf32"),
    ]


def test_a_graph_is_traced_again_under_another_precision_and_only_then(recorder):
    call = draw(1, 40, 2, 1)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(wy_fast, fullgraph=True, backend=counter)
    inputs = (call.k, call.v, call.beta, call.A, call.g)
    for _ in range(2):
        function(*inputs)
        with float32_precision("tf32"):
            function(*inputs)
    assert [mode for _, _, mode in recorder.take()] == ["ieee", "tf32"] * 2
    assert counter.frame_count == 2


def test_threads_do_not_race_on_the_precision():
    seen, both = {}, threading.Barrier(2)

    def ask(mode):
        with float32_precision(mode):
            both.wait()
            seen[mode] = current()
            both.wait()
        seen[mode, "after"] = current()

    threads = [threading.Thread(target=ask, args=(mode,)) for mode in ("ieee", "tf32")]
    with float32_precision("tf32"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {"ieee": "ieee", "tf32": "tf32", ("ieee", "after"): "ieee", ("tf32", "after"): "ieee"}


def test_the_precision_nests_and_is_given_back_after_an_error():
    assert cuda.float32_precision is float32_precision
    with pytest.raises(KeyError), float32_precision("tf32"):
        with float32_precision("ieee"):
            assert current() == "ieee"
        assert current() == "tf32"
        raise KeyError
    assert current() == "ieee"


@pytest.mark.parametrize("mode", ["tf19", "", "TF32", None, 1, True])
def test_an_unknown_precision_is_refused(mode):
    with pytest.raises(ValueError, match="float32 precision must be 'ieee' or 'tf32', got"):
        float32_precision(mode).__enter__()
    assert current() == "ieee"


@pytest.mark.parametrize("mode", ["tf19", "TF32", " ieee", "0"])
def test_a_bad_precision_in_the_environment_is_refused_when_it_is_used(monkeypatch, backend, device, mode):
    monkeypatch.setenv("WYFAST_FLOAT32_PRECISION", mode)
    call = draw(1, 40, 2, 1, device=device)
    message = "WYFAST_FLOAT32_PRECISION must be 'ieee' or 'tf32', got"
    for function in (operator, dv_local):
        with pytest.raises(ValueError, match=message):
            function(call, backend)
    with float32_precision("ieee"):
        operator(call, backend)  # what is asked for here wins


def test_the_precision_in_the_environment_is_taken_and_an_empty_one_is_none(recorder, monkeypatch):
    call = draw(1, 40, 2, 1)
    for value, mode in (("tf32", "tf32"), ("ieee", "ieee"), ("", "ieee")):
        monkeypatch.setenv("WYFAST_FLOAT32_PRECISION", value)
        operator(call, None)
        fla.recompute_w_u_fwd(call.k, call.v, call.beta, call.A, call.g)
        assert recorder.take() == [("torch", "forward", mode)] * 2
    assert os.environ["WYFAST_FLOAT32_PRECISION"] == ""
