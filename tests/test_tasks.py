"""tasks.py: what scores 1 and what scores 0, what is held out, what a bad file or flag says."""

import functools
import json
import operator
import re
import subprocess
import sys
import threading
import time
import types
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tasks
from tools import judge, own_task
from tools.own_task import load_task_file

LAST = {  # text → its last number
    "56": "56",
    "7 * 8 = 56.": "56",
    "56, not 54": "54",
    "": None,
    ". , - $ % / ####": None,
    "7.0": "7",
    "7.5": "15/2",
    "wait...18": "18",
    "it is .5": "1/2",
    "= -7": "-7",
    "= −7": "-7",
    "-$7.50": "-15/2",
    "$-7$": "-7",
    "COVID-19": "19",
    "1:\n-7": "-7",
    "1\n-7": "-7",
    "1,000": "1000",
    "1,234,567.": "1234567",
    "1, 2, 3": "3",
    "1{,}000": "1000",
    "$18": "18",
    "18$": "18",
    "€18": "18",
    "18%": "18",
    "5kg": "5",
    "\\$18\\%": "18",
    "90^\\circ": "90",
    "3/4": "3/4",
    "-3/4": "-3/4",
    "\\frac{3}{4}": "3/4",
    "-\\dfrac{3}{4}": "-3/4",
    "\\frac12": "1/2",
    "1\\dfrac 34": "7/4",
    "\\frac{-3}{4}": "-3/4",
    "1/0": None,
    "1 1/2": "3/2",
    "-1 1/2": "-3/2",
    "1\\frac{1}{2}": "3/2",
    "0.33": "33/100",
    "1e3": "1000",
    "2.5E-1": "1/4",
    "1e400": None,
    "2 × 10^3": None,
    "9**9**9**9": None,
    "9 ** 9": None,
    "3^{2}": None,
    "3^2": None,
    "٣": None,
    "x²": None,
    "1" * 40: "1" * 40,
    "1" * 41: None,
    "\ud800 7": "7",
    "7" + " " * 10**5: "7",
    "- 7": "-7",
    "5 - 3 = 2": "2",
}

FINAL = {  # text → its answer: after ####, else in \boxed, else the last number
    "#### 18": "18",
    "####18": "18",
    "#### $18.00": "18",
    "#### **18**": "18",
    "#### -5": "-5",
    "#### 70,000 people in 3 towns": "70000",
    "#### 18\n#### 17": "17",
    "#### 17 or 18": "17",
    "\\boxed{17} #### 18": "18",
    "#### 17 \\boxed{18}": "17",
    "#### <number>\n18": "18",
    "####": None,
    "#### 9**9": None,
    "so \\boxed{18} of 20": "18",
    "\\boxed{17}, \\boxed{18}.": "18",
    "\\boxed{18\\text{ cm}} in 2 days": "18",
    "\\boxed{\\frac{3}{4}} of 20": "3/4",
    "\\boxed{\\boxed{18}} of 20": "18",
    "\\boxed{x = 18} of 20": "18",
    "\\boxed{17": "17",
    "17 of them, so 18": "18",
    "": None,
}

SQUARED = {  # a unit's exponent is ignored, a variable's is a power: no answer
    "\\boxed{540\\text{ m}^2} in 3 steps": "540",
    "It is 540 m^2.": "540",
    "540 m2": "540",
    "\\boxed{540\\,\\mathrm{cm}^{2}} in 3": "540",
    "\\boxed{540\\text{ m^2}} in 3": "540",
    "#### 540 m^2": "540",
    "540 $m^3$": "540",
    "$540$ ft$^2$": "540",
    "9.8 m/s^2": "9.8",
    "4 mp3 players": "4",
    "540 m^2 in 2 rooms": "2",
    "540 m^24": None,
    "3x^2": None,
    "it is m^2": None,
}

MARKED = {  # the line of the last ####, behind its last "=": the first number
    "#### 1. First step\n#### 18": "18",
    "#### 18. She has 18 pens.": "18",
    "#### 18.": "18",
    "#### 1.5 kg": "1.5",
    "#### 118. A hundred": "118",
    "#### 18 (6 * 3)": "18",
    "#### 6 * 3 = 18": "18",
    "#### $6 × 3 = $18": "18",
    "#### 6 \\times 3 = 18": "18",
    "#### 36/2 = 18": "18",
    "#### 2 * 9 = 3 * 6 = 18": "18",
    "#### (2 + 4) * 3 = 18 pens": "18",
    "#### 3 - 5 = -2": "-2",
    "#### 5 apples + 3 apples = 8 apples": "8",
    "#### 60 minutes / 2 = 30 minutes": "30",
    "#### Answer: 18\n(3 packs of 6)": "18",
    "####\n\n18 packs\n3": "18",
    "#### Answer:\n\n**18**": "18",
    "#### ~18 in 3 days": "18",
    "#### ≈18.5 in 3 days": "18.5",
    "#### - 18": "-18",
    "#### – $18": "-18",
    "#### −€18 in 3 days": "-18",
    "#### $-18": "-18",
    "#### ¥500 for 2 days": "500",
    "#### US$500 for 2 days": "500",
    "#### Rs. 500 for 2 days": "500",
    "#### 500₹ for 2 days": "500",
    "#### **18** (3 packs of 6)": "18",
    "#### 18-packs in 3 days": "18",
    "#### 18km/h for 3 hours": "18",
    "#### \\$18.50 in 3 days": "18.5",
    "#### eighteen\n": None,
    "#### 42\n" + "so it is, as shown. " * 110: "42",
    "#### 42\n" + "It took 3 steps.\n" * 10**4: "42",
    "#### 42\n" + "long" * 10**5 + " 3": "42",
    "\\fbox{18} of 20": "18",
    "so \\boxed 18 of 20": "18",
    "\\boxed{ten} of 20": None,
    "\\boxed{3 packs = 18} of 20": "18",
}

CHANGED = (  # something changes the number, so none is read
    "18 * 2,18*2,18 × 2,18 x 2,18 / 2,18 ÷ 2,18 + 2,18 · 2,18 - 2,18 – 2,10–18,10-18,5 -3,18 ± 2,"
    "18 times 2,18 * (3 + 2),5 apples + 3 apples,60 minutes / 2,18kg + 3kg,18^2,18^{2},18**2,"
    "18 ** 2,18²,18³,18 ²,√18,\\sqrt{18},\\sqrt[3]{18},2\\sqrt{3},sqrt(18),\\log 18,18!,2^{10},x²,"
    "18 squared,5 lakh,5k,5K,5 k,5M,5 million,5 Million,5 millions,5-million,5bn,5 billion,"
    "5 thousand,5 hundred,5\\text{ million},18π,18\\times 2,18½,½,18万,十,٣,１８,1'000,1’000,1_000,"
    "1 000,10:30,1.2.3,1/2/3,2024-05-18,0x12,0b11,1e400,18(3),5 48/2,3/4.5,x18,18x2,"
    "\\frac{1.5}{2},\\frac{x}{18},(2)-3,$10-$3,2*3,18 = 6 * 3"
).split(",") + [
    "18,5",
    "12,34,567",
    "1,00",
    "1,2345",
    "1234,567",
    "0,500",
    "1.000,00",
    "1\\,000",
    "1\u202f000",
]


