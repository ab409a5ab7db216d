"""Sizes and grids as a command line spells them: integer arithmetic over names, evaluated without `eval`."""

from __future__ import annotations

import ast
import operator

from wyfast_lib.profile.request import ProfileError

_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg,
}  # fmt: skip
_FUNCTIONS = {"cdiv": lambda a, b: -(-a // b), "min": min, "max": max}


def evaluate(text: str, names: dict):
    """The value of an expression such as "cdiv(T, BT) * H"; ProfileError says what is wrong with it."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, names)
    except SyntaxError:
        raise ProfileError(f"{text.strip()!r} is no expression") from None
    except ZeroDivisionError:
        raise ProfileError(f"{text.strip()!r} divides by zero") from None


def evaluate_list(text: str, names: dict) -> tuple:
    """The values of "A, B, C"; () for an empty text."""
    value = evaluate(f"({text},)" if text.strip() else "()", names)
    return value if isinstance(value, tuple) else (value,)


def _value(node: ast.AST, names: dict):
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise ProfileError(f"{node.id!r} is not known; there are {', '.join(names) or 'no names'}")
        return names[node.id]
    if isinstance(node, ast.Tuple):
        return tuple(_value(each, names) for each in node.elts)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand, names))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*(_value(each, names) for each in node.args))
    raise ProfileError(f"{ast.unparse(node)!r}: only + - * // % ** cdiv min max over sizes are understood")
