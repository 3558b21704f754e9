"""tasks.py: what scores 1 and what scores 0, what is held out, what a bad file or flag says."""

import json
import shutil
import subprocess
import sys
import timeit
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tasks

LAST = [    # text, gold, reward: the last number counts
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
    ("\\frac{-3}{4}", "-3/4", 1), ("1/0", "0", 0), ("1 1/2", "3/2", 1), ("-1 1/2", "-3/2", 1),
    ("1\\frac{1}{2}", "3/2", 1), ("5 48/2", "24", 1), ("0.33", "1/3", 0), ("1e3", "1000", 1),
    ("2.5E-1", "1/4", 1), ("1e400", "400", 0), ("1e999999999", "1", 0), ("2 × 10^3", "3", 0),
    ("9**9**9**9", "9", 0), ("9 ** 9", "9", 0), ("3^{2}", "2", 0), ("3^2", "9", 0), ("2*3", "6", 0),
    ("٣", "3", 0), ("１８", "18", 0), ("x²", "2", 0), ("1" * 40, "1" * 40, 1), ("1" * 41, "1" * 41, 0),
    ("\ud800 7", "7", 1), ("7" + " " * 1999, "7", 1), ("7" + " " * 2000, "7", 0), ("12" + " " * 1999, "2", 0)]

FINAL = [    # gsm8k: #### goes before \boxed, and that before the last number
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

HOSTILE = [
    "9**9**9", "9**9**9**9", "1" * 10**6, "-" * 10**5, "(" * 10**5, ",1" * 10**5, "\\boxed{" * 10**4,
    "#" * 10**5, "\\boxed{{}" * 10**4, "#### " * 10**4, "1 " * 10**5, "1/" * 10**5, "1/1 " * 10**5,
    "1 1/1.1" * 10**4, "1,111" * 10**4, "1" * 999 + " " + "1" * 999 + "/", "1e" * 10**5, "1e" + "9" * 10**5,
    "\\frac{1}{" * 10**4, "5" + " " * 10**5, "\\frac{" + "1" * 10**5, "1,111" + ",111" * 10**5 + "1",
    "#### " + "$" * 10**5, " " * 10**5, "**" * 10**5]


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


@pytest.mark.parametrize("text, gold, expected", FINAL)
def test_gsm8k_prefers_the_mark_then_the_box_then_the_last_number(text, gold, expected):
    problem = {"question": "", "answer": f"1 + 1 = 2\n#### {gold}"}
    assert tasks.gsm8k_reward(problem, text, True) == expected
    assert tasks.gsm8k_reward(problem, text, False) == 0, "an answer that the model did not end scores 0"


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_takes_10_ms(text):
    """Best of three, for the machine may be busy; 9**9**9 and its like score 0 and are never worked out."""
    nine = {"answer": "#### 9", "a": 4, "b": 5}
    for reward in (tasks.gsm8k_reward, tasks.addition().reward):
        assert reward(nine, text, True) == 0
        assert min(timeit.repeat(lambda reward=reward: reward(nine, text, True), number=1, repeat=3)) < 0.01


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
        assert [len(tasks.addition(operands=f"1-{n}", held_out=held).held_out) for held in asked] == [*asked]


def test_arithmetic_prompts_and_rewards():
    times, plus, problem = tasks.TASKS["multiplication"](), tasks.TASKS["addition"](), {"a": 7, "b": 8}
    assert times.prompt(problem) == "What is 7 * 8?" and plus.prompt(problem) == "What is 7 + 8?"
    assert times.reward(problem, "7 * 8 = 56", True) == plus.reward(problem, "15.", True) == 1.0
    assert times.reward(problem, "15", True) == times.reward(problem, "56", False) == 0.0


@pytest.mark.parametrize("operands", ["12-2", "2", "2-", "-2-5", "2-3", "0-1000", "0-99999999", "٢-٩"])
def test_bad_operands_are_named(operands):
    with pytest.raises(ValueError, match=f"operands='{operands}'"):
        tasks.TASKS["addition"](operands=operands)


@pytest.mark.parametrize("line", ["[1]", '{"question": "a"}', "[" * 10**5, '{"question": "a", "answer": 3}',
                                  '{"question": "", "answer": "#### 3"}', '{"question": "a", "answer": "3"}'])
def test_a_broken_line_is_named(file, line):
    file.write_text(file.read_text() + line)
    with pytest.raises(ValueError, match="eight.jsonl, line 10: ."):
        tasks.TASKS["gsm8k"](file)


def test_gsm8k_holds_out_a_quarter_of_a_small_file(file):
    task = tasks.TASKS["gsm8k"](str(file))
    assert len(task.train) == 6 and len(task.held_out) == 2 and task == tasks.TASKS["gsm8k"](file)
    assert not [p for p in task.held_out if p in task.train]
    assert task.prompt(task.train[0]).startswith("Is {it} ") and "#### <number>" in task.prompt(task.train[0])
    for args, says in ([(), "--data FILE.jsonl"], [("absent",), "absent cannot"], [(file, "2-3"), "='2-3'"]):
        with pytest.raises(ValueError, match=says):
            tasks.TASKS["gsm8k"](*args)


def test_the_command_checks_files_and_shows_a_demo_alone_in_a_folder(file, tmp_path):
    (tmp_path / "alone").mkdir()
    alone = shutil.copy(tasks.__file__, tmp_path / "alone")

    def command(*args):
        return subprocess.run([sys.executable, "-I", alone, *args], capture_output=True, text=True)

    good = command(file, tmp_path / "alone" / ".." / file.name)
    assert good.returncode == 0 and good.stdout.count(" 8 gold answers accepted, 8 gold+1 rejected") == 2
    assert good.stdout.endswith("total: 16 problems, 16 gold answers accepted, 16 gold+1 rejected\n")
    assert command("/dev/null").returncode == 1, "no record is no success"
    missing = command("absent.jsonl")
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1 and "absent.jsonl" in missing.stderr
    assert command().returncode == 0 and "1.0  #### 18" in command().stdout
