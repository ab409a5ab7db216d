"""Kernels of kinds that ours are not: the audit gives a result for each, or a refusal that says why."""

import triton
import triton.language as tl


@triton.jit
def max_and_index(x, y, z, N: tl.constexpr):
    o = tl.arange(0, N)
    v, i = tl.max(tl.load(x + o), 0, return_indices=True)
    tl.store(y, v)
    tl.store(z, i)


@triton.jit
def row_max_and_index(x, y, z, N: tl.constexpr):
    o = tl.arange(0, N)
    b = tl.load(x + o[:, None] * N + o[None, :])
    v, i = tl.max(b, 1, return_indices=True)
    tl.store(y + o, v)
    tl.store(z + o, i)


@triton.jit
def index_of_min(x, z, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(z, tl.argmin(tl.load(x + o), 0))


@triton.jit
def printing(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    v = tl.load(x + o)
    tl.device_print("v", v)
    tl.store(y + o, v)


@triton.jit
def mask_between(x, y, low, high, N: tl.constexpr):
    o = tl.arange(0, N)
    m = (o >= low) & (o < high)
    tl.store(y + o, tl.load(x + o, mask=m, other=0.0), mask=m)


@triton.jit
def mask_never_true(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    m = (o >= 40) & (o < 20)
    tl.store(y + o, tl.load(x + o, mask=m, other=0.0), mask=m)


@triton.jit
def sorting(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.sort(tl.load(x + o)))


@triton.jit
def running_sum(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.cumsum(tl.load(x + o), 0))


@triton.jit
def gathering(x, idx, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.gather(tl.load(x + o), tl.load(idx + o), 0))


@triton.jit
def indirect(x, idx, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.load(x + tl.load(idx + o)))


@triton.jit
def adding_atomically(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.atomic_add(y + o, tl.load(x + o))


@triton.jit
def while_loop(x, y, n, N: tl.constexpr):
    o = tl.arange(0, N)
    i = 0
    acc = tl.zeros([N], tl.float32)
    while i < n:
        acc += tl.load(x + i * N + o)
        i += 1
    tl.store(y + o, acc)


@triton.jit
def early_return(x, y, n, N: tl.constexpr):
    if tl.program_id(0) >= n:
        return
    o = tl.arange(0, N)
    tl.store(y + o, tl.load(x + o))


@triton.jit
def three_dimensions(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    p = o[:, None, None] * 64 + o[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    tl.store(y + p, tl.load(x + p) + 1)


@triton.jit
def random_numbers(y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.rand(5, o))


@triton.jit
def count_from_memory(x, n_ptr, y, N: tl.constexpr):
    o = tl.arange(0, N)
    n = tl.load(n_ptr)
    for i in range(n):
        tl.store(y + i * N + o, tl.load(x + i * N + o))
