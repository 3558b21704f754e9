"""experiments/countdown.py: which formula scores 1, and which problems are made up."""

import pytest

from experiments import countdown
from tools.own_task import load_task_file

FORMULAS = [  # text, reward: make 9 from 1, 2, 3
    ("<answer>(1 + 2) * 3</answer>", 1),
    ("so <answer>3*(2+1)=9</answer>.", 1),
    ("3 + 6?\n(1 + 2) × 3", 1),
    ("<answer>1</answer> no, <answer>(2+1)*3</answer>", 1),
    ("<answer>-(1 + 2) * -3</answer>", 1),
    ("<answer>3 ÷ (1 ÷ (1 + 2))</answer>", 0),
    ("<answer>3 * 3</answer>", 0),
    ("<answer>3 ** 2 * 1</answer>", 0),
    ("<answer>(1 + 2) * 3.0</answer>", 0),
    ("", 0),
    ("<answer>(1 + 2 * 3</answer>", 0),
    ("<answer>1 / (2 - 2) * 3</answer>", 0),
    ("<answer>٣*(٢+١)</answer>", 0),
    ("<answer>__import__('os')</answer>", 0),
    ("<answer>9**9**9**9</answer>", 0),
    ("-" * 199 + "1", 0),
    ("<answer>" + "(" * 98 + "1" + ")" * 98 + "</answer>", 0),
    ("<answer>(1 + 2) * 03</answer>", 0),
    ("</answer>(1 + 2) * 3", 0),
]


@pytest.mark.parametrize("text, expected", FORMULAS)
def test_a_formula_takes_each_number_once_and_no_other_operation(text, expected):
    assert countdown.reward({"nums": [1, 2, 3], "target": 9}, text) == expected


def test_the_value_is_exact_and_a_number_counts_as_often_as_it_is_given():
    """8 / (3 - 8 / 3) is 24 in fractions and 23.999999999999996 in floats."""
    problem = {"nums": [3, 3, 8, 8], "target": 24}
    assert countdown.reward(problem, "8 / (3 - 8 / 3)") == 1
    assert countdown.reward(problem, "8 * 3 * 8 / 8") == 0
    assert countdown.reward(problem, "8 * 3") == 0, "two are left"


def test_no_problem_is_held_out_in_another_order():
    task = load_task_file(countdown.__file__)
    made = [(p["target"], *sorted(p["nums"])) for p in task.train + task.held_out]
    assert len(task.train) > 4000 and len(task.held_out) == 32 and len(made) == len(set(made))
