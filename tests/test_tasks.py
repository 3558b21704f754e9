"""tasks.py: what scores 1 and what scores 0, what is held out, what a bad file or flag says."""

import json
import re
import sys
import time
import types
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tasks
from tools import math_task

AROUND = r"\( \) \[ \] \, \; \: \! \% \$ \text \boxed ** { } $ € £ ¥ ₹ ' ’ “ ” ` # ~ ≈".split()
CHANGES = (
    "18 * 2|18*2|18 × 2|18 x 2|18 / 2|18 ÷ 2|18 + 2|18 · 2|18 - 2|18 – 2|10–18|10-18|5 -3|18 ± 2|"
    "18 times 2|18 * (3 + 2)|5 apples + 3 apples|60 minutes / 2|18kg + 3kg|18^2|18^{2}|18**2|x18|"
    "18 ** 2|18²|18³|18 ²|√18|\\sqrt{18}|\\sqrt[3]{18}|2\\sqrt{3}|sqrt(18)|\\log 18|18!|2^{10}|x²|"
    "5\\text{ million}|18π|18\\times 2|18½|½|18万|十|٣|１８|1'000|1’000|1_000|1 000|10:30|1.2.3|"
    "1/2/3|1/0|2024-05-18|0x12|0b11|1e400|18(3)|5 48/2|3/4.5|18x2|\\frac{1.5}{2}|\\frac{x}{18}|"
    "(2)-3|$10-$3|2*3|18 = 6 * 3|18,5|12,34,567|1,00|1,2345|1234,567|0,500|1.000,00|1\\,000|"
    "1\u202f000|9**9**9|x_{18}|(a / b) * 100|9 or 18|.5|-.5|wait...18|COVID-19|18 !|x/18|"
    "x / 18|18 + x|a * 18|n ^ 18|1\\, 000|7 this 9|7 isles 9|3 dozen|minus 5|2 and a half|"
    "half of 18|5 feet and a half|twenty-5|2 fifths|18 or twenty|Twice 18|five hundred and 20|"
    "1,000/2|7-"
).split("|")
MULTIPLES = (
    "k K M B bn mn mil pi hundred thousands Million billion Trillions lakh crores squared cubed"
).split()
FINAL = {  # text → its answer
    "": None,
    "####18": "18",
    "####\n\n**18**\n3": "18",
    "#### Answer:\n18": None,
    "#### 18\n" + "It took 3 steps.\n" * 10**4: "18",
    "#### 17\n#### 18": "18",
    "#### 2 * 9 = 3 * 6 = $\\boxed{18}$": "18",
    "#### 17 \\boxed{18}": None,
    "\\boxed{17}, \\boxed{18}.": "18",
    "\\boxed{18\\text{ cm}} in 2 days": "18",
    "\\boxed{\\boxed{18}} of 20": "18",
    "\\boxed{ten} of 20": None,
    "\\boxed{17\n18}": None,
    "\\boxed{17": "17",
    "\\boxed{16}, 17, \\boxed{18": "18",
    "17 of them, so 18": "18",
    "COVID-19\n18": "18",
    "18\nx²": None,
    "1, 2, 3": "3",
    "1,234,567.": "1234567",
    "1" * 40: "1" * 40,
    "1" * 41: None,
    "7" + " " * 10**5: "7",
    "- 7": "-7",
    "5 - 3 gives 2": "2",
    "18\\ cm": "18",
    "3/40": "3/40",
    "5 m, or 5 min?": "5",
    "18 kittens often": "18",
    "_18._": "18",
    "#### 18\n####\n": "18",
    "7 * 8 makes 56": "56",
    "7 + 8 looks like 15": "15",
    "6 in 7 * 8 steps": None,
    "7 * 8 times 2": None,
}


def jsonl(path, records):
    path.write_text("\n\n".join(map(json.dumps, records)))
    return str(path)


def word_problems(path, numbers):
    """Write a file in GSM8K's format with one problem per number."""
    return jsonl(path, [{"question": f"Is it {n}?", "answer": f"#### {n}"} for n in numbers])


def numbers(problems):
    return [int(p["answer"][5:]) for p in problems]


