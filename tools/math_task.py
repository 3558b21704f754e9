r"""--task math: problems, or messages of chats, whose answers are formulas in LaTeX.

    task = math("MATH-500.jsonl")
    math_reward({"answer": r"\frac12"}, r"so \boxed{0.5}", True)    → 1.0

An answer scores 1 if the model ended it and if math-verify finds the formula in its last \boxed{…}
equal to the solution. Judging takes a few milliseconds, or at most 1 s of processor time for each
comparison that math-verify makes.

math-verify leaves out some parts of a formula, so this file decides about these. If either text has
a base (52_8), dots, \prime, a ' after a digit, ) or }, a negation (\neg, \not) or a word such as
"million", the whole texts must be the same, but for blanks, braces, \left, \right and \text. If the
solution has a unit, the answer has the same one, in the same words, or none: of 8\text{ m}, 8 is
right, and neither 8\text{ cm} nor 8\text{ meters}. If the solution has no %, 5\% is 1/20. (1, 2) is
not {1, 2}. Of 5 = 6, both sides must be right.

data is a JSONL file or a dataset of the hub, such as HuggingFaceH4/MATH-500:test or
open-r1/DAPO-Math-17k-Processed/en; tools/records.py tells which columns are read.
A solution that nobody could answer, such as prose, is refused, and its line is named.

Needs: tasks.py, tools/{judge,records}.py, math-verify.
"""

import operator
import re
from itertools import starmap

from tasks import Task, hold_out, read
from tools.judge import equal
from tools.records import question_and_answer

MATH = "{problem}\nThink step by step, and put the final answer into \\boxed{{}}."

MAX_FORMULA = 500  # characters of a formula in LaTeX

# \boxed{…} with braces up to 5 deep, those of the box included; or, as in some solutions of MATH,
# \boxed 2 without braces: a number, or what ends where its formula ends.
BOX = re.compile(
    r"\\(?:boxed|fbox) *(?:\{(" + r"(?:[^{}]|\{" * 4 + "[^{}]*" + r"\})*" * 4 + r")\}"
    r"|(-?[0-9][0-9.,/]*(?<=[0-9])(?![^\s.,$\\])"
    r"|(?:\\\$|[^ ${])(?:\\\$|[^$\n])*?(?= *(?:\$|\\[])]|\\end|\n|\Z))))"
)
# The instructions around each problem of DAPO. They ask for another form of answer than
# the template MATH does.
DAPO = re.compile(
    r"\ASolve the following math problem[^\n]*\n\n|\n\nRemember to put your answer[^\n]*\Z"
)
# LaTeX that may keep sympy busy until the judge gives up, after a second: series, integrals, towers
# of powers or factorials, huge exponents. A policy that repeats itself writes hundreds of these.
HEAVY = re.compile(
    r"\\(?:sum|prod|i*int|lim|Gamma)(?![a-z])|\^ *(?:\{[^}]*|\w)[\^!]"
    r"|(?:!|[0-9]{6})(?:\\right|[)} ])*!|(?:\^|binom)[{( -]*[0-9]{6}"
    r"|\w *[-+][^()]*\) *\^[{ ]*[0-9]{3}"
)
# Nine opening brackets without a closing one between them: such a formula could take all of the
# judge's second.
DEEP = re.compile(r"(?:[(\[{][^()\[\]{}]*){9}")
# Parts of a formula that math-verify leaves out: the base of a number, dots, a prime, …
IGNORED = re.compile(
    r"[0-9]\}?_|\\[a-z]*dots|\.\.\.|…|[0-9)}]'|\\(?:dot|not|neg|lnot|prime)(?![a-z])"
    r"|hundred|thousand|million|billion|trillion|squared|cubed"
)
# A word, and the power after it: of the units cm and m^2, which math-verify leaves out, too. UNIT
# tells that a gold has one. A letter before = is a variable.
WORD = re.compile(r"(?<![\\A-Za-z])([A-Za-z]+)(?![A-Za-z]| *=)(?:[} ]*\^[{ ]*(\d))?")
UNIT = re.compile(r"\\(?:text|mbox|mathrm)|\d +[a-z]{2}")
# \frac, perhaps with its first argument, or \sqrt; then an argument such as \pi, without braces
BARE = re.compile(r"(\\(?:[dtc]?frac(?: *\w|\{[^{}]*\})?|sqrt)) *(\\[a-z]+)")
TUPLE = re.compile(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]")
EQUATION = re.compile(r"=|\\(?:approx|to|implies|[a-zA-Z]*arrow)(?![a-z])")
# signs that math-verify does not read, each with LaTeX for it
SIGNS = r"""½ \frac12 ⅓ \frac13 ⅔ \frac23 ¼ \frac14 ¾ \frac34 ² ^2 ³ ^3 · \cdot ∞ \infty ° ^\circ
– - ∅ \emptyset \varnothing \emptyset"""


def math(data: str | None = None, operands: str | None = None, held_out: int = 256) -> Task:
    """→ the Task of problems whose answers are formulas.

    The arguments are those of tasks.gsm8k. ValueError: what read and hold_out raise; math-verify
    does not run.
    """
    equal("1", "1")  # starts the judge: without math-verify, raise now and not in the first step
    task = Task(read(data, _latex_problem), [], MATH.format_map, math_reward)
    return hold_out(task, held_out, data, operands, operator.itemgetter("answer"))