def jsonl(path, records):
    path.write_text("\n\n".join(map(json.dumps, records)))
    return str(path)


def word_problems(path, numbers):
    """Write a file in GSM8K's format with one problem per number."""
    return jsonl(path, [{"question": f"Is it {n}?", "answer": f"#### {n}"} for n in numbers])


def numbers(problems):
    return sorted(int(p["answer"][5:]) for p in problems)


# --- what is right


@pytest.mark.parametrize("text, number", LAST.items())
def test_the_last_number_counts(text, number):
    assert tasks.last_number(text) == (number and Fraction(number))


@pytest.mark.parametrize("text, number", (FINAL | SQUARED | MARKED).items())
def test_gsm8k_prefers_the_mark_then_the_box_then_the_last_number(text, number):
    assert tasks.final_answer(text) == (number and Fraction(number))


@pytest.mark.parametrize("text", CHANGED)
def test_a_number_that_something_changes_is_no_answer(text):
    """Nor is another number of the text, whether the text has a mark, a box or neither."""
    assert tasks.last_number(f"7\n{text}") is None
    assert tasks.final_answer(f"7\n#### {text}") is None
    assert tasks.final_answer(f"7\n#### {text}\n7") is None
    assert tasks.final_answer(f"\\boxed{{{text}}} of 7") is None


ANSWERS = Path(__file__).parent / "data" / "gsm8k_answers.jsonl"
UNLIKE_BEFORE = {  # line of ANSWERS → why it is not paid any more
    47: "it ends within a sum, 80 + 800",
    345: "its last #### heads a list, which begins with 1.",
    509: "it ends within a product, 2 × 4 =",
    731: "it ends with #### \\boxed, and no number",
}
UNLIKE_FLEXIBLE = {  # line of ANSWERS → why the last number is not the answer
    223: "20000.0 is 20000",
    337: "#### 1, and a line with 11",
    347: "36 is in a box, 2 shirts follow",
    437: "#### 8",
    545: "30 is in a box, 5 days follow",
    556: "#### 8",
    678: "120 is in a box, 3 hours follow",
    730: "8 is in a box, 30 days follow",
    758: "133.00 is 133",
    913: "6 is in a box, and the filter reads 6}$.",
}


def test_the_answers_of_a_real_model_are_judged_as_a_reader_would():
    """1,000 answers of Qwen2.5-Coder-0.5B-Instruct (Q4_K_M) to GSM8K's test problems, at
    temperature 1, at most 320 tokens. right: the answer is the gold's number. before: by f76e9f8.
    strict, flexible: by the two filters of lm-eval's gsm8k.
    """
    records = [json.loads(line) for line in ANSWERS.read_text().splitlines()]
    before, flexible = set(), set()
    for number, record in enumerate(records):
        gold = tasks.final_answer(f"#### {record['gold']}")
        assert (tasks.final_answer(record["text"]) == gold) == record["right"], number
        assert record["right"] or not record["strict"]
        if record["right"] != record["before"]:
            before.add(number)
        elif record["right"] != record["flexible"]:
            flexible.add(number)
    assert len(records) == 1000
    assert before == set(UNLIKE_BEFORE) and flexible == set(UNLIKE_FLEXIBLE)


def test_arithmetic_prompts_and_rewards():
    problem = {"a": 7, "b": 8}
    for name, sign, result in (("multiplication", "*", 56), ("addition", "+", 15)):
        task = tasks.TASKS[name]()
        assert task.prompt(problem) == f"What is 7 {sign} 8?"
        assert task.reward(problem, f"7, 8: {result}.", True) == 1
        assert task.reward(problem, f"{result}, 14", True) == 0
        assert task.reward(problem, f"{result}", False) == 0, "the model did not end its answer"


# --- hostile text: an innocent regular expression, or a tower of powers, could take for ever

JUDGES = [
    (tasks.gsm8k_reward, {"answer": "#### 9"}),
    (tasks.TASKS["addition"]().reward, {"a": 4, "b": 5}),
    (tasks.math_reward, {"answer": "9"}),
]


def judge_quickly(reward, problem, text):
    """→ the reward, if it takes under 10 ms of the processor, to which other jobs do not add.

    The garbage collector may run in one call, and in another again: the quickest of three counts.
    """
    for _ in range(3):
        began = time.process_time()
        value = reward(problem, text, True)
        if time.process_time() - began < 0.01:
            return value
    pytest.fail(f"{reward} takes over 10 ms of the processor")


BEGINNINGS = ["", "1", "#### ", "1e", "\\frac{", "1,111"]
PIECES = [
    "9**",
    "1",
    "-",
    "(",
    ",1",
    "\\boxed{",
    "#",
    "\\boxed{{}",
    "#### ",
    "1 ",
    "1/",
    "1/1 ",
    "1 1/1.1",
    "1,111",
    ",111",
    "1e",
    "\\frac{1}{",
    " ",
    "**",
    "6*3=",
    "a/",
    "$ ",
    "1m",
    "####\\times",
    "{",
    "}",
    "\\left(",
    "\\frac{",
    "\\text{",
    "^",
    "=",
    "\\",
    "½",
    "٣",
    "\ud800",
    "\0",
    "3/4",
    "(1 + 2) * 3",
    "\\boxed{\\frac{1}{2}}",
]
ANY = st.text() | st.lists(st.sampled_from(PIECES) | st.integers().map(str)).map("".join)


