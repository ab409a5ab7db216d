"""Which source text a kernel stands for: where the worker finds it, and the hash that its cache entries
hang on.

A kernel arrives as a @triton.jit function of whichever triton this process has (compiled or interpreted,
autotuned or not), as a plain function, or as the text "package.module:kernel" or "file.py:kernel".

What is compiled of a function is this very object with its globals as they are now, whatever its name stands
for in its module by then: `session.py` writes it to a file of its own. A text names a file that the worker
imports anew; where this process has imported that module, the text means the function in it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

from wyfast_lib.ascend import session


@dataclass(frozen=True)
class KernelSource:
    """A kernel's address: `file` and `name` in it, `module` (its import name or ""), `digest` of all that its
    text depends on: the file, the modules that it imports, the environment that these read.
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
    file = str(session.write(function))
    parameters = tuple(inspect.signature(function).parameters)
    return KernelSource("", file, function.__name__, digest(file, ""), parameters)


def unwrap(kernel) -> types.FunctionType:
    """The Python function under @triton.jit, @triton.autotune, @triton.heuristics and the interpreter's
    wrapper.
    """
    function = session.plain(kernel)
    if function is None:
        raise TypeError(
            f"kernel: expected a @triton.jit function or 'module:kernel', got {type(kernel).__name__}"
        )
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
        live = getattr(sys.modules.get(place), name, None)
        if session.plain(live) is not None:
            return find(live)
        path, module = module_file(place), place
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


def module_file(module: str) -> Path | None:
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


# ---- the hash of a file and of all that it depends on ----

# Imported by kernels and not followed: the standard library, and what the toolchain's own hash stands for.
_SETTLED = {*sys.stdlib_module_names, "triton", "torch", "numpy", "wyfast_lib"}


def digest(file: str, module: str) -> str:
    """SHA-256 of a module's file, of the files that it imports, and of the environment variables that any of
    them reads. Followed are imports from its own package or folder and from wherever Python finds modules; of
    an installed package that is not its own only the module itself.
    """
    seen: dict[str, str] = {}
    variables: set[str] = set()
    pending = [(Path(file), module)]
    root = str(Path(file).parent)  # the worker puts the kernel's own folder on its import path
    while pending:
        path, name = pending.pop()
        if str(path) in seen:
            continue
        stat = path.stat()
        seen[str(path)], imported, read = _scan(str(path), name, root, stat.st_mtime_ns, stat.st_size)
        variables |= read
        for found, as_module in imported:
            if _follows(str(path), name, found, as_module):
                pending.append((Path(found), as_module))
            elif found not in seen:
                seen[found] = hashlib.sha256(Path(found).read_bytes()).hexdigest()
    lines = [f"{Path(p).name} {h}" for p, h in sorted(seen.items())]
    names = sorted(os.environ) if None in variables else sorted(variables)
    lines += [f"{name}={os.environ.get(name)}" for name in names]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def _follows(file: str, module: str, found: str, as_module: str) -> bool:
    installed = re.search(r"/(site|dist)-packages/", found)
    return not installed or module.partition(".")[0] == as_module.partition(".")[0] != ""


@functools.lru_cache(maxsize=4096)
def _scan(
    file: str, module: str, root: str, mtime: int, size: int
) -> tuple[str, tuple[tuple[str, str], ...], frozenset]:
    """(hash of one file, ((file, module) it imports), environment variables that it reads; None among these
    when their names are computed). mtime and size: cache keys.
    """
    text = Path(file).read_bytes()
    tree = ast.parse(text)
    package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
    found = {}
    for name in _imported(tree, package):
        own = module.partition(".")[0] == "wyfast_lib" and name.startswith("wyfast_lib.")
        if name.partition(".")[0] in _SETTLED and not own:
            continue
        for folder in dict.fromkeys((Path(file).parent, Path(root))):
            for path in _files_of(name, folder):
                found[str(path)] = name
    return hashlib.sha256(text).hexdigest(), tuple(found.items()), _variables(tree)


def _imported(tree: ast.Module, package: str) -> list[str]:
    """Absolute names of all that a module may import, wherever the statement stands."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1] if package else []
                base = ".".join(filter(None, (*parent, node.module)))
            names += [base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)]
    return [name for name in dict.fromkeys(names) if name]


def _files_of(name: str, folder: Path) -> list[Path]:
    """The files that importing `name` runs: its own and its parents' __init__; looked for beside the
    importing file first (`folder`), then wherever Python finds modules. Empty for what is no module.
    """
    parts = name.split(".")
    base = folder.joinpath(*parts)
    for own in (base.with_suffix(".py"), base / "__init__.py"):
        if own.is_file():
            parents = [folder.joinpath(*parts[:i], "__init__.py") for i in range(1, len(parts))]
            return [own.resolve(), *(p.resolve() for p in parents if p.is_file())]
    path = module_file(name)
    if path is None:
        return []
    outer = [".".join(parts[:i]) for i in range(1, len(parts))]
    return [path, *filter(None, (module_file(p) for p in outer if p != "wyfast_lib"))]


def _variables(tree: ast.Module) -> frozenset:
    """Names of the environment variables that a module reads; None among them when a name is computed."""
    if not any(_is_environment(node) for node in ast.walk(tree)):
        return frozenset()
    found: set = set()
    for node in ast.walk(tree):
        key = None
        if isinstance(node, ast.Subscript) and _is_environment(node.value):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            if _is_environment(node.func) or _is_environment(getattr(node.func, "value", None)):
                key = node.args[0] if node.args else node
        elif isinstance(node, ast.Compare) and any(_is_environment(c) for c in node.comparators):
            key = node.left
        if key is not None:
            found.add(key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None)
    return frozenset(found or {None})


def _is_environment(node) -> bool:
    name = getattr(node, "attr", None) or getattr(node, "id", None)
    return name in ("environ", "getenv")