def math_reward(problem: dict, text: str, finished: bool) -> float:
    r"""→ 1.0 if the formula in the last \boxed{…} equals the solution, and the text is finished;
    else 0.0.
    """
    return float(finished and _same_formula(problem["answer"], _last_box(text)))


def _last_box(text: str) -> str:
    r"""→ the formula in the last \boxed{…} or \fbox{…} of a text; "" without one."""
    box = BOX.match(text, max(text.rfind("\\boxed"), text.rfind("\\fbox")))
    return _bare(box[1] or box[2] or "") if box else ""


def _bare(formula: str) -> str:
    """→ a formula without blanks around it and a full stop after it, but with three dots."""
    return re.sub(r"(?<!\.)\s*\.\s*\Z", "", formula).strip()


# --- whether two formulas are equal


def _same_formula(gold: str, answer: str) -> bool:
    """→ whether two texts in LaTeX are equal. math-verify decides, but for parts that it leaves
    out.

    Some answers are wrong without a call of math-verify, because they could take all of its second:
    a DEEP answer always, a HEAVY one unless the gold is HEAVY, too. An answer that is empty or
    longer than MAX_FORMULA is wrong as well.
    """
    if not 0 < len(answer) <= MAX_FORMULA or DEEP.search(answer):
        return False
    if HEAVY.search(answer) and not HEAVY.search(gold):
        return False
    gold, answer = _rewrite(gold), _rewrite(answer)
    if IGNORED.search(gold + answer):
        blanks = r"\\(?:left|right|text|[,;:! ])|[\s{}]"
        return re.sub(blanks, "", gold) == re.sub(blanks, "", answer)
    if UNIT.search(gold) and not set(WORD.findall(answer)) <= set(WORD.findall(gold)):
        return False
    # math-verify takes "5\%" for 5 and for 1/20. If the gold has no %, 1/20 is meant.
    if "%" not in gold:
        answer = answer.replace("\\%", "/100")
    # math-verify takes (1, 2) for {1, 2}, and the tuples of (1, 2), (3, 4) in any order.
    pairs = [(gold, answer)]
    golds, answers = TUPLE.findall(gold), TUPLE.findall(answer)
    if "," in gold and "," in answer and len(golds) != len(answers):
        return False
    if not re.search(r"\\\{|cup", gold):
        pairs += zip(golds, answers, strict=False)
    # math-verify takes "5 = 6" for 6. A side without a variable must equal the gold, too.
    for side in EQUATION.split(answer)[:-1]:
        if not re.search(r"(?<![\\A-Za-z])[A-Za-z]", side):
            pairs.append((gold, side))
    return all(starmap(equal, pairs))


def _rewrite(formula: str) -> str:
    r"""→ a formula with LaTeX for signs that math-verify does not read: √3, ½, 0.\overline{3}."""
    signs = SIGNS.split()
    for sign, latex in zip(signs[::2], signs[1::2], strict=True):
        formula = formula.replace(sign, f"{latex} ")
    formula = re.sub(r"√ *([0-9.]+|\w)", r"\\sqrt{\1}", formula)
    for _ in range(2):  # both arguments of \frac\pi\alpha
        formula = BARE.sub(r"\1{\2}", formula)
    formula = re.sub(r"\\?%|(\\text\{)? *percent\b\}?", r"\\%", formula)
    # 20 times the period: math-verify compares 6 digits
    return re.sub(r"(\.[0-9]*)\\overline\{?([0-9]+)\}?", lambda m: m[1] + 20 * m[2], formula)


# --- problems from files


def _latex_problem(record: dict) -> dict:
    """→ the problem of a line of the data.

    ValueError: a column is missing; an answer in prose; one that is empty or exceeds MAX_FORMULA,
    counted inside its last box or else after its last ####; one that does not equal itself; a chat
    of several turns.
    """
    question, answer = question_and_answer(record).values()
    gold = _last_box(answer) or _bare(answer.rpartition("####")[2])
    if not 0 < len(gold) <= MAX_FORMULA:
        raise ValueError(f"its answer must have 1 to {MAX_FORMULA} characters, or a \\boxed{{…}}")
    # math-verify takes the letters of "The answer is 5" for variables, so that 5 would score 0.
    # "5 apples" is no such gold: the number alone equals it.
    number = re.sub(r"(?<![\\{A-Za-z])[A-Za-z]{4,}", "", gold)
    has_words = " " in gold and number != gold and "\\text" not in gold
    is_prose = has_words and not equal(gold, number)
    problem = {"answer": gold}
    # an integer equals itself: do not start math-verify for each of thousands
    equals_itself = gold.isdecimal() or math_reward(problem, f"\\boxed{{{gold}}}", True)
    if is_prose or not equals_itself:
        raise ValueError(
            f"no answer would equal its answer {gold[:60]!r}: write "
            "the formula alone, and words that belong to it as \\text{…}"
        )
    return problem | {"problem": DAPO.sub("", question)}