def test_hostile_texts_score_0_in_10_ms():
    """Towers such as 9**9**9 are not computed. So that the time grows with the length alone, 95,000
    characters are judged, too: with its square, this test would take an hour.
    """
    for start in BEGINNINGS:
        for piece in PIECES:
            text = start + piece * (1900 // len(piece))
            for reward, problem in JUDGES:
                assert judge_quickly(reward, problem, text) == 0
                assert reward(problem, text * 50, True) == 0


@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_text_at_all_scores_0_or_1_in_10_ms(examples, monkeypatch):
    """For math it is the time of the guard, without math-verify."""
    monkeypatch.setattr(tasks, "equal", operator.eq)

    @settings(max_examples=examples, deadline=None)  # a busy machine is no error
    @given(ANY)
    def judge(text):
        for reward, problem in JUDGES:
            assert judge_quickly(reward, problem, text) in (0, 1)
        assert tasks.gsm8k_reward({"answer": "#### 9"}, f"{text}\n#### 9", True) == 1

    judge()


# --- what is held out


@pytest.mark.parametrize(
    "name, operands, total",
    [("multiplication", None, 121), ("addition", None, 10_000), ("addition", "0-7", 64)],
)
def test_held_out_pairs_are_not_trained_on_in_either_order(name, operands, total):
    task = tasks.TASKS[name](None, operands)
    assert len(task.held_out) == 32 and len(task.train) == total - 32
    assert len({(p["a"], p["b"]) for p in task.train + task.held_out}) == total
    for pair in task.held_out:
        assert {"a": pair["b"], "b": pair["a"]} not in task.train
    assert tasks.TASKS[name](operands=operands)[:2] == task[:2]


def test_exactly_as_many_are_held_out_as_asked_for():
    for n in range(1, 9):
        for asked in range(n * n // 2 + 1):
            task = tasks.TASKS["addition"](operands=f"1-{n}", held_out=asked)
            assert len(task.held_out) == asked


@pytest.mark.parametrize("operands", ["12-2", "2", "-2-5", "2-3", "0-1000", "0-99999999", "٢-٩"])
def test_bad_operands_are_named(operands):
    with pytest.raises(ValueError, match=f"^--operands {operands} "):
        tasks.TASKS["addition"](operands=operands)


def test_gsm8k_reads_plain_answers_and_holds_out_a_quarter_of_a_small_file(tmp_path):
    """Each gold answer scores 1, and one more scores 0. Text after a number is a unit."""
    golds = [
        "18",
        "-2",
        "1,234",
        "2.5",
        "$9",
        "3/4",
        "0",
        "5.",
        "5 apples",
        "**5**",
        "5 (3 + 2)",
        "5\n6 is wrong",
        "5 m^2",
        "6 * 3 = 18",
        "1. First step\n#### 18",
        "3 + 3 = 6 apples",
    ]
    data = jsonl(
        tmp_path / "some.jsonl",
        [{"question": f"Is {{it}} {gold}?", "answer": f"2\n#### {gold}"} for gold in golds],
    )
    task = tasks.TASKS["gsm8k"](data)
    assert len(task.train) == 12 and len(task.held_out) == 4
    for problem in task.train + task.held_out:
        prompt, right = task.prompt(problem), problem["answer"]
        assert prompt.startswith(problem["question"]) and "#### <number>" in prompt
        assert task.reward(problem, right, True) == 1
        assert task.reward(problem, right, False) == 0
        assert task.reward(problem, f"{right}\n#### {tasks.final_answer(right) + 1}", True) == 0
    with pytest.raises(ValueError, match=f"--operands 2-3 .*{data}"):
        tasks.TASKS["gsm8k"](data, "2-3")


def test_questions_that_differ_in_blanks_or_case_are_one_problem(tmp_path):
    """None is held out and trained on, also if one stands in the test file."""
    questions = [f"Is  it {n}?" for n in range(8)]
    forms = [str, str.upper, lambda text: f" {text}\n", lambda text: text.replace("  ", "\t")]
    records = [{"question": form(q), "answer": "#### 3"} for q in questions for form in forms]
    data = jsonl(tmp_path / "data.jsonl", records)
    task = tasks.TASKS["gsm8k"](data)
    assert len(task.train) == 6 and len(task.held_out) == 2
    test = jsonl(tmp_path / "test.jsonl", [{"question": "IS IT 5?", "answer": "#### 3"}])
    assert len(tasks.with_test_set("gsm8k", test, data).train) == 7


@pytest.mark.parametrize(
    "name, first, second, same",
    [
        ("gsm8k", "#### 5", "#### 6", False),
        ("gsm8k", "2 + 3 = 5\n#### 5", "#### 5.0", True),
        ("math", "5", "6", False),
        ("math", "5", "\\boxed{5}", True),
    ],
)
def test_two_golds_for_one_question_are_refused(tmp_path, name, first, second, same):
    records = [{"question": f"{n}?", "answer": first} for n in range(4)]
    records.append({"question": " 3?", "answer": second})
    data = jsonl(tmp_path / "some.jsonl", records)
    if same:
        assert len(tasks.TASKS[name](data).train) == 3
        return
    with pytest.raises(ValueError, match="some.jsonl has two answers, 5 and 6, .*'3?"):
        tasks.TASKS[name](data)


@pytest.mark.parametrize(
    "begins", [b"PAR1\x15\x04\x15", b"\x1f\x8b\x08\x00\xff", b"PK\x03\x04\x80"]
)
def test_a_file_that_is_no_text_is_told_from_a_text_in_another_encoding(tmp_path, begins):
    (tmp_path / "some.jsonl").write_bytes(begins + b"\x00\n\xff")
    with pytest.raises(ValueError, match="line 1: .*no Parquet, no archive"):
        tasks.TASKS["gsm8k"](str(tmp_path / "some.jsonl"))


def test_a_line_taken_out_moves_one_problem_at_most(tmp_path):
    """Otherwise a resumed run would be evaluated on problems that it has trained on."""
    old = tasks.TASKS["gsm8k"](word_problems(tmp_path / "old.jsonl", range(400)), held_out=64)
    train, held = set(numbers(old.train)), set(numbers(old.held_out))
    assert len(held) == 64
    for part, moved in ((train, 0), (held, 1)):
        left = {*range(400)} - {min(part)}
        new = tasks.TASKS["gsm8k"](word_problems(tmp_path / "new.jsonl", left), held_out=64)
        assert len(new.held_out) == 64 and len(train.intersection(numbers(new.held_out))) == moved
        assert not held.intersection(numbers(new.train))


def test_all_of_a_test_file_is_held_out_and_none_of_it_trained_on(tmp_path):
    """Problems 8 and 9 are in both files. To evaluate, a test file alone is enough."""
    data = word_problems(tmp_path / "data.jsonl", range(10))
    test = word_problems(tmp_path / "test.jsonl", range(8, 18))
    for trains in (True, False):
        task = tasks.with_test_set("gsm8k", test, data, trains=trains)
        assert numbers(task.held_out) == [*range(8, 18)] and numbers(task.train) == [*range(8)]
    for few in ([2, 1, 3], [7]):
        word_problems(tmp_path / "few.jsonl", few)
        alone = tasks.with_test_set("gsm8k", tmp_path / "few.jsonl", trains=False)
        assert not alone.train and [int(p["answer"][5:]) for p in alone.held_out] == few


@pytest.mark.parametrize(
    "name, test, data, operands, trains, names",
    [
        (
            "gsm8k",
            "test.jsonl",
            "again.jsonl",
            None,
            True,
            "--data again.jsonl .* --test test.jsonl",
        ),
        ("gsm8k", "absent", None, None, True, "give --data"),
        ("gsm8k", "absent", None, None, False, "absent cannot be read"),
        ("gsm8k", "none.jsonl", None, None, False, "none.jsonl has 0"),
        ("gsm8k", "test.jsonl", None, "1-9", False, "--operands 1-9 .* test.jsonl"),
        ("addition", "some.jsonl", None, None, False, "some.jsonl: .* leave out --data and --test"),
    ],
)
def test_a_test_file_that_does_not_fit_is_named(
    name, test, data, operands, trains, names, tmp_path, monkeypatch
):
    """To train without data is refused before the test file is read."""
    monkeypatch.chdir(tmp_path)
    word_problems(Path("test.jsonl"), range(8, 18))
    word_problems(Path("again.jsonl"), range(17, 7, -1))
    word_problems(Path("none.jsonl"), [])
    with pytest.raises(ValueError, match=names):
        tasks.with_test_set(name, test, data, operands, trains)


# --- files and data sets


def test_the_file_runs_without_our_other_modules():
    """-I keeps its folder off the path."""
    shown = subprocess.check_output([sys.executable, "-I", tasks.__file__], text=True)
    assert "1.0  #### 18\n" in shown and "0.0  #### 17, or 18\n" in shown


ONE_A_LINE = "one JSON object a line"
BROKEN = {  # task → third line of a file → what its refusal names beside that line
    "gsm8k": {
        "[1]": ONE_A_LINE,
        '{"question": "a", "answer": "#### 1"},': ONE_A_LINE,
        "[" * 10**5: ".",
        '{"question": "a"}': "'answer'",
        '{"question": "", "answer": "#### 3"}': "'question'",
        '{"question": "a", "answer": "3"}': "--task math",
        '{"question": "a", "answer": "#### 17 or 18"}': "#### number",
        '{"question": "\\ud83d", "answer": "#### 3"}': ".",
        '{"question": "é"}'.encode("latin-1"): "UTF-8",
        '{"question": "é"}\n'.encode("utf-16"): "UTF-8",
    },
    "math": {
        '{"answer": "3"}': "'problem'",
        '{"problem": "a"}': "'answer'",
        '{"problem": "a", "answer": ""}': "'answer'",
        '{"problem": "a", "answer": NaN}': "'answer'",
        f'{{"problem": "a", "answer": "{"x" * 501}"}}': "500",
        '{"prompt": [], "answer": "3"}': "chat",
        '{"prompt": ["hi"], "answer": "3"}': "chat",
        '{"prompt": [{"role": "assistant", "content": "a"}], "answer": "3"}': "chat",
        '{"prompt": [{"role": "user", "content": "a"}, {"role": "user"}], "answer": "3"}': "chat",
    },
}


@pytest.mark.parametrize("task", BROKEN)
def test_a_broken_line_is_named_with_its_number(task, tmp_path):
    path = tmp_path / "some.jsonl"
    for line, names in BROKEN[task].items():
        bad = line if isinstance(line, bytes) else line.encode()
        path.write_bytes(b'{"question": "a", "answer": "#### 3"}\n\n' + bad)
        with pytest.raises(ValueError, match=f"^{path}, line 3: .*{names}") as refused:
            tasks.TASKS[task](path)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "gold",
    [
        "1 000",
        "3,5",
        "1.000,00",
        "12:30",
        "1,234,56",
        "5!",
        "3²",
        "3 * 4",
        "5-3",
        "1\t0",
        "5k",
        "17 or 18",
        "5 of 6",
    ],
)
def test_a_gold_that_would_be_read_in_part_is_refused(gold, tmp_path):
    """Or its first number would be rewarded."""
    path = jsonl(tmp_path / "some.jsonl", [{"question": "q", "answer": f"#### {gold}\n"}])
    with pytest.raises(ValueError, match="line 1: .* one plain number"):
        tasks.gsm8k(path)


def test_a_dataset_of_the_hub_is_read_through_datasets(monkeypatch):
    """owner/name[/config][:split]. A name that ends like a file is never looked up on the hub."""

    def load_dataset(name, config, split):
        if name == "o/none":
            raise RuntimeError("no such dataset\nand more")
        return [{"question": f"{config} {split} {n}?", "answer": f"#### {n}"} for n in range(7)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    for name, asked in (("o/n", "None train"), ("o/n/c:test[:50%]", "c test[:50%]")):
        task = tasks.TASKS["gsm8k"](name)
        assert len(task.train) == 6 and task.train[0]["question"].startswith(asked)
    for data, names in (
        ("o/none", r"o/none .*no such dataset\)"),
        ("data/x.jsonl", "data/x.jsonl .*No such file"),
    ):
        with pytest.raises(ValueError, match=names):
            tasks.TASKS["gsm8k"](data)
    monkeypatch.setitem(sys.modules, "datasets", None)  # makes the import fail
    with pytest.raises(ValueError, match="o/n .*pip install datasets"):
        tasks.TASKS["gsm8k"]("o/n")


# --- math

STUB = """def parse(text, **limits):
    return text[7:-1].strip()                                 # \\boxed{text}
def verify(gold, answer, **limits):
    while answer == "endless":
        pass
    return gold == answer or answer == "huge" and len(bytearray(5 << 30)) > 0
"""


def test_a_judge_that_does_not_run_or_dies_is_an_error_and_no_reward_of_0(tmp_path, monkeypatch):
    """The next answer gets a new judge. A stub stands for math-verify, which is slow to import.

    One answer takes more than 1 s of the processor, and one more than 4 GB: both score 0, and
    the judge goes on.
    """
    stub = tmp_path / "math_verify.py"
    data = jsonl(tmp_path / "some.jsonl", [{"problem": str(n), "answer": n} for n in range(4)])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(judge, "_child", functools.cache(judge._child.__wrapped__))
    monkeypatch.setattr(judge, "equal", functools.cache(judge.equal.__wrapped__))
    stub.write_text("raise ModuleNotFoundError('math_verify')")
    for _ in range(2):
        with pytest.raises(ValueError, match="pip install math-verify"):
            tasks.TASKS["math"](data)
    stub.write_text(STUB)
    assert len(tasks.TASKS["math"](data).train) == 3, "it was installed meanwhile"
    child = judge._child()
    verdicts = [tasks.equal("7", answer) for answer in ("7", "8", "endless", "huge", "7 ")]
    assert verdicts == [True, False, False, False, True] and judge._child() is child
    child.kill()  # as the kernel does when memory runs out
    with pytest.raises(ValueError, match="math-verify, which does not run"):
        tasks.equal("7", " 7")
    assert tasks.equal("7", " 7") is True
    judge._child().communicate()  # closes its input, which ends it


EQUAL = [  # gold, boxed
    ("5, 100", "100, 5"),
    ("5100", "5,100"),
    ("5100", "5{,}100"),
    ("5,\\!100", "5100"),
    ("\\frac{1}{2}", "50\\%"),
    ("\\frac{1}{2}", "50 %"),
    ("50\\%", "\\frac{1}{2}"),
    ("50\\%", "50"),
    ("\\frac{\\pi}{2}", "\\dfrac{\\pi}{2}"),
    ("\\frac{1}{2}", "\\dfrac12"),
    ("\\frac{1}{2}", "0.5"),
    ("\\frac{1}{2}", "x = \\frac{1}{2}."),
    ("5", "5\\text{ cm}"),
    ("90", "90^\\circ"),
    ("(1, 2)", "\\left(1,2\\right)"),
    ("-7", "−7"),
    ("7", "7."),
    ("2\\sqrt{3}", "\\sqrt{12}"),
    ("x^2 + 2x + 1", "(x + 1)^2"),
    ("\\{1, 2\\}", "2, 1"),
    ("\\text{Evelyn}", "Evelyn"),
    ("3 + 4i", "4i + 3"),
    ("3^2", "9"),
    ("1\\frac{1}{2}", "3/2"),
    ("a_{b_{c}}", "a_{b_{ c }}"),
    ("70\\,\\text{cm}^2", "70"),
    ("2^{2004}", "2^{2004}"),
    ("\\binom{10}{3}", "120"),
    ("6!", "720"),
    ("5", "500\\%"),
    ("50\\%", "50\\text{ percent}"),
    ("\\sqrt{3}", "√3"),
    ("\\sqrt{12}", "2√3"),
    ("\\frac{1}{2}", "½"),
    ("\\frac{3}{2}", "1½"),
    ("x^2", "x²"),
    ("\\infty", "∞"),
    ("-5", "–5"),
    ("0.\\overline{3}", "\\frac13"),
    ("\\frac16", "0.1\\overline{6}"),
    ("52_8", "52_{8}"),
    ("1, 2, \\ldots, n", "1,2,\\ldots,n"),
    ("(1, 2), (3, 4)", "(1,2),(3,4)"),
    ("\\{(1, 2), (3, 4)\\}", "\\{(3,4),(1,2)\\}"),
    ("(-\\infty, 1) \\cup (2, 3)", "(2,3) \\cup (-\\infty,1)"),
    ("6", "2 \\cdot 3 = 6"),
    ("\\frac{1}{2^{99}}", "2^{-99}"),
    ("x > 2", "(2, \\infty)"),
]

DIFFERENT = [  # gold, boxed
    ("5, 100", "5100"),
    ("5100", "5, 100"),
    ("11", "1 1"),
    ("\\frac{1}{2}", "0.5\\%"),
    ("0.5\\%", "\\frac{1}{2}"),
    ("1/3", "0.33"),
    ("(1, 2)", "(2, 1)"),
    ("7", "-7"),
    ("x^2 + 2x + 1", "(x + 1)^3"),
    ("\\{1, 2\\}", "1"),
    ("5", "5, 6"),
    ("\\text{east}", "\\text{west}"),
    ("5.5", "1 1/2"),
    ("5", ""),
    ("5", "."),
    ("9", "9**9**9**9"),
    ("5", "5\\%"),
    ("5", "5\\text{ percent}"),
    ("0.5", "0.5\\%"),
    ("52_8", "52_9"),
    ("52_8", "52"),
    ("10101_2", "10101"),
    ("12_{5} + 3_5", "12_6 + 3_6"),
    ("1, 2, \\ldots, n", "1, 3, 5, \\ldots, 2n-1"),
    ("1, 2, 3", "1, 2, 3, \\dots"),
    ("3", "1, 2, …, 3"),
    ("6", "6'"),
    ("6", "x \\not= 6"),
    ("6", "6\\text{ million}"),
    ("6", "\\neg 6"),
    ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}"),
    ("\\frac{1}{100!}", "\\frac{1}{99!}"),
    ("0.0000001", "0.0000002"),
    ("e^{-50}", "e^{-51}"),
    ("(1, 2^{-99})", "(1, 2^{-98})"),
    ("(1, 2)", "\\{1, 2\\}"),
    ("\\{1, 2\\}", "(1, 2)"),
    ("1, 2", "(1, 2)"),
    ("(1, 2), (3, 4)", "(3, 4), (1, 2)"),
    ("6", "5 = 6"),
    ("6", "5 \\to 6"),
    ("6", "x = 5 = 6"),
]


@pytest.mark.parametrize("gold, boxed", EQUAL + DIFFERENT)
def test_math_is_judged_by_math_verify(gold, boxed):
    problem, text = {"answer": gold}, f"It is \\boxed{{0}}, no: $\\boxed{{{boxed}}}$."
    assert tasks.math_reward(problem, text, True) == ((gold, boxed) in EQUAL)
    assert tasks.math_reward(problem, text, False) == 0
    assert tasks.math_reward(problem, boxed, True) == 0, "without a box"


HOW_IT_IS_STORED = [  # by MATH-500, MATH, DAPO (published, reprocessed), JSONL, a chat
    {"problem": "Half of one?", "solution": "It is \\boxed{3}.", "answer": "\\frac{1}{2}"},
    {"problem": "Half of one?", "solution": "It is \\boxed{1}. No, \\boxed{\\frac{1}{2}}."},
    {"problem": "Half of one?", "solution": "We get $\\boxed \\frac{1}{2}$."},
    {
        "prompt": [
            {
                "role": "user",
                "content": "Solve the following math problem step by step. …\n\n"
                "Half of one?\n\nRemember to put your answer on …",
            }
        ],
        "reward_model": {"ground_truth": "\\frac{1}{2}", "style": "rule"},
    },
    {"prompt": "Half of one?", "solution": "\\frac{1}{2}"},
    {"question": "Half of one?", "answer": "#### \\frac{1}{2}"},
    {
        "prompt": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "Half of one?"},
        ],
        "answer": "\\boxed{\\frac{1}{2}}",
    },
]