# --- what is right


def test_the_examples_in_the_docstrings():
    for read in (tasks.read_number, tasks.last_number, tasks.final_answer):
        examples = re.findall(r"(\S.*?) +→ (\S+)", read.__doc__)
        assert len(examples) > 5
        for text, number in examples:
            assert str(read(text)) == number, text


@pytest.mark.parametrize("text, number", FINAL.items())
def test_gsm8k_prefers_the_mark_then_the_box_then_the_last_number(text, number):
    assert tasks.final_answer(text) == (number and Fraction(number))


def test_what_may_be_around_a_number():
    for mark in AROUND:
        assert tasks.read_number(f"so {mark}18{mark} kg") == 18, mark
    for mark in ".,:;?!—()%°":
        assert tasks.read_number(f"Total{mark} 18 kg{mark} all") == 18, mark
    for cut in ", |. |: |; |? |=|<|>|\n| is | are | equals | gives ".split("|"):
        assert tasks.last_number(f"7 * 8{cut}56") == 56, cut
    for word in MULTIPLES:
        assert tasks.read_number(f"18 {word}y") == 18, word


@pytest.mark.parametrize("text", CHANGES + [f"5{s}{m}" for m in MULTIPLES for s in ("", " ", "-")])
def test_a_number_that_something_changes_is_no_answer(text):
    """Nor is another number of the text, whether the text has a mark, a box or neither."""
    assert tasks.last_number(f"7\n{text}") is None
    assert tasks.final_answer(f"7\n#### {text}\n7") is None
    assert tasks.final_answer(f"\\boxed{{{text}}} of 7") is None


ANSWERS = Path(__file__).parent / "data" / "gsm8k_answers.jsonl"
REFUSED = {23: "8 cm²", 770: "it ends within a formula, f ≥ 4"}  # line of ANSWERS → its end


def test_the_answers_of_a_real_model_are_judged_as_a_reader_would():
    """1,000 answers of Qwen2.5-Coder-0.5B-Instruct (Q4_K_M) to GSM8K's test problems, at
    temperature 1, at most 320 tokens. right: the answer is the gold's number. strict: by that
    filter of lm-eval's gsm8k.
    """
    refused = set()
    for number, line in enumerate(ANSWERS.read_text().splitlines()):
        record = json.loads(line)
        paid = tasks.gsm8k_reward({"answer": f"#### {record['gold']}"}, record["text"], True)
        assert record["right"] >= paid >= record["strict"], number
        if paid != record["right"]:
            refused.add(number)
    assert number == 999 and refused == REFUSED.keys()


def test_arithmetic_prompts_and_rewards():
    problem = {"a": 7, "b": 8}
    for name, sign, result in (("multiplication", "*", 56), ("addition", "+", 15)):
        task = tasks.TASKS[name]()
        assert task.prompt(problem) == f"What is 7 {sign} 8?"
        answers = (f"7, 8: {result}.", True), (f"{result}, 14", True), (str(result), False)
        assert [task.reward(problem, *answer) for answer in answers] == [1, 0, 0]


# --- hostile text: an innocent regular expression, or a tower of powers, could take for ever

JUDGES = [
    (tasks.gsm8k_reward, {"answer": "#### 9"}),
    (tasks.TASKS["addition"]().reward, {"a": 4, "b": 5}),
    (math_task.math_reward, {"answer": "9"}),
]


def judge_quickly(reward, problem, text):
    """→ the reward, if it takes under 30 ms of the processor, to which other jobs do not add.

    The garbage collector may run in one call, and in another again: the quickest of three counts.
    """
    for _ in range(3):
        began = time.process_time()
        value = reward(problem, text, True)
        if time.process_time() - began < 0.03:
            return value
    pytest.fail(f"{reward} is too slow")


