"""tools/math_task.py and tools/judge.py: which formulas are equal, which answers are refused."""

import itertools
import multiprocessing
import random
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
from command import ROOT
from test_tasks import jsonl

from tools import judge, math_task
from tools.math_task import math, math_reward

STUB = """def parse(text, **limits):
    return text[7:-1].strip()                                 # \\boxed{text}
def verify(gold, answer, **limits):
    while answer == "endless":
        pass
    known = KNOWN.get((gold, answer), gold == answer)
    return known or answer == "huge" and len(bytearray(MB << 20)) > 0
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """stub(text, …) puts a stub in the place of math-verify, which is slow to import, and forgets
    children and verdicts.
    """
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def forget():
        judge._idle.clear()  # closes a child's input, which ends it
        judge.equal.cache_clear()

    forget()

    def write(text=STUB, known=judge.KNOWN, megabytes=5000):
        names = f"KNOWN, MB = {known!r}, {megabytes}\n"
        (tmp_path / "math_verify.py").write_text(names + text)

    yield write
    forget()


def test_a_judge_that_does_not_run_or_dies_is_an_error_and_no_reward_of_0(tmp_path, stub):
    """The next answer gets a new judge, and so does this one if the judge has died in between.

    One answer takes more than 1 s of the processor, and one more than 4 GB: both score 0, and
    the judge goes on.
    """
    data = jsonl(tmp_path / "some.jsonl", [{"problem": str(n), "answer": n} for n in range(4)])
    stub("raise ModuleNotFoundError('math_verify')")
    for _ in range(2):
        with pytest.raises(ValueError, match="pip install math-verify"):
            math(data)
    stub()
    assert len(math(data).train) == 3, "it was installed meanwhile"
    (child,) = judge._idle
    verdicts = [judge.equal("7", answer) for answer in ("7", "8", "endless", "huge", "7 ")]
    assert verdicts == [True, False, False, False, True] and judge._idle == [child]
    child.kill()  # as the kernel does when memory runs out
    assert judge.equal("7", " 7") is True and judge._idle != [child]


# math-verify as it would be with a broken parser of LaTeX, or one that takes all for equal
USELESS = [{}, {pair: not verdict for pair, verdict in judge.KNOWN.items()}]
USELESS += [judge.KNOWN | {pair: not verdict} for pair, verdict in judge.KNOWN.items()]


@pytest.mark.parametrize("known", USELESS)
def test_a_judge_that_cannot_judge_is_refused_at_the_start(stub, tmp_path, known):
    """It would score every answer 0."""
    data = jsonl(tmp_path / "some.jsonl", [{"problem": str(n), "answer": n} for n in range(4)])
    stub(known=known)
    with pytest.raises(ValueError, match="pip install math-verify, or allow it more memory"):
        math(data)


def test_a_hard_limit_below_the_judges_own_holds_and_does_not_stop_it(stub):
    """No process may raise a hard limit, or set its soft one above it."""
    stub(megabytes=700)
    script = """if True:
        import resource
        from tools.judge import equal
        resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))
        print(equal("7", "7"), equal("7", "8"), equal("7", "huge"))"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True False False\n", done.stderr


def test_a_system_without_a_limit_of_memory_judges_without_it(stub, tmp_path):
    """macOS: setrlimit refuses any limit of address space, by a ValueError."""
    stub()
    (tmp_path / "resource.py").write_text(
        "RLIMIT_AS = 5\n"
        "getrlimit = lambda kind: (-1, -1)\n"
        "def setrlimit(kind, limits):\n"
        "    raise ValueError('current limit exceeds maximum limit')\n"
    )
    assert [judge.equal("7", answer) for answer in ("7", "8")] == [True, False]


PAIRS = [(str(n), str(n + odd)) for odd in (0, 1) for n in range(30)]


def verdicts_of(pairs):
    return [judge.equal(*pair) for pair in pairs]


def test_threads_and_forked_processes_get_the_verdicts_of_their_own_questions(stub):
    stub()
    shuffled = [random.Random(thread).sample(PAIRS, 60) for thread in range(8)]
    want = [[gold == answer for gold, answer in pairs] for pairs in shuffled]
    judge.equal("1", "2")
    pools = ThreadPoolExecutor(8), ProcessPoolExecutor(2, multiprocessing.get_context("fork"))
    for pool in pools:
        judge.equal.cache_clear()
        with pool:
            assert list(pool.map(verdicts_of, shuffled)) == want


def test_a_time_limit_of_the_users_own_around_a_reward_changes_no_later_verdict(stub):
    """Also if its error is one that this file handles when a child raises it."""
    stub()
    for error in (TimeoutError, ValueError, KeyboardInterrupt):

        def stop(*_, error=error):
            raise error("too slow")

        old = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(error, match="too slow"):
            math_reward({"answer": "7"}, "\\boxed{endless}", True)
        signal.signal(signal.SIGALRM, old)
        assert verdicts_of(PAIRS[::6]) == [gold == answer for gold, answer in PAIRS[::6]]
        judge.equal.cache_clear()


