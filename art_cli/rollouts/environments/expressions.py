"""A check of a policy's answers before a scorer evaluates them as Python.

Some scorers of reasoning-gym call `eval` on an answer, or SymPy's `parse_expr`, which does. An answer may be anything
that a model can write: a call of `os.system`, or `9**9**9**9`, which computes until the memory is full. So such a
scorer gets only answers that are harmless by their syntax tree.
"""

import ast
import math

MAX_LENGTH = 4000  # characters; the longest right answer of the nine generators has fewer than 500
MAX_NODES = 400  # most nodes of an expression's syntax tree
MAX_EXPONENT = 64  # the largest exponent, and the largest product of exponents of exponents
FUNCTIONS = frozenset(
    {
        *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs"),
    }
)
LITERALS = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Name, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd)
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd)


def is_harmless_literal(text: str) -> bool:
    """Returns whether `eval` can only build lists of numbers, strings and names from the text, or fail to parse it."""
    if len(text) > MAX_LENGTH:
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return True
    except (RecursionError, MemoryError):
        return False
    return all(isinstance(node, LITERALS) for node in ast.walk(tree))


def is_harmless_expression(text: str) -> bool:
    """Returns whether the text is an expression of numbers, symbols, + - * / **, and a few functions, of bounded size.

    A text that does not parse is refused too, because SymPy rewrites texts before it evaluates them.
    """
    if len(text) > MAX_LENGTH:
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval")
        num_nodes = sum(1 for _ in ast.walk(tree))
        return num_nodes <= MAX_NODES and _is_expression(tree.body) and _degree(tree) <= MAX_EXPONENT
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_expression(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.Name(id=name):
            return "_" not in name
        case ast.UnaryOp(op=op, operand=operand):
            return isinstance(op, OPERATORS) and _is_expression(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return isinstance(op, OPERATORS) and _is_expression(left) and _is_expression(right)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return name in FUNCTIONS and all(map(_is_expression, args))
    return False


def _degree(node: ast.AST) -> float:
    """Returns a bound of the largest power in an expression, where powers of powers multiply. It is 1 without any."""
    degree = max(map(_degree, ast.iter_child_nodes(node)), default=1.0)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return degree * max(1.0, _bound(node.right))
    return degree


def _bound(node: ast.expr) -> float:
    """Returns an upper bound of an exponent's size, where each symbol counts as 1; infinite for anything unusual."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return abs(value) if abs(value) <= MAX_EXPONENT else math.inf
        case ast.Name():
            return 1.0
        case ast.UnaryOp(operand=operand):
            return _bound(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return _bound(left) + _bound(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _bound(left) * _bound(right)
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int() as divisor)) if divisor >= 1:
            return _bound(left)
    return math.inf
