"""A kernel of the user's, FILE.py:KERNEL: two ways to say what it is launched with.

1. A function in the file, `profile_case_KERNEL` or, for all kernels in it, `profile_case`:

    def profile_case(shape, device, **flags):
        g = torch.randn(shape["T"], shape["H"], device=device)
        return {"args": {"g": g, "y": torch.empty_like(g), "T": shape["T"]},
                "constexprs": {"HV": shape["H"], "BT": 64, **flags},
                "grid": (-(-shape["T"] // 64), shape["H"])}

   `shape` is what --shape says, `flags` one variant of --flag. Integer tensors must hold their real values.

2. Without it, options: `--arg NAME=DTYPE[SIZES]` for a tensor, `--arg "NAME=DTYPE(VALUES)"` for one whose
   values matter, `--arg NAME=EXPRESSION` for a number, and `--grid`. Sizes of --shape and flags go to the
   parameters of their names by themselves; a tl.constexpr parameter becomes a constant.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

from wyfast_lib.profile.case import Case, dtypes
from wyfast_lib.profile.expressions import evaluate, evaluate_list
from wyfast_lib.profile.request import ProfileError, Request

_TENSOR = re.compile(r"(\w+)\s*([\[(])(.*)[\])]")


def plan(request: Request, device: str = "cpu") -> Case:
    """The case of a request; ProfileError says what is missing. Without a real device, tensors of floats
    made by --arg have no storage.
    """
    from wyfast_lib.ascend import sources

    try:
        source = sources.find(request.kernel)
    except ValueError as problem:
        raise ProfileError(str(problem)) from None
    maker = _case_function(source)
    if maker and not request.arguments:
        return _from_function(request, source, maker, device)
    return _from_options(request, source, "meta" if device == "cpu" else device)


def call(request: Request, device: str) -> Callable[[], None]:
    """A function that launches the kernel once on a device; compiles at its first call."""
    case = plan(request, device)
    place, _, name = case.address.rpartition(":")
    kernel = getattr(_load(place), name)
    return lambda: kernel[case.grid](**case.args, **case.constexprs)


# ---- a function in the file ----


def _case_function(source) -> str | None:
    """The name of the function that makes the case, or None."""
    defined = {node.name for node in _tree(source.file).body if isinstance(node, ast.FunctionDef)}
    wanted = (f"profile_case_{source.name}", "profile_case")
    return next((name for name in wanted if name in defined), None)


def _from_function(request: Request, source, maker: str, device: str) -> Case:
    function = getattr(_load(request.kernel.rpartition(":")[0]), maker)
    try:
        inspect.signature(function).bind(request.shape, device, **request.flags)
    except TypeError as problem:
        raise ProfileError(f"--flag: {maker} in {Path(source.file).name}: {problem}") from None
    try:
        made = function(request.shape, device, **request.flags)
    except KeyError as missing:
        raise ProfileError(f"--shape: {maker} reads {missing}, which is not in it") from None
    if not isinstance(made, dict) or set(made) != {"args", "constexprs", "grid"}:
        raise ProfileError(f"{maker} must return a dict with args, constexprs and grid")
    case = Case(request.kernel, dict(made["args"]), dict(made["constexprs"]), _grid(made["grid"]))
    _check_names(source, case, maker)
    return case


def _check_names(source, case: Case, maker: str) -> None:
    given = {**case.args, **case.constexprs}
    parameters = _parameters(source.file, source.name)
    wrong = sorted(set(given) - set(parameters))
    if wrong:
        raise ProfileError(
            f"{maker}: {source.name} has no {', '.join(wrong)}; it has {', '.join(parameters)}"
        )
    missing = [name for name, (_, default) in parameters.items() if name not in given and not default]
    if missing:
        raise ProfileError(f"{maker}: nothing is said of {', '.join(missing)} of {source.name}")


@functools.cache
def _load(place: str):
    """The module of a file or import name, its folder among the import paths for its own imports."""
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place).resolve()
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)  # Triton looks a kernel's module up by its name
        spec.loader.exec_module(module)
        return module
    except Exception as problem:
        raise ProfileError(
            f"{place} cannot be imported here ({type(problem).__name__}: {problem}); with --arg and --grid "
            "in place of profile_case the model needs no import"
        ) from None


# ---- options ----


def _from_options(request: Request, source, device: str) -> Case:
    parameters = _parameters(source.file, source.name)
    names = {**request.shape, **request.flags}
    given = {}
    for text in request.arguments:
        name, sign, value = text.partition("=")
        if not sign or name.strip() not in parameters:
            raise ProfileError(
                f"--arg: expected NAME=... with a parameter of {source.name} ({', '.join(parameters)}), "
                f"got {text!r}"
            )
        given[name.strip()] = _argument(value.strip(), names, request, device)
    for name in request.flags:
        if name not in parameters:
            raise ProfileError(f"--flag: {source.name} has {', '.join(parameters)}, got {name}")
    given = {**{n: v for n, v in names.items() if n in parameters}, **given}
    args, constants = _split(source.name, parameters, given)
    if not request.grid:
        raise ProfileError('--grid is missing: the number of programs, such as --grid "cdiv(T, BT), H"')
    numbers = {n: v for n, v in {**given, **names}.items() if isinstance(v, (int, float))}
    return Case(request.kernel, args, constants, _grid(evaluate_list(request.grid, numbers)))


def _split(kernel: str, parameters: dict, given: dict) -> tuple[dict, dict]:
    """(run-time arguments, constants) in the kernel's order."""
    args, constants, missing = {}, {}, []
    for name, (constant, default) in parameters.items():
        if name not in given and not default:
            missing.append(name)
            continue
        value = given[name] if name in given else evaluate(default, {})
        (constants if constant or value is None else args)[name] = value
    if missing:
        raise ProfileError(f"--arg is missing for {', '.join(missing)} of {kernel}")
    return args, constants


