"""What the README says is so: its example runs, its links lead somewhere, its commands exist."""

import re
from pathlib import Path

import torch

from wyfast_lib import check_factor
from wyfast_lib.reference import wy_adjoint_reference, wy_fast_reference
from wyfast_lib.testing import TOLERANCE, error_ratio

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def example():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    return code


def test_the_example_runs_and_its_outputs_and_gradients_are_right():
    names = {}
    exec(example(), names)
    k, v, beta, A, g, w, u = (names[n] for n in ("k", "v", "beta", "A", "g", "w", "u"))
    assert check_factor(A, k, beta, g) <= TOLERANCE[torch.float32]
    call = [x.detach() for x in (k, v, beta, A, g)]
    expected = (*wy_fast_reference(*call), *wy_adjoint_reference(*call, 2 * w.detach(), 2 * u.detach()))
    results = (w, u, k.grad, v.grad, beta.grad, g.grad)
    for result, truth in zip(results, expected, strict=True):
        assert error_ratio(result, truth) <= TOLERANCE[torch.float32]


def test_the_example_has_ten_lines_of_code():
    lines = [line for line in example().splitlines() if line.strip()]
    assert len([line for line in lines if not line.startswith(("import", "from"))]) <= 10


def test_every_relative_link_leads_to_a_file():
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_make_target_and_command_that_the_readme_names_exists():
    from wyfast_lib.__main__ import COMMANDS

    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^    |`)make (\w+)", README, re.M)) <= targets
    assert set(re.findall(r"python -m wyfast_lib (\w+)", README)) <= set(COMMANDS)
