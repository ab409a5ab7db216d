"""Checks of the two exercises of notebook 03, from the mathematics to the kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch

from wyfast_lib.testing import error_ratio


def check_exercise_1(tasks_of: Callable) -> None:
    """tasks_of(program, programs, n_tasks) -> integer tensor [n]: the tasks of one program, in one run.

    Every task must be done exactly once, the tasks of a program must follow each other (t, t + 1, ...), and
    two programs must never differ by more than one task.

    Raises:
        AssertionError: one of the three does not hold; the message gives the sizes.
    """
    for programs, n_tasks in ((1, 5), (24, 23), (24, 24), (24, 25), (24, 49), (7, 100), (5, 0)):
        where = f"{programs} programs, {n_tasks} tasks"
        lists = [tasks_of(program, programs, n_tasks) for program in range(programs)]
        for tasks in lists:
            assert isinstance(tasks, torch.Tensor), f"expected a tensor, got {type(tasks).__name__}"
            assert not tasks.is_floating_point() and tasks.ndim == 1, (
                f"{where}: a row of integers is expected"
            )
            assert (tasks.diff() == 1).all(), f"{where}: {tasks.tolist()} is not one run"
        done = torch.cat([tasks.long() for tasks in lists]).sort().values.tolist()
        assert done == list(range(n_tasks)), f"{where}: the tasks done are {done}"
        counts = [len(tasks) for tasks in lists]
        assert max(counts) - min(counts) <= 1, f"{where}: the programs do {counts} tasks"


def check_exercise_2(column_sums: Callable) -> None:
    """column_sums(x, cube) -> float32 [n]: the sum of x [m, n] float32 over its rows, right to 1e-4.

    cube(left, right) is a product of two bfloat16 matrices, accumulated in float32 -> float32. It is the one
    way to add numbers of different rows: the check counts the calls.

    Raises:
        AssertionError: the sums are not right to 1e-4, or the cube did not make them.
    """
    random = torch.Generator().manual_seed(5)
    for m, n in ((64, 64), (33, 64), (16, 5)):
        x = torch.randn(m, n, generator=random) + 0.5
        calls = []

        def cube(left, right, calls=calls):
            for name, operand in (("left", left), ("right", right)):
                assert operand.dtype == torch.bfloat16, (
                    f"{name}: the cube takes bfloat16, got {operand.dtype}"
                )
            calls.append(tuple(left.shape))
            return left.float() @ right.float()

        sums = column_sums(x.clone(), cube)
        assert isinstance(sums, torch.Tensor), f"expected a tensor, got {type(sums).__name__}"
        assert tuple(sums.shape) == (n,), f"expected shape [{n}], got {list(sums.shape)}"
        assert calls, "the cube was not used: rows lie on two vector units"
        error = error_ratio(sums, x.double().sum(0))
        assert error <= 1e-4, f"x [{m}, {n}]: the error ratio is {error:.1e}, allowed 1e-4"