def _argument(text: str, names: dict, request: Request, device: str):
    """The value that an --arg stands for."""
    import torch

    match = _TENSOR.fullmatch(text)
    types = {**dtypes(), "dtype": getattr(torch, request.dtype)}
    if match is None or match[1] not in types:
        if match and match[2] == "[":
            raise ProfileError(f"--arg: expected one of {', '.join(types)} before [, got {match[1]!r}")
        return evaluate(text, names)
    dtype, values = types[match[1]], evaluate_list(match[3], names)
    if match[2] == "(":
        return torch.tensor(values, dtype=dtype, device="cpu" if device == "meta" else device)
    if not all(isinstance(size, int) and size >= 0 for size in values):
        raise ProfileError(f"--arg: sizes must be whole numbers, got {text!r}")
    if dtype.is_floating_point:
        return torch.randn(values, dtype=dtype, device=device)
    # Addresses may be read from it: zeros are the only values that are in range of anything.
    return torch.zeros(values, dtype=dtype, device="cpu" if device == "meta" else device)


def _parameters(file: str, kernel: str) -> dict[str, tuple[bool, str]]:
    """{parameter: (is it a tl.constexpr, its default as text or "")}."""
    function = next(
        node for node in _tree(file).body if isinstance(node, ast.FunctionDef) and node.name == kernel
    )
    arguments = [*function.args.posonlyargs, *function.args.args]
    defaults = [None] * (len(arguments) - len(function.args.defaults)) + function.args.defaults
    pairs = [*zip(arguments, defaults, strict=True)]
    pairs += zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return {
        argument.arg: (
            argument.annotation is not None and ast.unparse(argument.annotation).endswith("constexpr"),
            "" if default is None else ast.unparse(default),
        )
        for argument, default in pairs
    }


def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_bytes())


def _grid(grid) -> tuple[int, ...]:
    counts = (grid,) if isinstance(grid, int) else tuple(grid)
    if not 1 <= len(counts) <= 3 or not all(isinstance(n, int) and n > 0 for n in counts):
        raise ProfileError(f"grid: expected one to three program counts, got {grid!r}")
    return counts
