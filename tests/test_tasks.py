"""tasks.py: what scores 1 and what scores 0, what is held out, what a bad file or flag says."""

import functools
import json
import re
import shutil
import subprocess
import sys
import time
import types
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tasks

LAST = [    # text, gold, reward
    ("56", "56", 1), ("7 * 8 = 56.", "56", 1), ("The answer is **56**", "56", 1), ("56, not 54", "56", 0),
    ("", "0", 0), (". , - $ % / ####", "0", 0), ("7.0", "7", 1), ("7.5", "7", 0), ("it is 7.", "7", 1),
    ("wait...18", "18", 1), ("it is .5", "1/2", 1), ("= -7", "-7", 1), ("= -7", "7", 0), ("= −7", "-7", 1),
    ("-$7.50", "-15/2", 1), ("$-7$", "-7", 1), ("5-3", "3", 1), ("5 - 3", "3", 1), ("5 -3", "3", 1),
    ("5 - -3", "-3", 1), ("(2)-3", "3", 1), ("COVID-19", "19", 1), ("$10-$3", "3", 1), ("1:\n-7", "-7", 1),
    ("1\n-7", "-7", 1), ("1,000", "1000", 1), ("1,234,567.", "1234567", 1), ("1, 2, 3", "3", 1),
    ("1{,}000", "1000", 1), ("1,00", "100", 0), ("1,2345", "2345", 1), ("1234,567", "1234567", 0),
    ("$18", "18", 1), ("18$", "18", 1), ("€18", "18", 1), ("18%", "18", 1), ("18 dollars", "18", 1),
    ("5kg", "5", 1), ("\\$18\\%", "18", 1), ("90^\\circ", "90", 1), ("3/4", "3/4", 1), ("-3/4", "-3/4", 1),
    ("3/4.5", "4.5", 1), ("\\frac{3}{4}", "3/4", 1), ("-\\dfrac{3}{4}", "-3/4", 1),
    ("\\frac12", "1/2", 1), ("\\frac12", "12", 0), ("1\\dfrac 34", "7/4", 1),
    ("\\frac{-3}{4}", "-3/4", 1), ("1/0", "0", 0), ("1 1/2", "3/2", 1), ("-1 1/2", "-3/2", 1),
    ("1\\frac{1}{2}", "3/2", 1), ("5 48/2", "24", 1), ("0.33", "1/3", 0), ("1e3", "1000", 1),
    ("2.5E-1", "1/4", 1), ("1e400", "400", 0), ("1e999999999", "1", 0), ("2 × 10^3", "3", 0),
    ("9**9**9**9", "9", 0), ("9 ** 9", "9", 0), ("3^{2}", "2", 0), ("3^2", "9", 0), ("2*3", "6", 0),
    ("٣", "3", 0), ("１８", "18", 0), ("x²", "2", 0), ("1" * 40, "1" * 40, 1), ("1" * 41, "1" * 41, 0),
    ("\ud800 7", "7", 1), ("7" + " " * 1999, "7", 1), ("7" + " " * 2000, "7", 0), ("12" + " " * 1999, "2", 0)]

FINAL = [    # text, gold, reward: a number after #### precedes one in \boxed, which precedes the last
    ("#### 18", "18", 1), ("####18", "18", 1), ("#### $18.00", "18", 1), ("#### **18**", "18", 1),
    ("#### -5", "-5", 1), ("#### 70,000 people in 3 towns", "70000", 1), ("#### 17\n#### 18", "18", 1),
    ("#### 18\n#### 17", "18", 0), ("#### 18, not 17", "18", 1), ("#### 17 or 18", "18", 0),
    ("\\boxed{17} #### 18", "18", 1), ("#### 17 \\boxed{18}", "18", 0), ("#### Step 2\nso it is 18", "18", 1),
    ("#### <number>\n18", "18", 1), ("####", "18", 0), ("#### 9**9", "9", 0),
    ("so \\boxed{18} of 20", "18", 1), ("\\boxed{17}, \\boxed{18}.", "18", 1),
    ("\\boxed{18\\text{ cm}} in 2 days", "18", 1), ("\\boxed{\\frac{3}{4}} of 20", "3/4", 1),
    ("\\boxed{\\boxed{18}} of 20", "18", 1), ("\\boxed{x = 18} of 20", "18", 1),
    ("\\boxed{} it is 18", "18", 1), ("\\boxed{many} or 18", "18", 1), ("\\boxed{17", "17", 1),
    ("17 of them, so 18", "18", 1), ("", "0", 0)]

SQUARED = [    # text, gold, reward: a unit's exponent is ignored, a variable's is a power, which scores 0
    ("\\boxed{540\\text{ m}^2} in 3 steps", "540", 1), ("It is 540 m^2.", "540", 1), ("540 m2", "540", 1),
    ("\\boxed{540\\,\\mathrm{cm}^{2}} in 3", "540", 1), ("\\boxed{540\\text{ m^2}} in 3", "540", 1),
    ("#### 540 m^2", "540", 1), ("540 $m^3$", "540", 1), ("$540$ ft$^2$", "540", 1), ("9.8 m/s^2", "9.8", 1),
    ("540 sq. ft.^2", "540", 0), ("4 mp3 players", "4", 1), ("540 m^2 in 2 rooms", "2", 1),
    ("540 m^24", "24", 0), ("2 m^2", "4", 0), ("3x^2", "3", 0), ("3x^2", "2", 0), ("x^2", "2", 0),
    ("it is m^2", "2", 0)]