@pytest.mark.parametrize("record", HOW_IT_IS_STORED)
def test_math_reads_the_field_names_of_the_known_datasets(tmp_path, record):
    """The other problems have numbers for answers; the last two are one problem."""
    others = [
        {"prompt": [{"role": "user", "content": f"{n}?"}], "reward_model": {"ground_truth": n}}
        for n in (1, 2, 3, 3)
    ]
    task = tasks.TASKS["math"](jsonl(tmp_path / "some.jsonl", [record, *others]))
    assert len(task.train) == 3 and len(task.held_out) == 1
    answers = {p["problem"]: p["answer"] for p in task.train + task.held_out}
    assert "be brief\n\n" * (len(record.get("prompt", "")) == 2) + "Half of one?" in answers
    assert sorted(answers.values()) == ["1", "2", "3", "\\frac{1}{2}"]
    prompt = task.prompt({"problem": "Half of one?"})
    assert prompt.startswith("Half of one?\n") and prompt.endswith("\\boxed{}.")


def test_a_box_without_braces_ends_with_its_formula(tmp_path):
    golds = {
        "so $\\boxed 2$. Then $x$": "2",
        "It is $\\boxed  {5}$.": "5",
        "\\[x = \\boxed 7 \\] Hence $y$": "7",
        "$\\boxed \\$32.50$": "\\$32.50",
        "\\begin{align*} x&=\\boxed \\frac12 \\end{align*}": "\\frac12",
        "no formula: \\boxed 2": "2",
        "\\boxed 1,234. Done": "1,234",
        "It is \\fbox{6}": "6",
        "\\boxed{8}, no, \\fbox 9": "9",
    }
    records = [{"problem": solution, "solution": solution} for solution in golds]
    task = tasks.TASKS["math"](jsonl(tmp_path / "some.jsonl", records))
    assert {p["problem"]: p["answer"] for p in task.train + task.held_out} == golds
    for text, gold in golds.items():
        assert tasks.math_reward({"answer": gold}, text, True) == 1


