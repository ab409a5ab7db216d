"""What `import wyfast_lib` brings along."""

import ast
import subprocess
import sys
from pathlib import Path

import wyfast_lib

NEW_MODULES = """
import sys
import torch
before = set(sys.modules)
import wyfast_lib
for name in wyfast_lib.__all__:  # imported when first used
    getattr(wyfast_lib, name)
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names)))
"""
PACKAGE = Path(wyfast_lib.__file__).parent
# Downwards: a module imports only modules named further to the left, the entry points excepted.
ORDER = (
    "version",
    "varlen",
    "checks",
    "testing",
    "factor",
    "reference",
    "inputs",
    "backends",
    "library",
    "op",
)


def test_import_needs_torch_and_nothing_else():
    done = subprocess.run([sys.executable, "-c", NEW_MODULES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["wyfast_lib"]


def test_every_public_name_exists_and_has_a_docstring():
    for name in wyfast_lib.__all__:
        assert getattr(wyfast_lib, name).__doc__, name


def imports(path: Path) -> set[str]:
    """The wyfast_lib modules that a module imports at its top level."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wyfast_lib"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found


def test_imports_of_the_core_run_downwards():
    for n, name in enumerate(ORDER):
        module = PACKAGE / f"{name}.py"
        path = module if module.exists() else PACKAGE / name / "__init__.py"
        upwards = (imports(path) & set(ORDER)) - set(ORDER[:n])
        assert not upwards, f"{name} imports {upwards}"