MARKED = [    # text, gold, reward: #### before a heading, and before an equation
    ("#### 1. First step\n6 * 3 = 18", "18", 1), ("#### 1. First step\n6 * 3 = 18", "1", 0),
    ("#### 1. Add\n6\n#### 2. Multiply\n18", "18", 1), ("#### 2) **Then** 17\n\\boxed{18} of 20", "18", 1),
    ("#### 1. First step\n#### 18", "18", 1), ("#### 18. She has 18 pens.", "18", 1), ("#### 18.", "18", 1),
    ("#### 1.5 kg", "1.5", 1), ("#### 118. A hundred", "118", 1), ("#### 18 (6 * 3)", "18", 1),
    ("#### 6 * 3 = 18", "18", 1), ("#### 6 * 3 = 18", "6", 0), ("#### 18 = 6 * 3", "18", 1),
    ("#### 6 * 3 = 18", "3", 0), ("#### $6 × 3 = $18", "18", 1), ("#### 6 \\times 3 = 18", "18", 1),
    ("#### 36 / 2 = 18", "18", 1), ("#### 36/2 = 18", "18", 1), ("#### 1/3 = 0.33", "1/3", 1),
    ("#### 2 * 9 = 3 * 6 = 18", "18", 1), ("#### (2 + 4) * 3 = 18 pens", "18", 1),
    ("#### 3 - 5 = -2", "-2", 1)]

HOSTILE = [
    "9**9**9", "9**9**9**9", "1" * 10**6, "-" * 10**5, "(" * 10**5, ",1" * 10**5, "\\boxed{" * 10**4,
    "#" * 10**5, "\\boxed{{}" * 10**4, "#### " * 10**4, "1 " * 10**5, "1/" * 10**5, "1/1 " * 10**5,
    "1 1/1.1" * 10**4, "1,111" * 10**4, "1" * 999 + " " + "1" * 999 + "/", "1e" * 10**5, "1e" + "9" * 10**5,
    "\\frac{1}{" * 10**4, "5" + " " * 10**5, "\\frac{" + "1" * 10**5, "1,111" + ",111" * 10**5 + "1",
    "#### " + "$" * 10**5, " " * 10**5, "**" * 10**5, "#### " + "6*3=" * 10**5, "#### 1+" + "\\a" * 10**5,
    "1" + "a/" * 10**5, "1" + "$ " * 10**5, "1m" * 10**5, "####\\times" * 10**4]


@pytest.fixture
def file(tmp_path):
    golds = ["18", "-2", "1,234", "70,000", "2.5", "$9", "3/4", "0"]
    records = [{"question": f"Is {{it}} {i}?", "answer": f"2\n#### {gold}"} for i, gold in enumerate(golds)]
    path = tmp_path / "eight.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return path


@pytest.mark.parametrize("text, gold, expected", LAST)
def test_the_last_number_counts(text, gold, expected):
    assert (tasks.last_number(text) == Fraction(gold)) == expected


@pytest.mark.parametrize("text, gold, expected", FINAL + SQUARED + MARKED)
def test_gsm8k_prefers_the_mark_then_the_box_then_the_last_number(text, gold, expected):
    problem = {"question": "", "answer": f"1 + 1 = 2\n#### {gold}"}
    assert tasks.gsm8k_reward(problem, text, True) == expected
    assert tasks.gsm8k_reward(problem, text, False) == 0, "an answer that the model did not end scores 0"


def cpu_seconds(reward, *answer):
    """Processor time, to which other jobs do not add: the least of three calls, or of one if that is fast."""
    took = []
    while len(took) < 3 and (not took or took[-1] >= .01):
        began = time.process_time()
        assert reward(*answer) in (0.0, 1.0)
        took.append(time.process_time() - began)
    return min(took)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_takes_10_ms_of_the_processor(text):
    """Towers such as 9**9**9 score 0 without being computed."""
    nine = {"answer": "#### 9", "a": 4, "b": 5}
    for reward in (tasks.gsm8k_reward, tasks.TASKS["addition"]().reward):
        assert reward(nine, text, True) == 0
        assert cpu_seconds(reward, nine, text, True) < 0.01


@settings(deadline=None)                                    # a busy machine is no error
@given(st.text() | st.text(alphabet="0123456789-−.,/$%*^(){}#e \\") | st.from_regex(tasks.NUMBER))
def test_any_text_at_all_scores_0_or_1(text):
    assert tasks.gsm8k_reward({"answer": "#### 1,000"}, text, True) in (0.0, 1.0)
    assert tasks.gsm8k_reward({"answer": "#### 1,000"}, text + "\n#### 1000", True) == 1.0


@pytest.mark.parametrize("name, operands, total", [("multiplication", None, 121), ("addition", None, 10_000),
                                                   ("addition", "0-7", 64), ("multiplication", "11-19", 81)])
def test_held_out_pairs_are_not_trained_on_in_either_order(name, operands, total):
    task, again = tasks.TASKS[name](None, operands), tasks.TASKS[name](operands=operands)
    train, held = ([(p["a"], p["b"]) for p in part] for part in (task.train, task.held_out))
    assert len(set(held)) == len(held) == 32 and len(set(train)) == len(train) == total - 32
    assert not {*held, *((b, a) for a, b in held)} & set(train)
    assert again.train == task.train and again.held_out == task.held_out


