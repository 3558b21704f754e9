r"""Tasks: problems, a prompt for each, and a reward that a program can verify: 1 if right, else 0.

    task = TASKS["multiplication"]()       # addition; with data: gsm8k, math
    task.train, task.held_out              # lists of problems, each a dict
    task.prompt(problem)                   # "What is 7 * 8?", the user's message, no chat template
    task.reward(problem, text, finished)   # 1.0 or 0.0

An answer scores 1 if the model ended it (finished) and if it is right:

    multiplication, addition    the last number in the text equals the result exactly
    gsm8k                       the number after the last "####" that a number follows equals the
                                solution's. "#### 1. First step" is a heading, and skipped;
                                "#### 6 * 3 = 18" answers 18. Without such a mark: the last number
                                in the last \boxed{…}, else in the text
    math                        math-verify finds the last \boxed{…} equal to the solution

    "7 * 8 = 56."         56    "-7", "−7", "-$7"       −7      "1,000" is 1000; "1,00" ends with 00
    "$56", "56%", "56kg"  56    "5-3", "5 - 3", "5 -3"   3      "3/4", "\frac{3}{4}" ¾; "1 1/2" 1½
    "7.0", "7 m^2"         7    "5e3", "2.5E-1"    5000, ¼      "3^2", "9**9": powers score 0

A minus that touches a number is its sign, unless it subtracts. Units and percent signs are ignored.
Only ASCII digits and the last 2,000 characters are read; a number of over 40 digits scores 0. No
text is evaluated as code. Judging takes at most a few milliseconds, or 1 s of processor time where
math-verify judges.

data is a JSONL file, or a dataset of the hub as owner/name[/config][:split], whose records have

    gsm8k    question; answer, which ends with "#### 18"           openai/gsm8k/main
    math     problem, question or prompt, which may be a chat; and HuggingFaceH4/MATH-500:test
             answer, reward_model.ground_truth, solution          open-r1/DAPO-Math-17k-Processed/en

Left out: partial credit; 1.000,00 and 1 000. Needs: nothing; for math, tools/judge.py (in tools/ or
beside this file) and math-verify; for the hub, datasets.
"""

import hashlib
import json
import operator
import os
import random
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import accumulate, combinations
from typing import NamedTuple

GSM8K = "{question}\nThink step by step, and end with a line of the form #### <number>."
MATH = "{problem}\nThink step by step, and put the final answer into \\boxed{{}}."

MAX_PAIRS = 1_000_000  # of operands from 0-999, all of which are held in memory
READ, MAX_DIGITS = 2000, 40  # characters of a text, digits of a number
GOLD, DEEP = 500, 8  # at most: characters of a formula, levels of nested brackets

