"""tools/math_task.py and tools/judge.py: which formulas are equal, which answers are refused."""

import functools

import pytest
from test_tasks import jsonl

from tools import judge, math_task
from tools.math_task import math, math_reward

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
    equal = functools.cache(judge.equal.__wrapped__)
    monkeypatch.setattr(math_task, "equal", equal)
    stub.write_text("raise ModuleNotFoundError('math_verify')")
    for _ in range(2):
        with pytest.raises(ValueError, match="pip install math-verify"):
            math(data)
    stub.write_text(STUB)
    assert len(math(data).train) == 3, "it was installed meanwhile"
    child = judge._child()
    verdicts = [equal("7", answer) for answer in ("7", "8", "endless", "huge", "7 ")]
    assert verdicts == [True, False, False, False, True] and judge._child() is child
    child.kill()  # as the kernel does when memory runs out
    with pytest.raises(ValueError, match="math-verify"):
        equal("7", " 7")
    assert equal("7", " 7") is True
    judge._child().communicate()  # closes its input, which ends it


VERDICTS = {  # gold: answers that are right ≠ answers that are wrong
    "5, 100": "100, 5 ≠ 5100",
    "5100": "5,100|5{,}100 ≠ 5, 100",
    "\\frac{1}{2}": "50\\%|50 %|\\dfrac12|0.5|x = \\frac{1}{2}.|½ ≠ 0.5\\%",
    "50\\%": "\\frac{1}{2}|50|50\\text{ percent} ≠ 5",
    "0.5\\%": "\\frac{1}{200} ≠ \\frac{1}{2}",
    "5": "5\\text{ cm}|500\\% ≠ 5, 6||.|5\\%|5\\text{ percent}",
    "90": "90^\\circ",
    "(1, 2)": "\\left(1,2\\right) ≠ (2, 1)|\\{1, 2\\}",
    "(1, 2^{-99})": "(1,2^{-99}) ≠ (1, 2^{-98})",
    "-7": "−7 ≠ 7",
    "7": "7. ≠ -7",
    "2\\sqrt{3}": "\\sqrt{12}",
    "x^2+2x+1": "(x+1)^2 ≠ (x+1)^3",
    "x^2": "x²",
    "\\{1, 2\\}": "2, 1 ≠ 1|(1, 2)",
    "1, 2": "2, 1 ≠ (1, 2)",
    "(1, 2), (3, 4)": "(1,2),(3,4) ≠ (3, 4), (1, 2)",
    "\\{(1, 2), (3, 4)\\}": "\\{(3,4),(1,2)\\}",
    "(-\\infty, 1) \\cup (2, 3)": "(2,3) \\cup (-\\infty,1)",
    "\\text{east}": "east ≠ \\text{west}",
    "3 + 4i": "4i + 3",
    "3^2": "9 ≠ 9**9**9**9",
    "1\\frac{1}{2}": "3/2",
    "5.5": "\\frac{11}{2} ≠ 1 1/2",
    "70\\,\\text{cm}^2": "70",
    "\\binom{10}{3}": "120",
    "\\infty": "∞",
    "0.\\overline{3}": "\\frac13 ≠ 0.34",
    "\\frac16": "0.1\\overline{6}",
    "52_8": "52_{8} ≠ 52_9|52",
    "12_{5} + 3_5": "12_5 + 3_5 ≠ 12_6 + 3_6",
    "1, 2, \\ldots, n": "1,2,\\ldots,n ≠ 1, 3, 5, \\ldots, 2n-1",
    "1, 2, 3": "3, 2, 1 ≠ 1, 2, 3, \\dots",
    "3": "3.0 ≠ 1, 2, …, 3",
    "6": "2 \\cdot 3 = 6|x = 6 ≠ 6'|x \\not= 6|6\\text{ million}|\\neg 6|5 = 6|5 \\to 6|x = 5 = 6",
    "\\frac{1}{2^{99}}": "2^{-99} ≠ \\frac{1}{2^{98}}",
    "0.0000001": "10^{-7} ≠ 0.0000002",
    "x > 2": "(2, \\infty)",
}