PROSE = [
    "The answer is 5",
    "See the figure.",
    "5 (five)",
    "no real solutions",
    "about 5 dollars",
    "\\boxed{It is 5, because x > 4}",
    "(" * 9 + "1" + ")" * 9,
]
NO_PROSE = [
    "Evelyn",
    "\\text{no real solutions}",
    "5 apples",
    "10 \\mbox{ square inches}",
    "\\begin{pmatrix} 1 & 2 \\end{pmatrix}",
    "x \\in [0, \\infty)",
    "\\frac{1}{2} \\sin x",
    "1:30 p.m.",
]


@pytest.mark.parametrize("gold", PROSE + NO_PROSE)
def test_a_gold_that_no_answer_would_equal_is_refused_with_its_line(gold, tmp_path):
    data = jsonl(tmp_path / "some.jsonl", [{"problem": f"{n}?", "answer": gold} for n in range(4)])
    if gold in NO_PROSE:
        assert len(tasks.TASKS["math"](data).train) == 3
        return
    with pytest.raises(ValueError, match="some.jsonl, line 1: .*text"):
        tasks.TASKS["math"](data)


TOWERS = [  # of powers and factorials; series; huge exponents: the guard refuses each
    "9^{9^9}",
    "2^{64!}",
    "9^9^9^9",
    "7^{9^{9}} \\mod 13",
    "((9!)!)!",
    "9!!",
    "1000000!",
    "\\left(10000000\\right)!",
    "\\binom{1000000}{500000}",
    "9^{999999999}",
    "7^{-1000000000}",
    "(x + 1)^{1000}",
    "(x+y+z+w)^{200}",
    "\\left(x+1\\right)^{999}",
    "\\sum_{i=1}^{100000000} i^i",
    "\\prod_{i=1}^{1000000} i",
    "\\int_0^1 e^{x^2} \\sin(x^3) dx",
    "\\iint x^x dx dx",
    "\\lim_{x \\to 0} x^{x}",
    "\\Gamma(10^9)",
    "2^" * 100 + "2",
]
DEEP = [
    "(" * 9 + "1" + ")" * 9,
    "[" * 9 + "1" + "]" * 9,
    "\\sqrt{(" * 9,
    "\\{" * 200,
    "1+" * 250 + "1",
]
PASS = [  # the guard; math-verify judges each
    "9" * 400,
    "1/" * 100 + "1",
    "1e999999999",
    "\\" * 100,
    "^" * 200,
    "\\text{" + "a" * 300 + "}",
    "\0",
    "\ud800",
]
LONG = [  # takes long; the first is ended after 1 s of processor time
    "(x+1)^{99}(y+1)^{99}(z+1)^{99}",
    "(((9^9)^9)^9)^9",
    "+".join("1" * 150),
    "|" * 100,
    "99999!",
]