NUMBER = re.compile(
    r"""
    (?P<sign>[-\u2212])? (?:\\?[$€£])?
    (?: (?:(?P<whole>[0-9]+)[ ])? (?P<over>[0-9]+) / (?P<under>[0-9]+) (?![.]?[0-9])
      | (?P<decimal> (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]+) (?:[.][0-9]+)?
                   | (?<![\w.])[.][0-9]+ )
        (?:[eE](?P<exp>[+-]?[0-9]+))? )
    """,
    re.VERBOSE,
)
FRAC = re.compile(r"(?:([0-9]) ?)?\\[dt]?frac\{ ?(-?[0-9]+) ?\}\{ ?([0-9]+) ?\}")
# "####"; if an equation follows, as in "#### 6 * 3 = 18", also all of it up to the result
MARK = re.compile(
    r"####[ \t=:*_`(<\\$]*(?:[-−]?[0-9][0-9.,/]*[ )]*(?:[-+*−×÷x]|/ |\\(?:times|cdot|div))"
    r"(?:[-+*/−×÷x0-9.,$() ]|\\[a-z]+)*=[ $]*)*"
)
HEADING = re.compile(r"[0-9]{1,2}[.)] +[*_]*[^\W\d_]")  # "1. First step" after ####
# a number and its unit, whose exponent is dropped: 540 m^2, 540\text{ m}^2, 9.8 m/s^2, 540 cm2
SQUARE = re.compile(
    r"([0-9](?:[ ~$]|\\[,; ])*(?:\\(?:text|mathrm|mbox)\{[ ~]*)?(?:[a-zA-Z]{1,20}/)?"
    r"(?:[ms]|[a-zA-Z]{2,20}))(?:([.}$]*)\^(?:\{[23]\}|[23])|[23])(?![0-9])"
)
# braces 5 deep
BOXED = re.compile(r"\\boxed *\{(" + r"(?:[^{}]|\{" * 4 + "[^{}]*" + r"\})*" * 4 + r")\}")
# \boxed 2 without braces, as in some solutions of MATH: it ends where its formula ends
BARE = re.compile(r"\\boxed +((?:\\\$|[^ ${])(?:\\\$|[^$])*?) *(?=\$|\\[])]|\\end)")
# a minus after this subtracts
BINARY = re.compile(r"(?:[^\W_]|[)\]}%]|[0-9]\$|[0-9%][ \t]{1,8})\Z")
POWER = re.compile(r"(?:[0-9)]\*\*|[0-9)] \*\* |\^ ?[({]?)\Z")  # a number after this is a power
RAISED = re.compile(r"\^(?!\{?\\circ)|\*\*[0-9(]| \*\* [0-9(]")  # a power; 90^\circ is none
HUB = re.compile(r"(?!.*\.jsonl?\Z)([\w-][\w.-]*/[\w.-]+)(?:/([\w.-]+))?(?::([\w.%:[\]-]+))?")
# instructions around each problem of DAPO: removed, because they ask for another form of answer
DAPO = re.compile(
    r"\ASolve the following math problem[^\n]*\n\n|\n\nRemember to put your answer[^\n]*\Z"
)
# LaTeX that may keep sympy busy for hours: series, integrals, towers of powers or factorials, huge
# exponents
HEAVY = re.compile(
    r"\\(?:sum|prod|i*int|lim|Gamma)(?![a-z])|\^ *(?:\{[^}]*|\w)[\^!]"
    r"|(?:!|[0-9]{6})(?:\\right|[)} ])*!|(?:\^|binom)[{( -]*[0-9]{6}"
    r"|\w *[-+][^()]*\) *\^[{ ]*[0-9]{3}"
)


class Task(NamedTuple):
    train: list[dict]
    held_out: list[dict]  # never trained on
    prompt: Callable[[dict], str | list]  # problem → the user's message, or a chat
    # problem, text, ended? → 1.0 or 0.0
    reward: Callable[[dict, str, bool], float]