def test_exactly_as_many_are_held_out_as_asked_for():
    for n in range(1, 12):
        asked = range(n * n // 2 + 1)
        tasks_of = [tasks.TASKS["addition"](operands=f"1-{n}", held_out=held) for held in asked]
        assert [len(task.held_out) for task in tasks_of] == [*asked]


def test_arithmetic_prompts_and_rewards():
    times, plus, problem = tasks.TASKS["multiplication"](), tasks.TASKS["addition"](), {"a": 7, "b": 8}
    assert times.prompt(problem) == "What is 7 * 8?" and plus.prompt(problem) == "What is 7 + 8?"
    assert times.reward(problem, "7 * 8 = 56", True) == plus.reward(problem, "15.", True) == 1.0
    assert times.reward(problem, "15", True) == times.reward(problem, "56", False) == 0.0


@pytest.mark.parametrize("operands", ["12-2", "2", "2-", "-2-5", "2-3", "0-1000", "0-99999999", "٢-٩"])
def test_bad_operands_are_named(operands):
    with pytest.raises(ValueError, match=f"^--operands {operands} "):
        tasks.TASKS["addition"](operands=operands)


@pytest.mark.parametrize("line", ["[1]", '{"question": "a"}', "[" * 10**5, '{"question": "a", "answer": 3}',
                                  '{"question": "", "answer": "#### 3"}', '{"question": "a", "answer": "3"}',
                                  r'{"question": "\ud83d", "answer": "#### 3"}'])
def test_a_broken_line_is_named(file, line):
    file.write_text(file.read_text() + line)
    with pytest.raises(ValueError, match="eight.jsonl, line 10: ."):
        tasks.TASKS["gsm8k"](file)


def test_a_line_taken_out_moves_one_problem_at_most(tmp_path):
    """Otherwise a resumed run would be evaluated on problems that it has trained on."""
    records = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(400)]
    old = tasks.TASKS["gsm8k"](jsonl(tmp_path / "old.jsonl", records), held_out=64)
    assert len(old.held_out) == 64
    for out, moved in ((old.train[0], 0), (old.held_out[0], 1)):
        left = jsonl(tmp_path / "new.jsonl", [r for r in records if r != out])
        new = tasks.TASKS["gsm8k"](left, held_out=64)
        assert sum(p in old.train for p in new.held_out) == moved and len(new.held_out) == 64
        assert sum(p in old.held_out for p in new.train) == 0


def test_gsm8k_holds_out_a_quarter_of_a_small_file(file):
    task = tasks.TASKS["gsm8k"](str(file))
    assert len(task.train) == 6 and len(task.held_out) == 2 and task == tasks.TASKS["gsm8k"](file)
    assert not [p for p in task.held_out if p in task.train]
    assert task.prompt(task.train[0]).startswith("Is {it} ") and "#### <number>" in task.prompt(task.train[0])
    for args, says in ([(), "--data FILE.jsonl"], [("absent",), "absent cannot .*: give FILE.jsonl"],
                       [(file, "2-3"), "--operands 2-3 has"]):
        with pytest.raises(ValueError, match=says):
            tasks.TASKS["gsm8k"](*args)


def word_problems(path, numbers):
    """Writes a file in GSM8K's format with one problem per number."""
    path.write_text("".join(f'{{"question": "Is it {n}?", "answer": "#### {n}"}}\n' for n in numbers))
    return str(path)


def asked(problems):
    return sorted(int(p["question"][6:-1]) for p in problems)


def test_all_of_a_test_file_is_held_out_and_none_of_it_trained_on(tmp_path):
    """Both files have 10 problems; problems 8 and 9 are in both."""
    data, test = (word_problems(tmp_path / f"{n}.jsonl", range(n, n + 10)) for n in (0, 8))
    task = tasks.tested("gsm8k", test, data)
    assert asked(task.held_out) == [*range(8, 18)] and asked(task.train) == [*range(8)]
    assert task.reward(task.held_out[0], task.held_out[0]["answer"], True) == 1
    assert task.prompt(task.train[0]) == tasks.TASKS["gsm8k"](data).prompt(task.train[0])
    assert tasks.tested("gsm8k", test, data, trains=False)[:2] == task[:2]
    again = word_problems(tmp_path / "again.jsonl", range(17, 7, -1))
    with pytest.raises(ValueError, match="every problem of --data .*again.jsonl is in --test .*8.jsonl: no"):
        tasks.tested("gsm8k", test, again)


def test_without_data_a_test_file_is_read_to_evaluate_and_never_to_train(tmp_path, monkeypatch):
    """To train without data raises the same error as without a test file, before the test file is read."""
    test, test_path = word_problems(tmp_path / "test.jsonl", range(10)), tmp_path / "few.jsonl"
    task = tasks.tested("gsm8k", test, trains=False)
    assert task.train == [] and asked(task.held_out) == [*range(10)]
    for path in (test, "absent.jsonl"):
        with pytest.raises(ValueError, match="^this task needs problems: give --data"):
            tasks.tested("gsm8k", path)
    with pytest.raises(ValueError, match="absent.jsonl cannot be read"):
        tasks.tested("gsm8k", "absent.jsonl", trains=False)
    for n in (1, 3):                                                  # in the order of the file, however few
        assert tasks.tested("gsm8k", word_problems(test_path, range(n)), trains=False).held_out == [
            {"question": f"Is it {i}?", "answer": f"#### {i}"} for i in range(n)]
    with pytest.raises(ValueError, match="few.jsonl has 0 problems, too few"):
        tasks.tested("gsm8k", word_problems(test_path, range(0)), trains=False)
    with pytest.raises(ValueError, match="--operands 1-9 has no meaning beside problems from .*test.jsonl"):
        tasks.tested("gsm8k", test, operands="1-9", trains=False)