@pytest.mark.parametrize("idle", [False, True])
def test_an_interrupt_at_any_line_of_the_judge_changes_no_later_verdict(stub, idle):
    """Whether a child waits already, or has to be started."""
    stub()
    lines = itertools.count(1)
    for line in lines:
        if not idle:
            judge._idle.clear()
        judge.equal.cache_clear()
        left = line

        def trace(frame, event, _):
            nonlocal left
            if frame.f_code.co_filename == judge.__file__:
                left -= event == "line"
                if left == 0:
                    left = -1
                    raise KeyboardInterrupt
                return trace

        outer = sys.gettrace()
        sys.settrace(trace)
        try:
            judge.equal("8", "8")
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(outer)
        assert verdicts_of(PAIRS[25:35]) == [True] * 5 + [False] * 5
        if left > 0:
            break
    assert line > 8


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
    "70\\,\\text{cm}^2": "70|70\\text{ cm}^{2}|x = 70\\mathrm{cm}² ≠ 70\\text{ cm}|70 cm^3",
    "8\\text{ m}": "8|8 m|8\\mbox{ m} ≠ 8 \\text{ cm}|8 cm|8\\mathrm{cm}|8\\text{ m}^2|9 m",
    "5 apples": "5|5\\text{ apples} ≠ 5 pears",
    "8^\\circ\\text{C}": "8^\\circ|8 ≠ 8^\\circ\\text{F}",
    "1 \\text{ or } x = 2": "1, 2|x = 1, x = 2 ≠ 1 \\text{ or } 3",
    "\\frac{\\pi}{2}": "\\frac\\pi2|\\frac\\pi{2}|\\dfrac \\pi 2 ≠ \\frac2\\pi|\\frac\\pi3",
    "\\frac{\\alpha}{\\pi}": "\\tfrac\\alpha\\pi|\\frac{\\alpha}\\pi ≠ \\frac\\pi\\alpha",
    "\\sqrt\\pi": "\\sqrt{\\pi} ≠ \\pi",
    "\\frac12\\pi": "\\frac\\pi2",
    "\\varnothing": "\\emptyset|∅|\\{\\} ≠ 0|\\{0\\}",
    "\\emptyset": "\\varnothing",
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
    {"messages": [*CHAT, {"role": "assistant", "content": f"So \\boxed{{{HALF}}}"}]},
]


@pytest.mark.parametrize("record", HOW_IT_IS_STORED)
def test_math_reads_the_field_names_of_the_known_datasets(tmp_path, record):
    others = [{"prompt": str(n), "reward_model": {"ground_truth": n}} for n in range(3)]
    task = math(jsonl(tmp_path / "some.jsonl", [record, *others]))
    answers = {p["problem"]: p["answer"] for p in task.train + task.held_out}
    asked = "be brief\n\nHalf of one?" if "be brief" in str(record) else "Half of one?"
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


GOLDS = {  # as JSON has it: an answer that is right, one that is wrong
    '"28."': ("28", "2.8"),
    '"28 . "': ("28.", "29"),
    '"It is $\\\\boxed{28.}$."': ("28", "2.8"),
    "28.0": ("28.", "29"),
    "1e-05": ("0.00001", "0.00002"),
    "2.5E-7": ("0.00000025", "0.000000025"),
    "1e22": ("10^{22}", "10^{21}"),
    '"1, 2, ..."': ("1,2,...", "1, 2"),
}


@pytest.mark.parametrize("gold, answers", GOLDS.items())
def test_a_gold_and_an_answer_take_the_same_way_to_their_comparison(tmp_path, gold, answers):
    """A full stop ends a sentence, and a JSON number is no e times 1, minus 5."""
    path = tmp_path / "some.jsonl"
    path.write_text("".join(f'{{"problem": "{n}", "answer": {gold}}}\n' for n in range(4)))
    problem, *_ = math(str(path)).train
    scores = [math_reward(problem, f"\\boxed{{{answer}}}", True) for answer in answers]
    assert scores == [1, 0]


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
    *(({"problem": "a", "answer": float(odd)}, "'answer'") for odd in ("nan", "inf", "-inf")),
    ({"problem": "a", "answer": "{" * 6 + "5" + "}" * 6}, "\\\\text"),
    ({"problem": "a", "answer": "x" * 501}, "500"),
    ({"prompt": [], "answer": "3"}, "chat"),
    ({"prompt": ["hi"], "answer": "3"}, "chat"),
    ({"prompt": [CHAT[1], {"role": "user"}], "answer": "3"}, "chat"),
    ({"prompt": CHAT[:1], "answer": "3"}, "chat"),
    ({"messages": [*CHAT, *CHAT], "answer": "3"}, "chat"),
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
    judge.equal("42", "43")
    (child,) = judge._idle
    for n, hostile in enumerate(PASS):
        assert math_reward({"answer": "42"}, f"\\boxed{{{hostile}}}", True) == 0
        assert math_reward({"answer": f"\\frac{{{n}}}{{2}}"}, f"\\boxed{{{n}/2}}", True) == 1
    assert judge._idle == [child] and child.poll() is None