def _arithmetic(question, operation, default, data=None, operands=None, held_out=32):
    """All ordered pairs of operands from LOW-HIGH. Exactly held_out pairs are set aside, 3 * 4
    together with 4 * 3. ValueError: operands not LOW-HIGH; under 2·held_out problems, or over
    MAX_PAIRS; data given.
    """
    if data:
        raise ValueError(
            f"{data}: the arithmetic tasks make their own problems: leave out --data and --test"
        )
    match = re.fullmatch("([0-9]{1,9})-([0-9]{1,9})", operands or default)
    if not match or int(match[1]) > int(match[2]):
        raise ValueError(
            f"--operands {operands} must be LOW-HIGH with LOW <= HIGH, for example 2-12"
        )
    low, high = map(int, match.groups())
    n = high - low + 1
    if not 2 * held_out <= n * n <= MAX_PAIRS:
        raise ValueError(
            f"--operands {low}-{high} makes {n * n} problems, not {2 * held_out} to {MAX_PAIRS}"
        )
    # not --seed: every run holds out the same pairs
    rng, values = random.Random(0), range(low, high + 1)
    # a * a is 1 pair in n, and so of those held out; odd or even like held_out, as other pairs come
    # in twos
    squares = 2 * round(held_out / n / 2) + held_out % 2
    held = [(a, a) for a in rng.sample(values, squares)]
    for a, b in rng.sample(list(combinations(values, 2)), (held_out - squares) // 2):
        held += [(a, b), (b, a)]
    rng.shuffle(held)
    kept_apart = set(held)
    return Task(
        [{"a": a, "b": b} for a in values for b in values if (a, b) not in kept_apart],
        [{"a": a, "b": b} for a, b in held],
        question.format_map,
        lambda p, text, finished: float(
            finished and last_number(text) == operation(p["a"], p["b"])
        ),
    )


def gsm8k(data=None, operands=None, held_out=256):
    """Word problems. ValueError: no data, or a line that cannot be read; under 4 problems; operands
    given.
    """
    return split_problems(
        read(data, _word_problem), held_out, data, operands, gsm8k_reward, GSM8K.format_map
    )


def gsm8k_reward(problem, text, finished):
    return float(bool(finished) and final_answer(text) == final_answer(problem["answer"]))


def _word_problem(record):
    problem = {key: _text(record, key) for key in ("question", "answer")}
    marked = _marked(_tail(problem["answer"]))
    if not marked or _value(marked) is None:
        raise ValueError("its answer must end with '#### number'; --task math takes a plain answer")
    rest = marked.string[marked.end() :].partition("\n")[0]
    if re.search(r"\A *[!^²³]|[0-9]", re.sub(r"\(.*?\)", "", rest)):
        raise ValueError(
            f"its answer {marked[0] + rest!r} is read as {marked[0]}: write one plain number"
        )
    return problem


def math(data=None, operands=None, held_out=256):
    """Problems, or chats' user messages, with an answer in LaTeX. ValueError: as gsm8k; no
    math-verify.
    """
    equal("1", "1")
    return split_problems(
        read(data, _latex_problem), held_out, data, operands, math_reward, MATH.format_map
    )


def _latex_problem(record):
    if isinstance(record.get("prompt"), list):  # a chat
        *before, last = [m if isinstance(m, dict) else {} for m in record["prompt"]] or [{}]
        if last.get("role") != "user" or any(m.get("role") != "system" for m in before):
            raise ValueError("a chat must be one message of the user, behind those of the system")
        record = record | {"prompt": last.get("content")}
    if isinstance(record.get("reward_model"), dict):
        record = record | {"reward_model": record["reward_model"].get("ground_truth")}
    answer = BARE.sub(r"\\boxed{\1}", _text(record, "answer", "reward_model", "solution"))
    gold = (BOXED.findall(answer) or [answer.rpartition("####")[2]])[-1].strip()
    if not 0 < len(gold) <= GOLD:
        raise ValueError(
            f"its answer must be short (1 to {GOLD} characters) or stand in \\boxed{{…}}"
        )
    return {"problem": DAPO.sub("", _text(record, "problem", "question", "prompt")), "answer": gold}


def math_reward(problem, text, finished):
    gold, answer = problem["answer"], (BOXED.findall(text[-READ:]) or [""])[-1].rstrip(" .")
    depths = accumulate((c in "([{") - (c in ")]}") for c in answer)
    heavy = HEAVY.search(answer) and not HEAVY.search(gold)
    if not finished or not 0 < len(answer) <= GOLD or max(depths) > DEEP or heavy:
        return 0.0
    return float(equal(gold, answer))


def equal(gold, answer):
    """→ math-verify's verdict on two texts in LaTeX. ValueError: no judge.py, or no math-verify."""
    try:
        from tools import judge
    except ImportError:
        try:
            import judge  # this file was copied, and the judge with it
        except ImportError:
            raise ValueError(
                "task math needs the file tools/judge.py: copy it beside tasks.py"
            ) from None
    return judge.equal(gold, answer)


def with_test_set(name, test, data=None, operands=None, trains=True):
    """The task called name, which holds out all problems of test and trains on all others of data.
    trains=False without data reads only test. ValueError: what the task raises; test holds all of
    data.
    """
    given = TASKS[name](data, operands) if trains or data else None
    task = TASKS[name](test, operands, held_out=0)
    asked = set(map(task.prompt, task.train))
    train = []
    if given:
        train = [p for p in given.train + given.held_out if task.prompt(p) not in asked]
        if not train:
            raise ValueError(
                f"every problem of --data {data} is in --test {test}: none is left to train on"
            )
    return task._replace(train=train, held_out=task.train)


def split_problems(problems, held_out, source, operands, reward, prompt):
    """→ the Task. Problems with the same message are one. held_out problems, at most a quarter, are
    set aside: those with the smallest hashes, so that a line edited or deleted moves at most one
    other problem.
    """
    if operands:
        raise ValueError(
            f"--operands {operands} has no meaning beside problems from {source}: leave it out"
        )
    found = {str(prompt(problem)): problem for problem in problems}
    if len(found) < (4 if held_out else 1):
        raise ValueError(
            f"{source} has {len(found)} problems, too few: it takes 4, or 1 to test on"
        )
    order = sorted(found, key=lambda message: hashlib.sha256(message.encode()).digest())
    held = set(order[: min(held_out, len(found) // 4)])
    return Task(
        [problem for message, problem in found.items() if message not in held],
        [problem for message, problem in found.items() if message in held],
        prompt,
        reward,
    )


def read(source, check):
    """check(record) of each non-blank line, a JSON object. ValueError: file, line and reason."""
    problems, number, hub = [], 0, HUB.fullmatch(str(source))
    give = "FILE.jsonl, or, after pip install datasets, owner/name[/config][:split] of the hub"
    if not source:
        raise ValueError(f"this task needs problems: give --data {give}")
    try:
        if hub and not os.path.exists(source):
            from datasets import load_dataset

            rows = load_dataset(hub[1], hub[2], split=hub[3] or "train")
            lines = (json.dumps(row, default=str) for row in rows)
        else:
            lines = open(source, "rb")
        for line in lines:
            number += 1
            if line.strip():
                problems.append(check({**json.loads(line)}))  # TypeError for an array
    except Exception as error:  # datasets raises a dozen kinds
        if number:
            mend = dict.fromkeys(
                (json.JSONDecodeError, TypeError), "; write one JSON object a line"
            )
            mend[UnicodeDecodeError] = "; save it as UTF-8"
            raise ValueError(
                f"{source}, line {number}: {error}{mend.get(type(error), '')}"
            ) from None
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise ValueError(f"{source} cannot be read ({reason}): give {give}") from None
    return problems


def _text(record, *keys):
    for value in map(record.get, keys):
        # no NaN
        text = str(value).strip() if type(value) in (str, int, float) and value == value else ""
        text.encode()  # raises on half an emoji, which JSON allows, no tokenizer
        if text:
            return text
    raise ValueError(f"it must be an object in which {' or '.join(map(repr, keys))} is some text")


# --- numbers and boxes in text
def last_number(text):
    """The last number in the text, a Fraction; None without one, or if it is a power or too
    long.
    """
    found = list(NUMBER.finditer(_tail(text)))
    return _value(found[-1]) if found else None


def final_answer(text):
    r"""The number after the last ####, else in the last \boxed{…}, else in the text: a Fraction or
    None.
    """
    tail = _tail(text)
    if marked := _marked(tail):
        return _value(marked)
    boxed = BOXED.findall(tail)
    return last_number(boxed[-1] if boxed and NUMBER.search(boxed[-1]) else text)


def _tail(text):
    """The end of a text; fractions and thousands in LaTeX become plain numbers, units lose their
    exponent.
    """
    tail = text[-READ:].lstrip("0123456789.,/" if len(text) > READ else "")  # a number cut in two
    tail = re.sub(r"(\\[dt]?frac) ?([0-9])([0-9])", r"\1{\2}{\3}", tail)
    tail = FRAC.sub(
        lambda m: f"{m[1] + ' ' if m[1] else ''}{m[2]}/{m[3]}", tail.replace("{,}", ",")
    )
    return SQUARE.sub(r"\1\2", tail)


def _marked(text):
    """The match of the number after the last #### that a number follows; None without one."""
    found = [
        NUMBER.match(text, mark.end())
        for mark in MARK.finditer(text)
        if not HEADING.match(text, mark.end())
    ]
    return next((number for number in reversed(found) if number), None)


def _value(number):
    """The match as a Fraction; None for a power, a division by zero, or too many digits."""
    before = number.string[max(0, number.start() - 9) : number.start()]
    exp = number["exp"] or "0"
    if sum(map(str.isdigit, number[0])) > MAX_DIGITS or abs(int(exp)) > MAX_DIGITS:
        return None
    if (
        POWER.search(before)
        or RAISED.match(number.string, number.end())
        or int(number["under"] or 1) == 0
    ):
        return None
    if number["decimal"]:
        value = Fraction(f"{number['decimal'].replace(',', '')}e{exp}")
    else:
        value = Fraction(int(number["over"]), int(number["under"]))
        if number["whole"] and value >= 1:
            return value  # "5 48/2" is two numbers, "1 1/2" is one
        value += int(number["whole"] or 0)
    return -value if number["sign"] and not BINARY.search(before) else value


TASKS = {
    "multiplication": partial(_arithmetic, "What is {a} * {b}?", operator.mul, "2-12"),
    "addition": partial(_arithmetic, "What is {a} + {b}?", operator.add, "0-99"),
    "gsm8k": gsm8k,
    "math": math,
}

if __name__ == "__main__":
    example = {"question": "A pen costs $3. What do 6 pens cost?", "answer": "6 * 3 = 18\n#### 18"}
    for text in (
        "#### 18",
        r"\boxed{18}",
        "It is $18.00.",
        "#### 17, or 18",
        "-18",
        "2 * 3**2",
        "18 or 20",
    ):
        print(f"    {gsm8k_reward(example, text, True)}  {text}")