@pytest.mark.parametrize("trains", [True, False])
def test_the_arithmetic_tasks_refuse_a_test_file(trains):
    with pytest.raises(ValueError, match="some.jsonl: the arithmetic tasks .*: leave out --data and --test"):
        tasks.tested("addition", "some.jsonl", trains=trains)


def test_the_file_runs_and_reads_problems_alone_in_a_folder(file, tmp_path):
    """-I keeps our other modules off the path. Each gold answer scores 1, gold + 1 scores 0."""
    (tmp_path / "alone").mkdir()
    alone = shutil.copy(tasks.__file__, tmp_path / "alone")
    shown = subprocess.run([sys.executable, "-I", alone], capture_output=True, text=True, check=True).stdout
    assert "1.0  #### 18\n" in shown and "0.0  #### 17, or 18\n" in shown
    for problem in tasks.read(file, tasks._word_problem):
        right = problem["answer"]
        assert tasks.gsm8k_reward(problem, right, True) == 1
        assert tasks.gsm8k_reward(problem, f"{right}\n#### {tasks.final_answer(right) + 1}", True) == 0


MATH = [    # gold, boxed, reward
    ("5, 100", "5100", 0), ("5100", "5, 100", 0), ("5, 100", "100, 5", 1), ("5100", "5,100", 1),
    ("5100", "5{,}100", 1), ("5,\\!100", "5100", 1), ("11", "1 1", 0), ("\\frac{1}{2}", "50\\%", 1),
    ("\\frac{1}{2}", "50 %", 1), ("\\frac{1}{2}", "0.5\\%", 0), ("0.5", "0.5\\%", 0),
    ("50\\%", "\\frac{1}{2}", 1), ("0.5\\%", "\\frac{1}{2}", 0), ("50\\%", "50", 1),
    ("\\frac{\\pi}{2}", "\\dfrac{\\pi}{2}", 1), ("\\frac{a}{b}", "\\tfrac{a}{b}", 1),
    ("\\frac{1}{2}", "\\dfrac12", 1), ("\\frac{1}{2}", "0.5", 1), ("\\frac{1}{2}", "x = \\frac{1}{2}.", 1),
    ("\\frac{1}{2}", "1/3", 0), ("1/3", "0.33", 0), ("5", "5\\text{ cm}", 1), ("90", "90^\\circ", 1),
    ("(1, 2)", "\\left(1,2\\right)", 1), ("(1, 2)", "(2, 1)", 0), ("-7", "−7", 1), ("7", "7.", 1),
    ("7", "-7", 0), ("2\\sqrt{3}", "2\\sqrt3", 1), ("2\\sqrt{3}", "\\sqrt{12}", 1),
    ("x^2 + 2x + 1", "(x + 1)^2", 1), ("x^2 + 2x + 1", "(x + 1)^3", 0), ("\\{1, 2\\}", "2, 1", 1),
    ("\\{1, 2\\}", "1", 0), ("5", "5, 6", 0), ("\\text{Evelyn}", "Evelyn", 1),
    ("\\text{east}", "\\text{west}", 0), ("3 + 4i", "4i + 3", 1), ("3^2", "9", 1),
    ("1\\frac{1}{2}", "3/2", 1), ("5.5", "1 1/2", 0), ("a_{b_{c}}", "a_{b_{ c }}", 1),
    ("70\\,\\text{cm}^2", "70", 1), ("2^{2004}", "2^{2004}", 1), ("\\binom{10}{3}", "120", 1),
    ("6!", "720", 1), ("5", "", 0), ("5", " ", 0), ("5", ".", 0), ("9", "9**9**9**9", 0)]

HOW_IT_IS_STORED = [    # by MATH-500, MATH, BigMath, DAPO (as published, reprocessed), plain JSONL, a chat
    {"problem": "Half of one?", "solution": "It is \\boxed{3}.", "answer": "\\frac{1}{2}"},
    {"problem": "Half of one?", "solution": "It is \\boxed{1}. No, \\boxed{\\frac{1}{2}}."},
    {"problem": "Half of one?", "answer": "\\frac{1}{2}", "llama8b_solve_rate": .5},
    {"problem": "Half of one?", "solution": "We get $\\boxed \\frac{1}{2}$."},
    {"prompt": [{"role": "user", "content": "Solve the following math problem step by step. The last …"
                                            "\n\nHalf of one?\n\nRemember to put your answer on its own …"}],
     "reward_model": {"ground_truth": "\\frac{1}{2}", "style": "rule"}},
    {"prompt": "Half of one?", "solution": "\\frac{1}{2}"},
    {"question": "Half of one?", "answer": "#### \\frac{1}{2}"},
    {"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Half of one?"}],
     "answer": "\\boxed{\\frac{1}{2}}"}]


