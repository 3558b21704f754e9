"""Countdown, TinyZero's task, as a file of one's own: python train.py --task
experiments/countdown.py

    Make 9 from 1, 2, 3      <answer>(1 + 2) * 3</answer>     scores 1
                             <answer>3 * 3</answer>           scores 0, because 1 and 2 are left

An answer is the formula in the last <answer>…</answer>, else in the last line. It scores 1 if it
makes the target with + - * / from the numbers, each used exactly once. It is parsed, never
evaluated as code.

The problems are made up. The hub's Jiayi-Pan/Countdown-Tasks-3to4 has the same two fields, nums and
target: let problems() return its records to train on them.
"""

import ast
import operator
import random
import re
from fractions import Fraction
from functools import reduce

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def problems(low=1, high=99, count=4096):
    """Three or four numbers, and a target that + - * make of them from left to right. No two
    problems differ only in the order of their numbers, so that none is held out in one order and
    trained on in another."""
    rng, made = random.Random(0), {}
    for _ in range(3 * count):
        nums = [rng.randint(low, high) for _ in range(rng.choice((3, 4)))]
        target = reduce(lambda a, b: rng.choice((a + b, a - b, a * b)), nums)
        if 0 < target < 1000:
            made[(target, *sorted(nums))] = {"nums": rng.sample(nums, len(nums)), "target": target}
    return list(made.values())[:count]


def prompt(problem):
    nums = ", ".join(map(str, problem["nums"]))
    return (
        f"Make {problem['target']} from {nums} with + - * / and brackets. "
        "Use each number exactly once.\nThink step by step, and end with the formula, "
        "as in <answer>(1 + 2) * 3</answer>."
    )


def reward(problem, text):
    inside, closed, _ = text[-2000:].rpartition("</answer>")
    found = inside.rpartition("<answer>")[2] if closed else text[-2000:].strip().rpartition("\n")[2]
    found = found.partition("=")[0].translate(str.maketrans("×·÷−", "**/-")).strip()
    if len(found) > 200 or not re.fullmatch("[0-9+*/() -]+", found):
        return 0.0
    left = list(problem["nums"])
    try:
        return float(
            _value(ast.parse(found, mode="eval").body, left) == problem["target"] and not left
        )
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0


def _value(node, left):
    """A formula's value, a Fraction. Removes its numbers from the list left; ValueError: one is not
    in it."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left, left), _value(node.right, left))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, left)
    left.remove(getattr(node, "value", None))  # ValueError for any other node: value is no number
    return Fraction(node.value)