@pytest.mark.parametrize("answer", TOWERS + DEEP)
def test_the_guard_refuses_and_never_says_equal(answer, monkeypatch):
    """Not even if answer and gold are the same text.

    If the gold has a tower too, math-verify judges.
    """
    monkeypatch.setattr(tasks, "equal", lambda gold, answer: True)
    for more in ("", " + 1", " - x", " + y"):
        assert tasks.math_reward({"answer": "42"}, f"\\boxed{{{answer}{more}}}", True) == 0
    same = tasks.math_reward({"answer": answer}, f"\\boxed{{{answer}}}", True)
    assert same == (answer in TOWERS)


@pytest.mark.parametrize(
    "answer", ["(" * 8 + "1" + ")" * 8, "()" * 9, "1" * 500, "2^{99999}", "(x+1)^{99}"]
)
def test_the_guard_passes_what_is_within_its_limits(answer, monkeypatch):
    monkeypatch.setattr(tasks, "equal", lambda gold, answer: True)
    assert tasks.math_reward({"answer": "42"}, f"\\boxed{{{answer}}}", True) == 1


@pytest.mark.parametrize("answers", [PASS, pytest.param(LONG, marks=pytest.mark.slow)])
def test_hostile_answers_end_and_the_honest_beside_them_keep_their_reward(answers):
    child = judge._child()
    for n, hostile in enumerate(answers):
        assert tasks.math_reward({"answer": "42"}, f"\\boxed{{{hostile}}}", True) == 0
        assert tasks.math_reward({"answer": f"\\frac{{{n}}}{{2}}"}, f"\\boxed{{{n}/2}}", True) == 1
    assert judge._child() is child and child.poll() is None


# --- a task of one's own

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
OWN = re.search("```python\n(.*?)```", README, re.S)[1]  # the README's example
MINE = """def problems():
    return [{"prompt": f"What is {n} - 1?", "answer": n - 1} for n in range(10, 100)]
def reward(problem, text):
    return float(int(text) == problem["answer"])
"""
DECORATOR = """import functools
def decorated(function):
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner
def kept(function):
    return functools.wraps(function)(decorated(function))
"""


@pytest.fixture
def own(tmp_path):
    """own(text) → the task of a file of that text."""

    def make(text):
        (tmp_path / "mine.py").write_text(text)
        return load_task_file(str(tmp_path / "mine.py"))

    return make


def test_the_readmes_example_of_a_task_of_ones_own(own):
    task, problem = own(OWN), {"prompt": "What is 8 - 1?", "answer": 7}
    assert len(task.train) == 68 and len(task.held_out) == 22
    assert not [p for p in task.held_out if p in task.train]
    assert task.prompt(problem) == "What is 8 - 1?"
    assert [task.reward(problem, text, True) for text in ("7", "8", "x")] == [1, 0.1, 0]
    assert task.reward(problem, "7", False) == 0, "an answer that the model did not end"


@pytest.mark.parametrize(
    "third, value, judged",
    [
        ("finished=.5", "1 + finished", [2, 1]),
        ("tolerance=.5", "tolerance", [0.5, 0]),
        ("extra_info=None, **more", "1 + len(more)", [1, 0]),
        ("*, finished=.5", "finished", [1, 0]),
        ("*rest", "1 + len(rest)", [1, 0]),
    ],
)
def test_a_reward_that_takes_finished_judges_unfinished_answers_too(own, third, value, judged):
    """Another parameter with a default keeps it."""
    task = own(f"{MINE}\ndef reward(problem, text, {third}):\n    return {value}\n")
    assert [task.reward({}, "", finished) for finished in (True, False)] == judged


