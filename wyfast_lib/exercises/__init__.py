"""The checks of the workbook's exercises: one module a notebook, one `check_exercise_K` an exercise.

A notebook hands its reader's function to `attempt`; `notebooks/solutions/NN_solutions.py` holds a
`solution_K` for each, and tests/test_solutions.py runs those through the same checks.
"""

from __future__ import annotations

from collections.abc import Callable


def attempt(check: Callable[[Callable], None], function: Callable) -> bool:
    """Run one exercise's check on a reader's function and print the outcome.

    Args:
        check: a `check_exercise_K` of a module of this package.
        function: the reader's function; the untouched stub raises NotImplementedError.

    Returns:
        True when the exercise is solved, False when the stub is untouched.

    Raises:
        AssertionError: the function returns something wrong; the message says what.
    """
    try:
        check(function)
    except NotImplementedError:
        print(f"{function.__name__}: not tried yet. Replace the line that raises, and run the cell again.")
        return False
    print(f"{function.__name__}: solved.")
    return True