@pytest.mark.parametrize("gold, answers", VERDICTS.items())
def test_math_is_judged_by_math_verify(gold, answers):
    for boxes, verdict in zip(answers.split(" ≠ "), (1, 0), strict=False):
        for boxed in boxes.split("|"):
            text = f"It is \\boxed{{0}}, no: $\\boxed{{{boxed}}}$."
            assert math_reward({"answer": gold}, text, True) == verdict, boxed
            assert math_reward({"answer": gold}, text, False) == 0
            assert math_reward({"answer": gold}, boxed, True) == 0, "without a box"


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Half of one?"}]
DAPO = "Solve the following math problem. …\n\nHalf of one?\n\nRemember to put your answer …"
HALF = "\\frac{1}{2}"
HOW_IT_IS_STORED = [  # by MATH-500, MATH, DAPO (published, reprocessed), JSONL, a chat
    {"problem": "Half of one?", "solution": "It is \\boxed{3}.", "answer": HALF},
    {"problem": "Half of one?", "solution": f"It is \\boxed{{1}}. No, \\boxed{{{HALF}}}."},
    {"problem": "Half of one?", "solution": f"We get $\\boxed {HALF}$."},
    {"prompt": [CHAT[1] | {"content": DAPO}], "reward_model": {"ground_truth": HALF, "style": "x"}},
    {"prompt": "Half of one?", "solution": HALF},
    {"question": "Half of one?", "answer": f"#### {HALF}"},
    {"prompt": CHAT, "answer": f"\\boxed{{{HALF}}}"},
]


@pytest.mark.parametrize("record", HOW_IT_IS_STORED)
def test_math_reads_the_field_names_of_the_known_datasets(tmp_path, record):
    others = [{"prompt": str(n), "reward_model": {"ground_truth": n}} for n in range(3)]
    task = math(jsonl(tmp_path / "some.jsonl", [record, *others]))
    answers = {p["problem"]: p["answer"] for p in task.train + task.held_out}
    asked = "be brief\n\nHalf of one?" if record.get("prompt") == CHAT else "Half of one?"
    assert answers == {asked: HALF, "0": "0", "1": "1", "2": "2"}
    prompt = task.prompt({"problem": asked})
    assert prompt.startswith(f"{asked}\n") and prompt.endswith("\\boxed{}.")


def test_a_box_without_braces_ends_with_its_formula(tmp_path):
    golds = {
        "It is $\\boxed  {5}$.": "5",
        "\\[x = \\boxed 7 \\] Hence $y$": "7",
        "$\\boxed \\$32.50$": "\\$32.50",
        "\\begin{align*} x&=\\boxed \\frac12 \\end{align*}": "\\frac12",
        "no formula: \\boxed 1,234. Done": "1,234",
        "It is \\fbox{6}": "6",
        "\\boxed{8}, no, \\fbox 9": "9",
    }
    records = [{"problem": solution, "solution": solution} for solution in golds]
    task = math(jsonl(tmp_path / "some.jsonl", records))
    assert {p["problem"]: p["answer"] for p in task.train + task.held_out} == golds
    for text, gold in golds.items():
        assert math_reward({"answer": gold}, text, True) == 1