@pytest.mark.parametrize(
    "reward, score",
    [
        ("def reward(text, problem): return len(text) + problem['n']", 9),
        ("def reward(finished, text): return len(text) + finished", 3),
        ("def reward(problem): return problem['n']", 7),
        ("def reward(*, text, problem): return problem['n']", 7),
        ("def reward(problem, **more): return len(more['text'])", 2),
        ("def reward(*rest, **more): return len(rest) + len(more)", 2),
        ("class Judge:\n    def __call__(self, text, problem): return 5\nreward = Judge()", 5),
        ("class Judge:\n    def judge(self, text): return 5\nreward = Judge().judge", 5),
        ("import functools\nreward = functools.partial(lambda text, k: k, k=4)", 4),
        ("import functools\nreward = functools.partial(lambda k, text: k, 4)", 4),
        (f"{DECORATOR}\n@decorated\ndef reward(text, problem): return len(text)", 2),
        (f"{DECORATOR}\n@functools.cache\ndef reward(text): return len(text)", 2),
        (f"{DECORATOR}\n@kept\ndef reward(text, finished): return finished", 1),
    ],
)
def test_arguments_are_passed_by_name_in_any_order(own, reward, score):
    """**kwargs gets problem and text."""
    assert own(f"{MINE}\n{reward}\n").reward({"n": 7}, "ab", True) == score


@pytest.mark.parametrize(
    "function, names",
    [
        (
            "def reward(data_source, solution_str, ground_truth, extra_info=None): pass",
            "data_source",
        ),
        ("def reward(problem, answer): pass", "answer"),
        ("def reward(p, text): pass", "'p'"),
        ("def reward(problem, text, end): pass", "'end'"),
        ("def reward(problem, text, *, weight): pass", "weight"),
        ("def reward(problem, text, /): pass", "'problem'"),
        ("def reward(problem, text='', /): pass", "'problem'"),
        ("def reward(problem, *text): pass", "'text'"),
        ("def reward(*args): return len(args)", "none"),
        ("def reward(): return 1", "none"),
        ("async def reward(problem, text): return 1", "async"),
        ("reward = max", "max"),
        ("reward = 1", "1 is not a callable"),
    ],
)
def test_a_reward_that_cannot_be_called_by_name_is_refused(own, function, names):
    """By position, it would get something else than its author meant."""
    says = rf"mine.py: reward\(\) .*\(problem, text, finished\).*{names}.*: rename"
    with pytest.raises(ValueError, match=says):
        own(f"{MINE}\n{function}\n")


@pytest.mark.parametrize(
    "parameters, names", [("p", "'p'"), ("", "none"), ("*p", "none"), ("problem, /", "'problem'")]
)
def test_a_prompt_that_cannot_be_called_by_name_is_refused(own, parameters, names):
    with pytest.raises(ValueError, match=rf"mine.py: prompt\(\) .*\(problem\).*{names}.*: rename"):
        own(f"{MINE}\ndef prompt({parameters}): return 'a'\n")


def test_a_reward_of_named_parts_keeps_them_and_checks_their_sum(own):
    task = own(
        MINE + "def reward(problem, text):\n    return {'right': 1, 'short': problem['n']}\n"
    )
    reward = task.reward({"n": -0.5}, "", True)
    assert reward == 0.5 and reward.parts == {"reward/right": 1, "reward/short": -0.5}
    assert task.reward({"n": 1}, "", False) == 0, "an answer that the model did not end"
    for bad in (float("nan"), float("inf"), 1e7, "x", None, [1], {"a": 1}):
        with pytest.raises(ValueError, match="mine.py: .* in reward"):
            task.reward({"n": bad}, "", True)


@pytest.mark.parametrize(
    "other", ["{'a': 1, 'c': 2}", "{'a': 1}", "{}", "{'a': 1, 'b': 2, 3: 4}", "7"]
)
def test_every_reward_has_the_same_parts(own, other):
    """In any order. Else a mean would be of some answers only."""
    task = own(
        f"{MINE}\ndef reward(text):\n    if text == 'x':\n        return {other}\n"
        "    return {'b': 1, 'a': 2} if text else {'a': 2, 'b': 3}\n"
    )
    assert [task.reward({}, text, True) for text in ("", "y")] == [5, 3]
    with pytest.raises(ValueError, match="mine.py: .* in reward.*'x'"):
        task.reward({}, "x", True)


@pytest.mark.parametrize(
    "problems",
    [
        "{'prompt': ['a', 'b'], 'answer': [1, 2]}",
        "['a', 'b']",
        "[('a', 1)]",
        "'ab'",
        "[None]",
        "pandas.DataFrame({'prompt': list('abcd')})",
        "[row for _, row in pandas.DataFrame({'prompt': list('abcd')}).iterrows()]",
    ],
)
def test_problems_that_are_no_dicts_are_named(own, problems):
    """In one line, though a row of pandas is written in several."""
    with pytest.raises(ValueError, match="mine.py: problems.* no dict: .*records") as error:
        own(f"{MINE}\nimport pandas\nproblems = lambda: {problems}\n")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "problems",
    [
        "({'prompt': str(n)} for n in range(9))",
        "map(dict, [[('prompt', n)] for n in 'abcdefghi'])",
        "pandas.DataFrame({'prompt': list('abcdefghi')}).to_dict('records')",
        "dict(enumerate({'prompt': str(n)} for n in range(9))).values()",
    ],
)
def test_problems_may_be_whatever_yields_dicts(own, problems):
    task = own(f"{MINE}\nimport pandas\nproblems = lambda: {problems}\n")
    assert len(task.train + task.held_out) == 9


@pytest.mark.parametrize(
    "problems", ["None", "7", "[][0]", "(1 / 0 for _ in range(9))", "open('absent')"]
)
def test_problems_that_fail_are_named(own, problems):
    with pytest.raises(ValueError, match=r"mine.py.*Error: .* in problems\(\)$"):
        own(f"{MINE}\nproblems = lambda: {problems}\n")


@pytest.mark.parametrize(
    "prompt",
    [
        "'a\\ud83d'",
        "'a\\ud83d\\ude00'",
        "[{'role': 'user', 'content': 'a\\udc00'}]",
        "[{'role': 'us\\udc00', 'content': 'a'}]",
    ],
)
def test_half_an_emoji_in_a_prompt_is_named_with_its_problem(own, prompt):
    """Not by an error of a codec."""
    says = r"mine.py: the prompt of {.*'answer': 9} is .*\\ud.* no text in UTF-8"
    with pytest.raises(ValueError, match=says) as error:
        own(f"{MINE}\nprompt = lambda problem: {prompt}\n")
    assert "codec" not in str(error.value)
    with pytest.raises(ValueError, match="mine.py: the prompt of {'prompt': '1.ud83d'} is"):
        own(f"{MINE}\nproblems = lambda: [{{'prompt': '1\\ud83d'}}]\n")


