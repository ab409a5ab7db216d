"""`python -m wyfast_lib COMMAND`: the table of sub-commands.

A sub-command is a module with `add_arguments(parser)` and `main(args) -> int`. Only the module of the command
that runs is imported, so one that needs more than this machine has does not stop the others.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys

from wyfast_lib.version import __version__

# name: (module, what it does)
COMMANDS = {
    "doctor": ("wyfast_lib.doctor", "what works on this machine, with a numeric check of each backend"),
    "notebooks": ("wyfast_lib.notebooks", "execute the notebooks in order"),
    "bench": ("wyfast_lib.bench", "measure the operator on this machine"),
    "profile": ("wyfast_lib.profile.cli", "where a kernel's time goes, measured or modelled"),
    "ascend": ("wyfast_lib.ascend.cli", "the Ascend compiler without an NPU: install, compile, audit"),
}


def exists(module: str) -> bool:
    """Is there such a module? Imports its parent packages, not the module."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there
        return False


def commands() -> dict[str, tuple[str, str]]:
    """The commands whose module is part of this installation."""
    return {name: entry for name, entry in COMMANDS.items() if exists(entry[0])}


def overview() -> str:
    """The help text: one line a command."""
    lines = [f"  {name:<10} {text}" for name, (_, text) in commands().items()]
    return "\n".join(
        ["usage: python -m wyfast_lib COMMAND [...]", "", *lines, "", "COMMAND --help says more; --version"]
    )


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command; returns its exit status (2 for a command that does not exist)."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"wyfast {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    available = commands()
    if name not in available:
        print(f"no command {name!r}; there are: {', '.join(available)}", file=sys.stderr)
        return 2
    module_name, text = available[name]
    module = importlib.import_module(module_name)
    parser = argparse.ArgumentParser(prog=f"python -m wyfast_lib {name}", description=text)
    module.add_arguments(parser)
    return module.main(parser.parse_args(rest))


if __name__ == "__main__":
    sys.exit(main())
