"""The exercises of the workbook: every one has a check, a solution, and a place in its notebook.

Found by name: `notebooks/solutions/NN_solutions.py` (functions solution_1, solution_2, ...) and
`wyfast_lib/exercises/notebook_NN.py` (check_exercise_1, check_exercise_2, ...).
"""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch

import wyfast_lib.exercises
from wyfast_lib.exercises import attempt

ROOT = Path(__file__).resolve().parents[1]
SOLUTIONS = sorted((ROOT / "notebooks" / "solutions").glob("*.py"))
CHECKS = sorted(Path(wyfast_lib.exercises.__file__).parent.glob("notebook_*.py"))


def numbered(module, prefix):
    return {int(n[len(prefix) :]): f for n, f in vars(module).items() if re.fullmatch(prefix + r"\d+", n)}


def solutions_of(path):
    spec = importlib.util.spec_from_file_location(f"solutions_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return numbered(module, "solution_")


def checks_of(number):
    module = importlib.import_module(f"wyfast_lib.exercises.notebook_{number}")
    return numbered(module, "check_exercise_")


def exercises():
    for path in SOLUTIONS:
        number = path.stem.split("_")[0]
        checks = checks_of(number)
        for k, solution in solutions_of(path).items():
            yield pytest.param(checks.get(k), solution, id=f"notebook {number}, exercise {k}")


EXERCISES = list(exercises())


def perturbed(value):
    """The result, a thousandth off, whatever it is made of."""
    if isinstance(value, torch.Tensor):
        return value * 1.001
    if isinstance(value, (tuple, list)):
        return type(value)(perturbed(x) for x in value)
    if isinstance(value, float):
        return value * 1.001
    raise TypeError(f"teach perturbed() about {type(value).__name__}")


def test_there_are_exercises_to_run():
    assert SOLUTIONS and CHECKS


def test_every_notebook_with_checks_has_solutions_and_the_reverse():
    with_checks = {path.stem.removeprefix("notebook_") for path in CHECKS}
    with_solutions = {path.stem.removesuffix("_solutions") for path in SOLUTIONS}
    assert with_checks == with_solutions


@pytest.mark.parametrize("number", [p.stem.removesuffix("_solutions") for p in SOLUTIONS])
def test_exercises_are_numbered_from_one_and_each_has_its_check_and_solution(number):
    solutions = solutions_of(ROOT / "notebooks" / "solutions" / f"{number}_solutions.py")
    checks = checks_of(number)
    assert set(solutions) == set(checks) == set(range(1, len(checks) + 1))


@pytest.mark.parametrize("number", [p.stem.removesuffix("_solutions") for p in SOLUTIONS])
def test_every_exercise_stands_in_its_notebook(number):
    (notebook,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    text = notebook.read_text(encoding="utf-8")
    for k in checks_of(number):
        assert f"notebook_{number}.check_exercise_{k}" in text


@pytest.mark.parametrize("check, solution", EXERCISES)
def test_the_solution_passes_its_check(check, solution):
    check(solution)
    assert attempt(check, solution)


@pytest.mark.parametrize("check, solution", EXERCISES)
def test_the_check_rejects_a_result_that_is_a_thousandth_off(check, solution):
    with pytest.raises(AssertionError):
        check(lambda *a, **b: perturbed(solution(*a, **b)))


@pytest.mark.parametrize("check, solution", EXERCISES)
def test_an_untouched_stub_is_told_apart_from_a_wrong_answer(check, solution, capsys):
    def stub(*arguments):
        raise NotImplementedError

    assert not attempt(check, stub)
    assert "not tried yet" in capsys.readouterr().out
    with pytest.raises(AssertionError):
        attempt(check, lambda *arguments: None)
