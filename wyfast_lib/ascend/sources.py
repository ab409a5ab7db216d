"""Which source text a kernel stands for: where the worker finds it, and the hash that its cache entries
hang on.

A kernel arrives as a @triton.jit function of whichever triton this process has (compiled or interpreted,
autotuned or not), as a plain function, or as the text "package.module:kernel" or "file.py:kernel". The
worker imports the module anew under the Ascend triton, so all that is needed here is its file. A kernel
typed into a notebook or a console has no file: its source and what it uses are written to one.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import os
import sys
import textwrap
import types
from dataclasses import dataclass
from pathlib import Path

from wyfast_lib.ascend import toolchain
from wyfast_lib.ascend.errors import CompileError


@dataclass(frozen=True)
class KernelSource:
    """A kernel's address: `file` and `name` in it, `module` (its import name or ""), `digest` of file
    and imports.
    """

    module: str
    file: str
    name: str
    digest: str
    parameters: tuple[str, ...]


def find(kernel) -> KernelSource:
    """The source of a kernel (see the module's docstring). Raises TypeError, ValueError or CompileError."""
    if isinstance(kernel, str):
        return _from_text(kernel)
    function = unwrap(kernel)
    file = _file_of(function)
    if function.__module__ == "__main__" or file is None:
        file, module = _write_session_source(function), ""
    else:
        module = function.__module__
    if "<locals>" in function.__qualname__:
        raise CompileError(
            f"{function.__qualname__} is defined inside a function: the worker cannot import it. "
            "Move the kernel to the top of its module",
            "kernel",
        )
    return KernelSource(
        module,
        file,
        function.__qualname__,
        digest(file, module),
        tuple(inspect.signature(function).parameters),
    )


def unwrap(kernel) -> types.FunctionType:
    """The Python function under @triton.jit, @triton.autotune, @triton.heuristics and the interpreter's
    wrapper.
    """
    function = kernel
    while not inspect.isfunction(function):
        inner = getattr(function, "fn", None)
        if inner is None:
            raise TypeError(
                f"kernel: expected a @triton.jit function or 'module:kernel', got {type(kernel).__name__}"
            )
        function = inner
    return function


def _from_text(text: str) -> KernelSource:
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ValueError(f"kernel: expected 'package.module:kernel' or 'file.py:kernel', got {text!r}")
    if place.endswith(".py"):
        path, module = Path(place).resolve(), ""
        if not path.is_file():
            raise ValueError(f"kernel: there is no file {place}")
    else:
        path, module = _module_file(place), place
        if path is None:
            raise ValueError(f"kernel: no module {place} with a source file among the importable ones")
    stat = path.stat()
    functions = _functions(str(path), stat.st_mtime_ns, stat.st_size)
    if name not in functions:
        raise ValueError(f"kernel: {path.name} defines no function {name}")
    return KernelSource(module, str(path), name, digest(str(path), module), functions[name])


@functools.lru_cache(maxsize=256)
def _functions(file: str, mtime: int, size: int) -> dict[str, tuple[str, ...]]:
    """{function: its parameters} at the top of a file. mtime and size: cache keys."""
    found = {}
    for node in ast.parse(Path(file).read_bytes()).body:
        if isinstance(node, ast.FunctionDef):
            parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            found[node.name] = tuple(parameter.arg for parameter in parameters)
    return found


def _module_file(module: str) -> Path | None:
    """The source file of a module that is not necessarily imported; parents' __init__ are not run."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)  # asks the finders of editable installs too; runs nothing
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin).resolve() if spec.origin and spec.origin.endswith(".py") else None
    *parents, last = rest
    search = list(spec.submodule_search_locations or ())
    for parent in parents:
        found = [d for base in search if (d := Path(base or ".") / parent).is_dir()]
        if not found:
            return None
        search = found
    for base in search:
        for candidate in (Path(base or ".") / f"{last}.py", Path(base or ".") / last / "__init__.py"):
            if candidate.is_file():
                return candidate.resolve()
    return None


def _file_of(function: types.FunctionType) -> str | None:
    path = inspect.getsourcefile(function)
    module = sys.modules.get(function.__module__)
    if not path or not os.path.isfile(path) or getattr(module, "__file__", None) is None:
        return None
    return str(Path(path).resolve())


# ---- the hash of a file and of what it imports from its own package or folder ----


def digest(file: str, module: str) -> str:
    """SHA-256 of a module's file and, transitively, of the files it imports from its own package or its
    own folder.
    """
    seen: dict[str, str] = {}
    pending = [(Path(file), module)]
    while pending:
        path, name = pending.pop()
        if str(path) in seen:
            continue
        stat = path.stat()
        seen[str(path)], imported = _scan(str(path), name, stat.st_mtime_ns, stat.st_size)
        pending.extend((Path(f), m) for f, m in imported)
    return hashlib.sha256(
        "\n".join(f"{Path(p).name} {h}" for p, h in sorted(seen.items())).encode()
    ).hexdigest()


@functools.lru_cache(maxsize=4096)
def _scan(file: str, module: str, mtime: int, size: int) -> tuple[str, tuple[tuple[str, str], ...]]:
    """(hash of one file, ((file, module) it imports from its own package or folder)). mtime and size:
    cache keys.
    """
    text = Path(file).read_bytes()
    package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
    top = module.partition(".")[0]
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1] if package else []
                base = ".".join(filter(None, (*parent, node.module)))
            names = [base, *(f"{base}.{alias.name}" for alias in node.names if base)]
        else:
            continue
        for name in filter(None, names):
            own = Path(file).parent / f"{name}.py"
            if top and name.partition(".")[0] == top and "." in module:
                if path := _module_file(name):
                    found.append((str(path), name))
            elif own.is_file():
                found.append((str(own), name))
    return hashlib.sha256(text).hexdigest(), tuple(found)


# ---- kernels without a file: notebooks, consoles, __main__ ----


def _write_session_source(function: types.FunctionType) -> str:
    """Write a session's kernel, its helpers and its constants to a file in the cache; return the path."""
    text = session_source(function)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    path = toolchain.cache_root() / "session-kernels" / f"kernel_{name}.py"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.replace(path)
    return str(path)


def session_source(function: types.FunctionType) -> str:
    """A self-contained module for a function typed into a session: its source with every global that it uses.

    Modules become imports, numbers, strings and tl.constexpr become assignments, functions of the session
    are written out too. Raises CompileError naming a global that is none of these.
    """
    parts: dict[str, str] = {}
    _collect(function, parts)
    return "\n".join(parts.values())


def _collect(function: types.FunctionType, parts: dict[str, str]) -> None:
    try:
        source = inspect.getsource(function)
    except OSError as problem:
        raise CompileError(
            f"the source of {function.__name__} cannot be read ({problem}): put the kernel into a file",
            "kernel",
        ) from None
    parts.setdefault(function.__name__, "")  # a mark against recursion; the text comes after what it uses
    for name in _global_names(function, ast.parse(textwrap.dedent(source)).body[0]):
        if name not in parts and name in function.__globals__:
            _collect_global(function, name, function.__globals__[name], parts)
    parts.pop(function.__name__)
    parts[function.__name__] = source


def _global_names(function: types.FunctionType, definition: ast.FunctionDef) -> list[str]:
    """Names that a function takes from its module: in its body, and in its decorators, annotations and
    defaults.
    """
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


def _collect_global(function: types.FunctionType, name: str, value, parts: dict[str, str]) -> None:
    if isinstance(value, types.ModuleType):
        parts[name] = (
            f"import {value.__name__} as {name}"
            if "." in value.__name__ or value.__name__ != name
            else f"import {name}"
        )
    elif type(value).__name__ == "constexpr" and isinstance(value.value, (bool, int, float, str, type(None))):
        parts[name] = f"import triton.language\n{name} = triton.language.constexpr({value.value!r})"
    elif isinstance(value, (bool, int, float, str, type(None))):
        parts[name] = f"{name} = {value!r}"
    elif inspect.isfunction(value) or hasattr(value, "fn"):
        inner = unwrap(value)
        if inner.__module__ == "__main__" or _file_of(inner) is None:
            _collect(inner, parts)
            if name != inner.__name__:
                parts[name] = f"{name} = {inner.__name__}"
        else:
            parts[name] = f"from {inner.__module__} import {inner.__name__} as {name}"
    elif inspect.isclass(value) and value.__module__ != "__main__":
        parts[name] = f"from {value.__module__} import {value.__name__} as {name}"
    else:
        raise CompileError(
            f"{function.__name__} uses {name}, a {type(value).__name__} of this session, which cannot "
            "be written to a file: put the kernel into a module",
            "kernel",
        )