PROSE = (
    "The answer is 5|See the figure.|5 (five)|about 5 dollars|(((((((((1)))))))))|"
    "\\boxed{It is 5, because x > 4}"
).split("|")
NO_PROSE = (
    "Evelyn|\\text{no real solutions}|5 apples|10 \\mbox{ square inches}|x \\in [0, \\infty)|"
    "\\begin{pmatrix} 1 & 2 \\end{pmatrix}|\\frac{1}{2} \\sin x|1:30 p.m."
).split("|")
BROKEN = [  # record, what its refusal names
    *(({"problem": "a", "answer": gold}, "\\\\text") for gold in PROSE),
    ({"answer": "3"}, "'problem'"),
    ({"problem": "a"}, "'answer'"),
    ({"problem": "a", "answer": float("nan")}, "'answer'"),
    ({"problem": "a", "answer": "x" * 501}, "500"),
    ({"prompt": [], "answer": "3"}, "chat"),
    ({"prompt": ["hi"], "answer": "3"}, "chat"),
    ({"prompt": [CHAT[1], {"role": "user"}], "answer": "3"}, "chat"),
    ({"prompt": CHAT[:1], "answer": "3"}, "chat"),
]


@pytest.mark.parametrize("record, names", BROKEN)
def test_a_gold_that_no_answer_would_equal_is_refused_with_its_line(record, names, tmp_path):
    golds = [{"problem": gold, "answer": gold} for gold in NO_PROSE]
    assert len(math(jsonl(tmp_path / "some.jsonl", golds)).train) == 6
    with pytest.raises(ValueError, match=f"some.jsonl, line 1: .*{names}"):
        math(jsonl(tmp_path / "some.jsonl", [record]))


TOWERS = (
    (  # of powers and factorials; series; huge exponents: the guard refuses each
        "9^{9^9}|2^{64!}|9^9^9^9|7^{9^{9}} \\mod 13|((9!)!)!|9!!|1000000!|\\left(10000000\\right)!|"
        "\\binom{1000000}{500000}|9^{999999999}|7^{-1000000000}|(x + 1)^{1000}|(x+y+z+w)^{200}|"
        "\\left(x+1\\right)^{999}|\\sum_{i=1}^{9999} i^i|\\prod_{i=1}^{9999} i|"
        "\\int_0^1 e^{x^2} \\sin(x^3) dx|\\iint x^x dx dx|\\lim_{x \\to 0} x^{x}|\\Gamma(10^9)|"
    ).split("|")[:-1]
    + ["2^" * 100 + "2"]
)
DEEP = ["(" * 9 + "1", "[" * 9 + "1" + "]" * 9, "\\sqrt{(" * 9, "\\{" * 200, "1+" * 250 + "1"]
# the guard; math-verify judges each, the last for 1 s of processor time
PASS = ["9" * 400, "1/" * 100 + "1", "1e999999999", "\\" * 100, "^" * 200, "\0", "\ud800"]
PASS += ["\\text{" + "a" * 300 + "}", "(x+1)^{99}(y+1)^{99}(z+1)^{99}"]
WITHIN = ["(" * 8 + "1" + ")" * 8, "()" * 9, "1" * 500, "2^{99999}", "(x+1)^{99}"]


@pytest.mark.parametrize("answer", TOWERS + DEEP + WITHIN)
def test_the_guard_refuses_what_may_take_long_and_never_says_equal(answer, monkeypatch):
    """Not even if answer and gold are the same text.

    If the gold has a tower too, math-verify judges.
    """
    monkeypatch.setattr(math_task, "equal", lambda gold, answer: True)
    for gold, passes in (("42", WITHIN), (answer, WITHIN + TOWERS)):
        for more in ("", " + 1", " - x", " + y") if answer not in WITHIN else ("",):
            text = f"\\boxed{{{answer}{more}}}"
            assert math_reward({"answer": gold}, text, True) == (answer in passes)


def test_hostile_answers_end_and_the_honest_beside_them_keep_their_reward():
    child = judge._child()
    for n, hostile in enumerate(PASS):
        assert math_reward({"answer": "42"}, f"\\boxed{{{hostile}}}", True) == 0
        assert math_reward({"answer": f"\\frac{{{n}}}{{2}}"}, f"\\boxed{{{n}/2}}", True) == 1
    assert judge._child() is child and child.poll() is None