def test_an_answer_that_is_a_number_is_taken_wherever_it_stands(tmp_path):
    records = [{"prompt": [{"role": "user", "content": f"{n}?"}], "reward_model": {"ground_truth": n}}
               for n in range(4)]
    task = tasks.TASKS["math"](jsonl(tmp_path / "some.jsonl", records))
    assert sorted(p["answer"] for p in task.train + task.held_out) == ["0", "1", "2", "3"]


def jsonl(path, records):
    path.write_text("\n".join(map(json.dumps, records)))
    return path


@pytest.mark.parametrize("gold, boxed, expected", MATH)
def test_math_is_judged_by_math_verify(gold, boxed, expected):
    text = f"It is \\boxed{{0}}, no: $\\boxed{{{boxed}}}$."
    assert tasks.math_reward({"answer": gold}, text, True) == expected
    assert tasks.math_reward({"answer": gold}, text, False) == 0
    assert tasks.math_reward({"answer": gold}, f"{boxed}", True) == 0, "without a box"


@pytest.mark.parametrize("solution, gold", [
    ("so $\\boxed 2$. Then $x$", "2"), ("It is $\\boxed  {5}$.", "5"),
    ("\\[x = \\boxed 7 \\] Hence $y$", "7"), ("$\\boxed \\$32.50$", "\\$32.50"),
    ("\\begin{align*} x&=\\boxed \\frac12 \\end{align*}", "\\frac12"),
    ("no formula: \\boxed 2", "no formula: \\boxed 2")])
def test_a_box_without_braces_ends_with_its_formula(solution, gold):
    assert tasks._latex_problem({"problem": "?", "solution": solution})["answer"] == gold


@pytest.mark.parametrize("record", HOW_IT_IS_STORED)
def test_math_reads_the_field_names_of_the_known_datasets(tmp_path, record):
    key = next(k for k in ("problem", "question", "prompt") if k in record)
    others = [{key: f"{i}?", "answer": i} for i in (1, 2, 3, 3)]
    task = tasks.TASKS["math"](jsonl(tmp_path / "some.jsonl", [record, *others]))
    problem, = (p for p in task.train + task.held_out if "Half" in p["problem"])
    assert problem == {"problem": "Half of one?", "answer": "\\frac{1}{2}"} and len(task.train) == 3
    assert task.prompt(problem).startswith("Half of one?\n") and task.prompt(problem).endswith("\\boxed{}.")
    assert task.reward(problem, "\\boxed{.5}", True) == 1


@pytest.mark.parametrize("line", [
    '{"problem": "a"}', '{"answer": "3"}', "[1]", "3", "{", '{"problem": "a", "answer": ""}',
    '{"prompt": [], "answer": "3"}', '{"prompt": ["hi"], "answer": "3"}', '{"problem": "a", "answer": NaN}',
    '{"prompt": [{"role": "assistant", "content": "a"}], "answer": "3"}',
    '{"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "answer": "3"}',
    '{"problem": "a", "answer": "' + "x" * 501 + '"}'])
def test_a_broken_line_of_task_math_is_named(tmp_path, line):
    good = '{"problem": "a", "answer": "3"}\n\n'
    (tmp_path / "some.jsonl").write_text(good + line)
    with pytest.raises(ValueError, match="some.jsonl, line 3: .") as refused:
        tasks.TASKS["math"](tmp_path / "some.jsonl")
    assert "\n" not in str(refused.value)


def test_a_dataset_of_the_hub_is_read_through_datasets_which_is_named_where_it_is_missing(monkeypatch):
    """owner/name[/config][:split]. A file, or a name that ends like one, is never looked up on the hub."""
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        if name == "o/none":
            raise RuntimeError("no such dataset\nand more")
        good = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(7)]
        return good + [{"question": "8?"}] * (split == "bad")
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert len(tasks.TASKS["gsm8k"]("o/n").train) == 6 and tasks.TASKS["gsm8k"]("o/n/c:test[:50%]")
    for data, says in (("o/n:bad", "o/n:bad, line 8: .* 'answer' is some text"),
                       ("data/x.jsonl", "No such file"),
                       ("o/none", "o/none cannot be read .no such dataset.:")):
        with pytest.raises(ValueError, match=says):
            tasks.TASKS["gsm8k"](data)
    assert asked == [("o/n", None, "train"), ("o/n", "c", "test[:50%]"), ("o/n", None, "bad"),
                     ("o/none", None, "train")]
    monkeypatch.setitem(sys.modules, "datasets", None)                # makes the import fail
    with pytest.raises(ValueError, match="o/n cannot be read .*pip install datasets"):
        tasks.TASKS["gsm8k"]("o/n")


def test_task_math_names_the_command_where_math_verify_is_missing(tmp_path, monkeypatch):
    """Once it is installed, the same process can make the task."""
    (tmp_path / "math_verify.py").write_text("raise ModuleNotFoundError('math_verify')")
    data = jsonl(tmp_path / "some.jsonl", [{"problem": str(i), "answer": i} for i in range(4)])
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        patch.setattr(tasks, "_worker", functools.cache(tasks._worker.__wrapped__))
        tasks.equal.cache_clear()
        for _ in range(2):
            with pytest.raises(ValueError, match="math-verify, which does not run: pip install math-verify$"):
                tasks.TASKS["math"](data)
        patch.delenv("PYTHONPATH")
        assert len(tasks.TASKS["math"](data).train) == 3
        tasks._worker().communicate()


