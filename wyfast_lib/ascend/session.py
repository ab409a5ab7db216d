"""A kernel object as a file: its source with every global that it uses, as they are now.

The worker imports files, and a kernel is more than its file: a function may have been defined twice, inside
another function, in a notebook, and the constants of its module may have been changed since. So each function
is written to a file of its own, named by its content: modules become imports, values become assignments, the
@triton.jit functions that it calls become imports from files made the same way.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import sys
import tempfile
import textwrap
import types
from pathlib import Path

from wyfast_lib.ascend import toolchain
from wyfast_lib.ascend.errors import CompileError

# Modules whose attributes are taken from themselves: they are the same in the worker.
_SHARED = {*sys.stdlib_module_names, "triton", "torch", "numpy"}


def plain(kernel) -> types.FunctionType | None:
    """The Python function under the decorators of a kernel; None for what is no function."""
    while not inspect.isfunction(kernel):
        kernel = getattr(kernel, "fn", None)
        if kernel is None:
            return None
    return kernel


def write(function: types.FunctionType) -> Path:
    """Write a function and all it uses; returns its file. CompileError names what cannot be written."""
    return _write(function, ())


def _write(function: types.FunctionType, callers: tuple) -> Path:
    if function in callers:
        raise CompileError(f"{function.__name__} calls itself, which Triton does not compile", "kernel")
    text = _text(function, (*callers, function))
    name = f"kernel_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    path = folder() / f"{name}.py"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    return path


def folder() -> Path:
    """Where the files are kept: in the cache, or, when that cannot be written, among this process's own."""
    path = toolchain.cache_root() / "session-kernels"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"0")
        return path
    except OSError:
        return Path(_own_folder().name)


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="wyfast-kernels-")


def _text(function: types.FunctionType, callers: tuple) -> str:
    definition, source, line = _definition(function)
    values = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    parts = []
    for name in _global_names(function, definition):
        if name in values:
            marked = str(function.__globals__.get("__annotations__", {}).get(name, ""))
            parts.append(_assign(function, name, values[name], "constexpr" in marked, callers, definition))
    if len(callers) > 1:  # Triton tells helpers apart by their names alone
        source += f"\n{function.__name__}.__name__ = '{function.__name__}_' + __name__[-8:]"
    code = function.__code__
    origin = f"# {Path(code.co_filename).name}:{line}"  # the worker gives the function this place again
    return "\n".join([*parts, source, origin, ""])


def _definition(function: types.FunctionType) -> tuple[ast.FunctionDef, str, int]:
    """(its syntax, its text with no decorator but jit, the line of its `def`)."""
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError as problem:
        raise CompileError(
            f"the source of {function.__name__} cannot be read ({problem}): put the kernel into a file",
            "kernel",
        ) from None
    text = textwrap.dedent("".join(lines))
    try:
        definition = ast.parse(text).body[0]
    except SyntaxError:
        definition = None
    if not isinstance(definition, ast.FunctionDef):
        raise CompileError(f"the source of {function.__name__} is not a def statement", "kernel")
    if definition.name != function.__code__.co_name:
        raise CompileError(
            f"the source file of {function.__name__} changed after it was imported: import it again", "kernel"
        )
    jit = [d for d in definition.decorator_list if _last_name(d) == "jit"]
    definition.decorator_list = jit
    body = "".join(text.splitlines(keepends=True)[definition.lineno - 1 :])
    source = "".join(f"@{ast.unparse(d)}\n" for d in jit) + body
    return definition, source, first + definition.lineno - 1


def _last_name(node) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _global_names(function: types.FunctionType, definition: ast.FunctionDef) -> list[str]:
    """Names that a function takes from outside: in its body, its decorators, annotations and defaults."""
    arguments = definition.args
    outside = [*definition.decorator_list, *arguments.defaults, *filter(None, arguments.kw_defaults)]
    outside += [
        a.annotation for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if a.annotation
    ]
    outside += [definition.returns] if definition.returns else []
    local = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
    inside = {
        node.id for line in definition.body for node in ast.walk(line) if isinstance(node, ast.Name)
    } - local
    return sorted(
        inside | {node.id for part in outside for node in ast.walk(part) if isinstance(node, ast.Name)}
    )