HANGS = {  # function → its code, and what is printed of the call
    "reward": ("time.sleep(999)", r"reward\({.*'answer': 9.*}, 'aaa"),
    "prompt": ("time.sleep(999)", r"prompt\({.*'answer': 9"),
    "problems": ("yield time.sleep(999)", r"problems\(\)"),
    "import": ("while True: pass", r"import\(.*mine.py"),
    "reward(problem)": ("time.sleep(999)", r"reward\(.*'answer': 9"),
    # Python's lock is kept, so that no other thread runs
    "reward(text)": ("re.match('(a+)+b', text)", r"reward\('aaa"),
}


@pytest.mark.parametrize("name", HANGS)
def test_a_call_that_does_not_return_is_named(name, tmp_path):
    """While it still runs: a slow judge may be right, so nothing ends the call."""
    code, call = HANGS[name]
    parameters = dict(reward="problem, text", prompt="problem").get(name, "")
    define = name if "(" in name else f"{name}({parameters})"
    hang = f"{code}\n" if name == "import" else f"def {define}:\n    {code}\n"
    (tmp_path / "mine.py").write_text(f"import re, time\n{MINE}{hang}")
    script = (
        "from tools import own_task\n"
        "own_task.SLOW = 0.2\n"
        f"task = own_task.load_task_file('{tmp_path}/mine.py')\n"
        "class Table:\n    __repr__ = lambda self: 'a\\n\\nb'\n"
        "task.reward({'answer': 9, 'text': 'é\\ud83d', 'x': Table()}, 'a' * 99, True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        guard = threading.Timer(60, process.kill)
        guard.start()
        said = process.stderr.readline()
        still_runs = process.poll() is None
        process.kill()
        guard.cancel()
    assert re.search(f"mine.py: after 0.2 s, this still runs: {call}", said) and still_runs


def test_a_call_that_returns_is_not_named(own, monkeypatch, capfd):
    monkeypatch.setattr(own_task, "SLOW", 0.3)
    own_task._watch.cache_clear()
    task = own(MINE)
    assert task.reward({"answer": 7}, "7", True) == 1
    own_task._watch().close()
    time.sleep(1)
    own_task._watch.cache_clear()
    assert not capfd.readouterr().err


def test_a_prompt_of_ones_own_is_text_or_a_chat(own):
    """Problems with the same prompt are one."""
    task = own(MINE + "def prompt(problem):\n    return problem['prompt'][:9]\n")
    assert task.prompt({"prompt": "What is 12"}) == "What is 1"
    assert len(task.train) == 7 and len(task.held_out) == 2  # "What is 1" to "What is 9"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    task = own(
        f"{MINE}def prompt(problem):\n    return {chat[:1]} + problem['chat']\n"
        "def problems():\n    for c in 'abcda':\n"
        "        yield {'chat': [{'role': 'user', 'content': c}]}\n"
    )
    assert task.prompt({"chat": chat[1:]}) == chat
    assert len(task.train) == 3 and len(task.held_out) == 1


BAD = {  # text of mine.py → what its refusal says next
    "x =": ": SyntaxError: .*line 1",
    "\n1 / 0": ", line 2: ZeroDivisionError",
    "": r" defines no reward\(\)",
    "def reward(problem, text): pass": r" defines no problems\(\)",
    "import sys\nsys.exit(0)": ", line 2: SystemExit: 0",
    MINE + "problems = lambda: [{}][1]": r", line 5: IndexError: .* problems\(\)",
    MINE.replace('{"prompt"', '{"question"'): ": the prompt .* is None, .* define prompt",
    MINE + "prompt = lambda problem: 7": ": the prompt .* is 7, ",
    MINE + "prompt = lambda problem: []": r": the prompt .* is \[\], ",
    MINE + "prompt = lambda problem: [{'role': 'a'}]": r": the prompt .* is \[{'role': 'a'}\], ",
    MINE + "prompt = lambda problem: ['user']": r": the prompt .* is \['user'\], ",
    MINE + "prompt = lambda problem: problem['x']": r", line 5: KeyError: 'x' in prompt\({'prompt'",
    MINE.replace("range(10, 100)", "range(3)"): " has 3 problems",
}


@pytest.mark.parametrize("text, says", BAD.items())
def test_a_file_that_is_no_task_is_named_with_its_line_and_the_reason(own, tmp_path, text, says):
    """In one line, because train.py prints a ValueError without its traceback."""
    with pytest.raises(ValueError, match=f"^{tmp_path}/mine.py{says}") as error:
        own(text)
    assert "\n" not in str(error.value)


def test_a_file_that_is_absent_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"^{tmp_path}/absent.py: there is no such file"):
        load_task_file(f"{tmp_path}/absent.py")


@pytest.mark.parametrize(
    "value, says",
    [
        ("int(text)", r", line 6: ValueError: .* reward\({'answer': 7}, 'a\\nb'\)$"),
        ("None", ": TypeError: "),
        ("exit(1)", ", line 6: SystemExit: 1"),
        ("float('nan')", ": .* nan is not between -1e6 and 1e6 .*'a.*b'"),
        ("-1e7", ": .* -10000000.0 is not"),
    ],
)
def test_a_reward_that_fails_is_named_with_its_line_and_the_answer(own, value, says):
    task = own(f"{MINE}def reward(problem, text):\n    return {value}\n")
    with pytest.raises(ValueError, match=f"mine.py{says}") as error:
        task.reward({"answer": 7}, "a\nb", True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(143), SystemExit(129)])
def test_a_signal_in_a_reward_is_no_error_of_the_reward(own, stop):
    """tools/launch.py turns SIGTERM into SystemExit(143), whatever function runs just then."""
    task = own(MINE + "def reward(problem, text):\n    raise problem['stop']\n")
    with pytest.raises(type(stop)) as passed:
        task.reward({"stop": stop}, "7", True)
    assert passed.value is stop


def test_a_task_of_ones_own_imports_what_lies_beside_it(own, tmp_path):
    """Also when reward() imports it. The helper's own line is named."""
    (tmp_path / "own_first.py").write_text("NONE = 0")
    (tmp_path / "own_second.py").write_text("def half(text):\n    return int(text) / 2\n")
    reward = own(
        MINE + "import own_first\ndef reward(problem, text):\n    import own_second\n"
        "    return own_second.half(text) + own_first.NONE\n"
    ).reward
    assert reward({}, "3", True) == 1.5
    with pytest.raises(ValueError, match="own_second.py, line 2: ValueError: .* in reward"):
        reward({}, "three", True)