DEEP = ["(", "[", "\\left(", "\\sqrt{(", "-(", "\\{"]
TOWERS = [    # of powers and factorials; series; huge exponents: the guard refuses each
    "9^{9^9}", "9^{9^{9^9}}", "9^{9^{9^{9^9}}}", "2^{64!}", "9^9^9^9", "\\frac{9^{9^9}}{9^{9^8}}",
    "7^{9^{9}} \\mod 13", "\\tan(10^{10^{10}})", "((9!)!)!", "9!!", "1000000!", "\\left(10000000\\right)!",
    "\\binom{1000000}{500000}", "\\binom{10^{8}}{10^{7}}^{10^9}", "9^{999999999}", "7^{-1000000000}",
    "(x + 1)^{1000}", "(x+y+z+w)^{200}", "(x+1)^{100}(y+1)^{100}", "\\left(x+1\\right)^{999}",
    "\\sum_{i=1}^{100000000} i^i", "\\prod_{i=1}^{1000000} i", "\\int_0^1 e^{x^2} \\sin(x^3) dx",
    "\\iint x^x dx dx", "\\lim_{x \\to 0} x^{x}", "\\Gamma(10^9)", "\\sum_{k=1}^{1000000} \\frac{1}{k^2}",
    "2^" * 100 + "2"]
PASS = [    # the guard; math-verify judges each, or is ended after 1 s of processor time
    "(x+1)^{99}(y+1)^{99}(z+1)^{99}", "9**9**9**9", "(((9^9)^9)^9)^9", "9" * 400, "1/" * 100 + "1",
    "1e999999999", "+".join("1" * 150), "|" * 100, "\\" * 100, "^" * 200, "\\text{" + "a" * 300 + "}", "\0",
    "\ud800", "99999!"]
CLOSE = {"(": ")", "[": "]", "{": "}"}
HOSTILE_MATH = (PASS + [bracket * n + "1" + CLOSE[bracket[-1]] * n for bracket in DEEP for n in (20, 50, 200)]
                + [bracket * 200 for bracket in DEEP] + ["1+" * n + "1" for n in (251, 400, 900)]
                + [f"{tower}{more}" for more in ("", " + 1", " - x", " + y") for tower in TOWERS])[:128]


def test_128_hostile_answers_end_and_the_honest_beside_them_keep_their_reward(monkeypatch):
    """An honest answer follows each hostile one. The guard refuses most hostile ones. Nothing is cached."""
    passed, equal = [], tasks.equal.__wrapped__
    monkeypatch.setattr(tasks, "equal", lambda *pair: passed.append(pair) or equal(*pair))
    worker = tasks._worker()
    rewards = []
    for n, hostile in enumerate(HOSTILE_MATH):
        rewards.append(tasks.math_reward({"answer": "42"}, f"\\boxed{{{hostile}}}", True))
        assert tasks.math_reward({"answer": f"\\frac{{{n}}}{{2}}"}, f"\\boxed{{{n}/2}}", True) == 1, hostile
    assert rewards == [0.0] * 128 and len(set(HOSTILE_MATH)) == 128
    assert 5 < len(passed) - 128 <= len(PASS)
    assert tasks._worker() is worker and worker.poll() is None, "the judge is the process that it was"