def _assign(function, name: str, value, marked: bool, callers: tuple, definition) -> str:
    """A line, or several, that give `name` its value. marked: annotated as tl.constexpr in its module."""
    if isinstance(value, types.ModuleType):
        if value.__name__.partition(".")[0] in _SHARED or value.__name__.startswith("wyfast_lib.ascend"):
            return f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
        return _module(function, name, value, callers, definition)
    literal = _literal(value)
    if literal is not None:
        if marked:
            literal = f"triton.language.constexpr({literal})"
        return f"import triton.language\n{name} = {literal}" if "triton" in literal else f"{name} = {literal}"
    inner = plain(value) if inspect.isfunction(value) or hasattr(value, "fn") else None
    home = getattr(inner or value, "__module__", None) or ""
    known = getattr(inner or value, "__name__", None)
    if known and home.partition(".")[0] in _SHARED:
        return f"from {home} import {known} as {name}"
    if inner is not None and (hasattr(value, "fn") or home == "__main__" or "<locals>" in inner.__qualname__):
        return f"from {_write(inner, callers).stem} import {inner.__name__} as {name}"
    if home and home != "__main__" and known and getattr(sys.modules.get(home), known, None) is value:
        return f"from {home} import {known} as {name}"
    module = sys.modules.get(function.__module__)
    if module is not None and module.__name__ != "__main__" and getattr(module, "__file__", None):
        if vars(module).get(name) is value:
            return f"from {module.__name__} import {name}"
    raise CompileError(
        f"{function.__name__} uses {name}, a {type(value).__name__} of this session, which cannot "
        "be written to a file: put the kernel into a module",
        "kernel",
    )


def _module(function, name: str, module: types.ModuleType, callers: tuple, definition) -> str:
    """Stand-in for a module of the user's: what the function takes from it, as it is now."""
    lines = ["import types", f"{name} = types.ModuleType({name!r})"]
    taken = {
        node.attr
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    }
    for attribute in sorted(taken):
        if not hasattr(module, attribute):
            continue  # Triton says so, with the line
        value, slot = getattr(module, attribute), f"_{name}_{attribute}"
        marked = "constexpr" in str(getattr(module, "__annotations__", {}).get(attribute, ""))
        if isinstance(value, types.ModuleType):
            inner = _inner_chain(definition, name, attribute)
            lines.append(_assign(function, slot, value, marked, callers, inner.replaced(slot)))
        else:
            lines.append(_assign(function, slot, value, marked, callers, definition))
        lines.append(f"{name}.{attribute} = {slot}")
    return "\n".join(lines)


class _inner_chain(ast.NodeTransformer):
    """The function's syntax with NAME.ATTRIBUTE in place of one name, to look one module further down."""

    def __init__(self, definition, name: str, attribute: str) -> None:
        self.definition, self.name, self.attribute = definition, name, attribute

    def replaced(self, slot: str):
        self.slot = slot
        return self.visit(ast.parse(ast.unparse(self.definition)))

    def visit_Attribute(self, node: ast.Attribute):
        if isinstance(node.value, ast.Name) and (node.value.id, node.attr) == (self.name, self.attribute):
            return ast.Name(self.slot, ast.Load())
        return self.generic_visit(node)


def _literal(value) -> str | None:
    """Python text of a value, None when it has none."""
    kind = type(value).__name__
    if kind == "constexpr":
        inner = _literal(value.value)
        return None if inner is None else f"triton.language.constexpr({inner})"
    if kind == "dtype" and type(value).__module__.startswith("triton"):
        return f"triton.language.{_dtype_name(value)}"
    if isinstance(value, float):
        return repr(value) if value - value == 0 else f"float({str(value)!r})"
    if isinstance(value, (bool, int, str, type(None))):
        return repr(value)
    if isinstance(value, tuple):
        inner = [_literal(x) for x in value]
        return None if None in inner else f"({''.join(f'{x}, ' for x in inner)})"
    return None


def _dtype_name(value) -> str:
    """`fp32` as triton.language spells it."""
    names = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
    return names.get(value.name, value.name)