BEGINNINGS = ["", "1", "#### ", "1e", "\\frac{", "1,111"]
PIECES = (
    "9**|1|-|(|,1|\\boxed{|#|\\boxed{{}|#### |1 |1/|1/1 |1 1/1.1|1,111|,111|1e|\\frac{1}{| |**|"
    "6*3=|a/|$ |1m|####\\times|{|}|\\left(|\\frac{|\\text{|^|=|\\|½|٣|\ud800|\0|3/4|- |a|a |1!|"
    "\\, |(1 + 2) * 3|\\boxed{\\frac{1}{2}}|. "
).split("|")
ANY = st.text() | st.lists(st.sampled_from(PIECES) | st.integers().map(str)).map("".join)


def test_hostile_texts_score_0_quickly():
    """Towers such as 9**9**9 are not computed. 10,000 characters show that the time grows with the
    length alone: with its square, they would take seconds.
    """
    for start in BEGINNINGS:
        for piece in PIECES:
            text = start + piece * (10_000 // len(piece))
            for reward, problem in JUDGES:
                assert judge_quickly(reward, problem, text) == 0


@settings(max_examples=200, deadline=None)  # a busy machine is no error
@given(ANY)
def test_any_text_at_all_scores_0_or_1_quickly(text):
    """For math it is the time of the guard, without math-verify."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_task, "equal", str.__eq__)
        for reward, problem in JUDGES:
            assert judge_quickly(reward, problem, text) in (0, 1)
    assert tasks.gsm8k_reward({"answer": "#### 9"}, f"{text}\n#### 9", True) == 1


# --- what is held out


def test_held_out_pairs_are_not_trained_on_in_either_order():
    for name, operands, total in (
        ("multiplication", None, 121),
        ("addition", None, 10_000),
        ("addition", "0-7", 64),
    ):
        task = tasks.TASKS[name](None, operands)
        train, held = ({(p["a"], p["b"]) for p in problems} for problems in task[:2])
        assert len(held) == len(task.held_out) == 32 and len(train | held) == total
        assert not train & (held | {(b, a) for a, b in held})
        assert tasks.TASKS[name](None, operands)[:2] == task[:2]


def test_exactly_as_many_are_held_out_as_asked_for():
    for n in range(1, 9):
        for asked in range(n * n // 2 + 1):
            task = tasks.TASKS["addition"](operands=f"1-{n}", held_out=asked)
            assert len(task.held_out) == asked and len(task.train) == n * n - asked


@pytest.mark.parametrize("operands", ["12-2", "2", "-2-5", "1-6", "0-1000", "0-99999999", "٢-٩"])
def test_bad_operands_are_named(operands):
    with pytest.raises(ValueError, match=f"^--operands {operands} "):
        tasks.TASKS["addition"](operands=operands)


def test_gsm8k_reads_plain_answers_and_holds_out_a_quarter_of_a_small_file(tmp_path):
    """Each gold answer scores 1, and one more scores 0."""
    golds = (
        "18|-2|1,234|2.5|$9|3/4|0|5.|5 apples|**5**|5\n6 is wrong|6 * 3 = 18|3 + 3 = 6 apples|"
        "1. First step\n#### 18|007|1 = 1"
    ).split("|")
    data = word_problems(tmp_path / "some.jsonl", golds)
    task = tasks.gsm8k(data)
    assert len(task.train) == 12 and len(task.held_out) == 4
    assert task.prompt({"question": "Is {it}?"}).startswith("Is {it}?\n")
    for problem in task.train + task.held_out:
        right = problem["answer"]
        wrong = f"{right}\n#### {tasks.final_answer(right) + 1}"
        answers = (right, True), (right, False), (wrong, True)
        assert [task.reward(problem, *answer) for answer in answers] == [1, 0, 0]
    with pytest.raises(ValueError, match=f"--operands 2-3 .*{data}"):
        tasks.gsm8k(data, "2-3")


def test_questions_that_differ_in_blanks_or_case_are_one_problem(tmp_path):
    """None is held out and trained on, also if one stands in the test file."""
    forms = "Is  {it} %d?", "IS {IT} %d?", " is {it}\t%d?\n"
    records = [{"question": form % n, "answer": "#### 3"} for n in range(8) for form in forms]
    data = jsonl(tmp_path / "data.jsonl", records)
    task = tasks.gsm8k(data)
    assert len(task.train) == 6 and len(task.held_out) == 2
    assert task.train[0]["question"].startswith("is"), "the last form"
    test = jsonl(tmp_path / "test.jsonl", records[1:2])
    assert len(tasks.with_test_set(tasks.gsm8k, test, data).train) == 7


def test_in_mathematics_case_is_meaning(tmp_path):
    """So is it in a question that has LaTeX."""
    records = [{"question": f"What is ${a}$?", "answer": "#### 1"} for a in ("x", "X", "y")]
    data = jsonl(tmp_path / "data.jsonl", [*records, {"question": "Why?", "answer": "#### 2"}])
    task = math_task.math(data)
    found = {p["problem"] for p in task.train + task.held_out}
    assert found == {*(f"What is ${a}$?" for a in ("x", "X", "y")), "Why?"}


@pytest.mark.parametrize("make", [tasks.gsm8k, math_task.math])
def test_two_golds_for_one_question_are_refused(tmp_path, make):
    """5.0 beside 5 is no second one."""
    records = [{"question": f"{n}?", "answer": "#### 5"} for n in range(4)]
    same = {"question": " 3?", "answer": "2 + 3 = 5\n#### 5"}
    assert len(make(jsonl(tmp_path / "some.jsonl", [*records, same])).train) == 3
    data = jsonl(tmp_path / "some.jsonl", [*records, same | {"answer": "#### 6"}])
    with pytest.raises(ValueError, match="some.jsonl has .*5 and 6, .*'3?"):
        make(data)


def test_a_line_taken_out_moves_one_problem_at_most(tmp_path):
    """Otherwise a resumed run would be evaluated on problems that it has trained on."""

    def held(lines):
        task = tasks.gsm8k(word_problems(tmp_path / "some.jsonl", lines), held_out=64)
        assert len(task.held_out) == 64 and len(task.train) == len(lines) - 64
        return set(numbers(task.held_out))

    every = {*range(400)}
    old = held(every)
    assert sorted(old)[:4] == [6, 11, 15, 16], "the split that old runs resume with"
    assert held(every - {min(every - old)}) == old
    assert held(every - {min(old)}) > old - {min(old)}


def test_all_of_a_test_file_is_held_out_and_none_of_it_trained_on(tmp_path):
    """Problems 8 and 9 are in both files. To evaluate, a test file alone is enough."""
    data = word_problems(tmp_path / "data.jsonl", range(10))
    test = word_problems(tmp_path / "test.jsonl", [*range(17, 7, -1)])
    few = word_problems(tmp_path / "few.jsonl", [7, 8, 9])
    for more, trains, left in ((data, 1, 8), (data, 0, 8), (None, 0, 0), (few, 1, 1)):
        task = tasks.with_test_set(tasks.gsm8k, test, more, trains=bool(trains))
        assert numbers(task.held_out) == [*range(17, 7, -1)]
        assert sorted(numbers(task.train)) == [*range(8)][8 - left :]


def test_problems_beside_a_test_set_keep_the_order_of_earlier_runs(tmp_path):
    """Those that are held out without a test set come last: a resumed run draws by numbers."""
    data = word_problems(tmp_path / "data.jsonl", range(9))
    test = word_problems(tmp_path / "test.jsonl", [99])
    alone, beside = tasks.gsm8k(data), tasks.with_test_set(tasks.gsm8k, test, data)
    assert alone.held_out and beside.train == alone.train + alone.held_out


MISFITS = [  # task, test, data, operands, trains; what is named
    (("gsm8k", "test.jsonl", "again.jsonl", None, True), "again.jsonl .* --test test.jsonl"),
    (("gsm8k", "absent", None, None, True), "give --data"),
    (("gsm8k", "none.jsonl", None, None, False), "none.jsonl has 0"),
    (("gsm8k", "test.jsonl", None, "1-9", False), "--operands 1-9 .* test.jsonl"),
    (("addition", "some.jsonl", None, None, False), "some.jsonl: .* --test"),
]


@pytest.mark.parametrize("arguments, names", MISFITS)
def test_a_test_file_that_does_not_fit_is_named(arguments, names, tmp_path, monkeypatch):
    """To train without data is refused before the test file is read."""
    monkeypatch.chdir(tmp_path)
    word_problems(Path("test.jsonl"), range(8, 18))
    word_problems(Path("again.jsonl"), range(17, 7, -1))
    word_problems(Path("none.jsonl"), [])
    name, *others = arguments
    with pytest.raises(ValueError, match=names):
        tasks.with_test_set(tasks.TASKS[name], *others)


# --- files and data sets


BROKEN = {  # third line of a file → what its refusal names beside that line
    '{"question": "a", "answer": "#### 1"},': "JSON object",
    "[" * 10**5: ".",
    '{"question": "a"}': "'answer'",
    '{"question": "", "answer": "#### 3"}': "'question'",
    '{"question": true, "answer": "#### 3"}': "'question'",
    '{"question": "a", "answer": "2 + 1 is 3"}': "--task math",
    '{"question": "a", "label": 3}': "'answer' .* 'question', 'label'",
    '{"question": "\\ud83d", "answer": "#### 3"}': ".",
    '{"question": "é"}'.encode("latin-1"): "UTF-8",
    '{"question": "é"}\n'.encode("utf-16"): "UTF-8",
    b"PAR1\x15\x04\x15\x00\n\xff": "no Parquet, no archive",
}


@pytest.mark.parametrize("line, names", BROKEN.items())
def test_a_broken_line_is_named_with_its_number(line, names, tmp_path):
    path = tmp_path / "some.jsonl"
    bad = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"question": "a", "answer": "#### 3"}\n\n' + bad)
    with pytest.raises(ValueError, match=f"^{path}, line 3: .*{names}") as refused:
        tasks.gsm8k(path)
    assert "\n" not in str(refused.value) and "line 1" not in str(refused.value)


@pytest.mark.parametrize(
    "text, column", [('{"a": 1 "b"}', 9), ('{"a"', 6), ("{'a': 1}", 2), ('{"a": 1}}', 9)]
)
def test_a_line_that_is_no_json_is_named_with_its_column(text, column, tmp_path):
    """And with one line, the file's; also if the text ends too early."""
    path = tmp_path / "some.jsonl"
    path.write_text(f'{{"question": "a", "answer": 3}}\n{text}\n')
    with pytest.raises(ValueError, match=f"line 2: column {column}: ") as refused:
        tasks.gsm8k(path)
    assert str(refused.value).count("line ") == 1


@pytest.mark.parametrize(
    "gold", "1 000|5!|3²|3 * 4|5k|17 or 18|5 (3 + 2)|#| 5\\boxed{6}".split("|")
)
def test_a_gold_that_would_be_read_in_part_is_refused(gold, tmp_path):
    """Or any text without a number would equal it."""
    path = jsonl(tmp_path / "some.jsonl", [{"question": "q", "answer": f"#### {gold}\n"}])
    with pytest.raises(ValueError, match="line 1: .* plain number"):
        tasks.gsm8k(path)


HUB_NAMES = {  # the name of a dataset: its config and split
    "o/n": "None train",
    "o/n/c:test[:50%]": "c test[:50%]",
    "o/n:train+test": "None train+test",
    "o/n:train[:1%]+test[-80:]": "None train[:1%]+test[-80:]",
}


def test_a_dataset_of_the_hub_is_read_through_datasets(monkeypatch):
    """owner/name[/config][:split]. A name that ends like a file is never looked up on the hub."""

    def load_dataset(name, config, split):
        if name == "o/none":
            raise RuntimeError("no such dataset\nand more")
        return [{"question": f"{config} {split} {n}?", "answer": f"#### {n}"} for n in range(7)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    for name, asked in HUB_NAMES.items():
        assert tasks.gsm8k(name).train[0]["question"].startswith(asked)
    for name, names in (("o/none", r"no such dataset\)"), ("data/x.jsonl", "No such file")):
        with pytest.raises(ValueError, match=f"{name} .*{names}"):
            tasks.gsm8k(name)
    monkeypatch.setitem(sys.modules, "datasets", None)  # makes the import fail
    with pytest.raises(ValueError, match="o/n .*pip install datasets"):
        tasks.gsm8k("o/n")