@pytest.mark.parametrize("answer", TOWERS + ["(" * 9 + "1" + ")" * 9, "1+" * 250 + "1"])
def test_the_guard_refuses_and_never_says_equal(answer):
    """Not even if answer and gold are the same text. If the gold has a tower too, math-verify judges."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "equal", lambda *pair: asked.append(pair) or False)
        assert tasks.math_reward({"answer": "42"}, f"\\boxed{{{answer}}}", True) == 0 and not asked
        assert tasks.math_reward({"answer": answer}, f"\\boxed{{{answer}}}", True) == 0
        assert len(asked) == (answer in TOWERS)


def test_a_judge_that_is_killed_is_an_error_and_no_reward_of_0(monkeypatch):
    """The kernel kills processes when memory runs out. The next answer gets a new judge."""
    monkeypatch.setattr(tasks, "_worker", functools.cache(tasks._worker.__wrapped__))
    tasks._worker().kill()
    with pytest.raises(ValueError, match="math-verify, which does not run"):
        tasks.equal("7", "7.00")
    assert tasks.equal("7", "7.00") is True
    tasks._worker().communicate()                                     # closes its input, which ends it


HARD = st.sampled_from([
    "9**9**9**9", "1e999999999", "\\boxed{", "}", "{", "\\frac{", "\\left(", "\\text{", "####", "<answer>",
    "</answer>", "\\boxed{\\boxed{", "{{{{{{{{", "}}}}}}}}", "9" * 300, "((((((((", "**", "//", "-", "=",
    "\n", "\\", "$", " ", "½", "٣", "\ud800", "\0", "1,000", "3/4", "1/0", "\\sqrt", "^\\circ", "+", "*",
    "(1 + 2) * 3", "\\boxed{\\frac{1}{2}}"])
NUMBERS = st.integers().map(str)
NESTED = st.recursive(NUMBERS | HARD, lambda inside: st.lists(inside, max_size=4).map(
    lambda parts: f"{{{''.join(parts)}}}") | inside.map("\\boxed{{{}}}".format) | inside.map("({})".format))
COMPLETION = (st.text() | NESTED | st.lists(HARD | NUMBERS, max_size=80).map("".join)
              | st.tuples(HARD, st.integers(1, 3000)).map(lambda pair: pair[0] * pair[1]))
ADDITION = tasks.TASKS["addition"]()


@settings(max_examples=2_000, deadline=None)
@given(COMPLETION)
def test_two_thousand_hostile_answers_cost_under_10_ms_each_and_score_0_or_1(text):
    """Processor time of each reward; for math of the guard alone, without math-verify."""
    judges = [(tasks.gsm8k_reward, {"answer": "#### 1,000"}), (ADDITION.reward, {"a": 1, "b": 2}),
              (tasks.math_reward, {"answer": "\\frac{1}{2}"})]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "equal", lambda gold, answer: gold == answer)
        for reward, problem in judges:
            assert cpu_seconds(reward, problem, text, True) < .01, (reward, text)


README = (Path(__file__).parent.parent / "README.md").read_text()
OWN = re.search("```python\n(.*?)```", README, re.S)[1]                        # the README's example


@pytest.mark.parametrize("gold", ["1 000", "3,5", "1.000,00", "3 × 10^5", "12:30", "1_000", "1,234,56", "5!",
                                  "3²", "3 * 4", "1\u00a0000", "1'000", "5-3", "3 x 10", "1\t0"])
def test_a_gold_that_would_be_read_in_part_is_refused(tmp_path, gold):
    """Or its first number would be rewarded. Text after a number is a unit and is accepted."""
    for plain in ("1,234", "5.", "5 apples", "$5.50", "1/2", "**5**", "5 (3 + 2)", "5\n6 is wrong",
                  "5 m^2", "6 * 3 = 18", "1. First step\n#### 18"):
        assert tasks._word_problem({"question": "q", "answer": f"#### {plain}"})
    with pytest.raises(ValueError, match="must end with '#### number'"):
        tasks._word_problem({"question": "q", "answer": "#### 1. First step"})
    path = jsonl(tmp_path / "some.jsonl", [{"question": "q", "answer": f"#### {gold}\n"}])
    with pytest.raises(ValueError, match="line 1: its answer .* is read as [0-9.,]+: write one plain"):
        tasks.gsm8k(path)


def test_a_task_of_ones_own_is_a_file_of_ten_lines(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    task = tasks.own(str(path))
    assert OWN.count("\n") <= 10 and len(task.train) == 68 and len(task.held_out) == 22
    problem = {"prompt": "What is 8 - 1?", "answer": 7}
    assert task.prompt(problem) == "What is 8 - 1?" and not [p for p in task.held_out if p in task.train]
    assert [task.reward(problem, text, True) for text in ("7", "8", "x")] == [1, .1, 0]
    assert task.reward(problem, "7", False) == 0, "an answer that the model did not end"
    path.write_text("def problems():\n    yield from ({'n': n} for n in range(8))\n"
                    "prompt = lambda problem: str(problem['n'])\nreward = lambda problem, text, end: -end")
    task = tasks.own(str(path))
    assert task.prompt({"n": 3}) == "3" and [task.reward({}, "", f) for f in (True, False)] == [-1, 0]
    for third, judged in (("tolerance=.5", [.5, 0]), ("finished=.5", [1, 0])):    # optional parameters
        name = third.split("=")[0]
        path.write_text(f"{OWN}\ndef reward(problem, text, {third}):\n    return float({name})\n")
        task = tasks.own(str(path))
        assert [task.reward({}, "", f) for f in (True, False)] == judged
    for third in ("**more", "*, finished=None"):                    # what a positional argument cannot reach
        path.write_text(f"{OWN}\ndef reward(problem, text, {third}):\n    return 0.5\n")
        assert [tasks.own(str(path)).reward({}, "", f) for f in (True, False)] == [.5, 0]


MINE = """def problems():
    return [{"prompt": f"What is {n} - 1?", "answer": n - 1} for n in range(10, 100)]
def reward(problem, text):
    return float(int(text) == problem["answer"])
"""


@pytest.mark.parametrize("text, says", [
    (None, ": FileNotFoundError: .* No such file"), ("x =", r": SyntaxError: .*\(mine.py, line 1\)"),
    ("\n1 / 0", ", line 2: ZeroDivisionError: .* in import"), ("import absent", ", line 1: ModuleNotFound"),
    ("", r" defines no reward\(\)"), ("def reward(problem, text): pass", r" defines no problems\(\)"),
    ("import sys\nsys.exit(0)", r", line 2: SystemExit: 0 in import\(\)"),
    (MINE + "problems = lambda: [{}][1]", r", line 5: IndexError: .* in problems\(\)"),
    (MINE + "problems = lambda: exit(3)", r", line 5: SystemExit: 3 in problems\(\)"),
    (MINE + "reward = 1", r": TypeError: 1 is not a callable object in reward"),
    (MINE.replace('{"prompt"', '{"question"'), ": the prompt of {.*} is None, no text .*: define prompt"),
    (MINE + "prompt = lambda problem: 7", ": the prompt of {.*} is 7, no text and no list of {'role'"),
    (MINE + "prompt = lambda problem: []", r": the prompt of {.*} is \[\], no text"),
    (MINE + "prompt = lambda problem: [{'role': 'user'}]", r": the prompt .* is \[{'role': 'user'}\], no"),
    (MINE + "prompt = lambda problem: ['user']", r": the prompt of {.*} is \['user'\], no text"),
    (MINE + "def prompt(problem):\n    return problem['x']", r", line 6: KeyError: 'x' in prompt\({'prompt'"),
    (MINE.replace("range(10, 100)", "range(3)"), " has 3 problems, too few")])
def test_a_file_that_is_no_task_is_named_with_its_line_and_the_reason(tmp_path, text, says):
    """In one line, because train.py prints a ValueError without its traceback."""
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}{says}") as error:
        tasks.own(str(path))
    assert "\n" not in str(error.value)


def test_a_reward_that_fails_is_named_with_its_line_and_the_answer_that_it_failed_on(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    says = r"mine.py, line 4: ValueError: .* in reward\({'answer': 7}, 'a\\nb'\)$"
    with pytest.raises(ValueError, match=says) as error:
        tasks.own(str(path)).reward({"answer": 7}, "a\nb", True)
    assert "\n" not in str(error.value)
    for value in ("nan", "inf", "-1e7"):
        path.write_text(f"{MINE}\ndef reward(problem, text):\n    return float('{value}')\n")
        with pytest.raises(ValueError, match="mine.py: .* is not between -1e6 and 1e6, the reward of '7'"):
            tasks.own(str(path)).reward({}, "7", True)
    path.write_text(f"{MINE}\ndef reward(problem, text):\n    'forgets to return'\n")
    with pytest.raises(ValueError, match=r"mine.py: TypeError: .* not 'NoneType' in reward\({}, '7'\)"):
        tasks.own(str(path)).reward({}, "7", True)


def raised(kind):
    raise kind


def test_sys_exit_in_a_reward_is_an_error_and_a_signal_is_none(tmp_path):
    """launch.py turns SIGTERM into SystemExit(143), whatever function runs just then."""
    path = tmp_path / "mine.py"
    path.write_text(MINE + "def reward(problem, text):\n    problem['do']()\n")
    reward = tasks.own(str(path)).reward
    with pytest.raises(ValueError, match="mine.py, line 6: SystemExit: 1 in reward"):
        reward({"do": functools.partial(sys.exit, 1)}, "7", True)
    for stop in (KeyboardInterrupt(), SystemExit(143), SystemExit(129)):
        with pytest.raises(type(stop)) as passed:
            reward({"do": functools.partial(raised, stop)}, "7", True)
        assert passed.value is stop


def test_a_task_of_ones_own_imports_what_lies_beside_it(tmp_path):
    """Also when reward() imports it. The helper's own line is named."""
    path = tmp_path / "mine.py"
    path.write_text(MINE + "import own_first\ndef reward(problem, text):\n    import own_second\n"
                    "    return own_second.half(text) + own_first.NONE\n")
    (tmp_path / "own_first.py").write_text("NONE = 0")
    (tmp_path / "own_second.py").write_text("def half(text):\n    return int(text) / 2\n")
    reward = tasks.own(str(path)).reward
    assert reward({}, "3", True) == 1.5
    with pytest.raises(ValueError, match="own_second.py, line 2: ValueError: .* in reward"):
        reward({}, "three", True)


def test_a_prompt_of_ones_own_may_be_a_chat(tmp_path):
    """Problems with the same chat are one, as those with the same text are."""
    path = tmp_path / "mine.py"
    path.write_text(MINE + "def prompt(problem):\n    return [{'role': 'system', 'content': 'Be brief.'},\n"
                    "            {'role': 'user', 'content': problem['prompt']}]\n")
    task = tasks.own(str(path))
    assert len(task.train) == 68 and len(task.held_out) == 22
    assert task.prompt({"prompt": "a"}) == [{"role": "system", "content": "Be brief."},
                                            {"role": "user", "content": "a"}]
    path.write_text(path.read_text().replace("problem['prompt']", "problem['prompt'][:9]"))
    assert len(tasks.own(str(path)).train) == 7                       # "What is 1" to "What is 9"


ARRAY = b'[\n  {"question": "a", "answer": "#### 1"}\n]'


@pytest.mark.parametrize("content, says", [
    (ARRAY, "Expecting value.*; write one JSON object a line$"),
    (ARRAY.replace(b"\n", b""), "'list' .*; write one JSON object a line$"),
    (b'{"question": "a", "answer": "#### 1"},', "Extra data.*; write one JSON object a line$"),
    ('{"question": "é"}'.encode("latin-1"), "'utf-8' codec can't decode .*; save it as UTF-8$"),
    ('{"question": "é"}\n'.encode("utf-16"), "'utf-16.*' codec can't decode .*; save it as UTF-8$"),
    (b'{"question": "a"}', "it must be an object in which 'answer' is some text$"),
    *((b'{"question": "a", "answer": %s}' % four, "its answer must end with '#### number'; --task math takes")
      for four in (b'"4"', b"4"))])
def test_a_file_in_another_form_is_told_the_form(tmp_path, content, says):
    (tmp_path / "some.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=f"some.jsonl, line 1: {says}"):
        tasks.TASKS["gsm8k"](tmp_path / "some.jsonl")
