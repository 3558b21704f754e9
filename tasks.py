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

tools/own_task.py makes a Task of a Python file of the user's.

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

MAX_PAIRS = 1_000_000  # of operands: all pairs of 0-999 are held in memory
MAX_TEXT = 2000  # characters at the end of an answer, which alone are read
MAX_DIGITS = 40  # of a number, and its largest exponent
MAX_FORMULA = 500  # characters of a formula in LaTeX
MAX_DEPTH = 8  # levels of nested brackets in a formula

# One number: a sign, a currency, then a fraction (3/4, or 1 1/2 with a whole part) or a decimal
# (1,000.5, or .5 unless a word or a point precedes) with an exponent (5e3).
NUMBER = re.compile(
    r"""
    (?P<sign>[-\u2212])? (?:\\?[$€£])?
    (?: (?:(?P<whole>[0-9]+)[ ])? (?P<numerator>[0-9]+) / (?P<denominator>[0-9]+) (?![.]?[0-9])
      | (?P<decimal> (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]+) (?:[.][0-9]+)?
                   | (?<![\w.])[.][0-9]+ )
        (?:[eE](?P<exponent>[+-]?[0-9]+))? )
    """,
    re.VERBOSE,
)
# A fraction in LaTeX, \frac{3}{4}, which a whole part of one digit may precede.
FRACTION = re.compile(r"(?:([0-9]) ?)?\\[dt]?frac\{ ?(-?[0-9]+) ?\}\{ ?([0-9]+) ?\}")
# The mark "####". If an equation follows, as in "#### 6 * 3 = 18", the match includes all of it up
# to the result.
MARK = re.compile(
    r"####[ \t=:*_`(<\\$]*(?:[-−]?[0-9][0-9.,/]*[ )]*(?:[-+*−×÷x]|/ |\\(?:times|cdot|div))"
    r"(?:[-+*/−×÷x0-9.,$() ]|\\[a-z]+)*=[ $]*)*"
)
# "1. First step" after the mark: a heading, which answers nothing.
HEADING = re.compile(r"[0-9]{1,2}[.)] +[*_]*[^\W\d_]")
# A number and its unit with an exponent, which is no power of the number and is removed:
# 540 m^2, 540\text{ m}^2, 9.8 m/s^2, 540 cm2.
UNIT_EXPONENT = re.compile(
    r"([0-9](?:[ ~$]|\\[,; ])*(?:\\(?:text|mathrm|mbox)\{[ ~]*)?(?:[a-zA-Z]{1,20}/)?"
    r"(?:[ms]|[a-zA-Z]{2,20}))(?:([.}$]*)\^(?:\{[23]\}|[23])|[23])(?![0-9])"
)
# \boxed{…} with braces up to 5 deep, those of the box included.
BOXED = re.compile(r"\\boxed *\{(" + r"(?:[^{}]|\{" * 4 + "[^{}]*" + r"\})*" * 4 + r")\}")
# \boxed 2 without braces, as in some solutions of MATH: the box ends where its formula ends.
BARE_BOX = re.compile(r"\\boxed +((?:\\\$|[^ ${])(?:\\\$|[^$])*?) *(?=\$|\\[])]|\\end)")
# The end of a text after which a minus subtracts: a word, a closing bracket, a number.
MINUEND = re.compile(r"(?:[^\W_]|[)\]}%]|[0-9]\$|[0-9%][ \t]{1,8})\Z")
# The end of a text after which a number is an exponent: 2**, 2 ** or x^.
BASE = re.compile(r"(?:[0-9)]\*\*|[0-9)] \*\* |\^ ?[({]?)\Z")
# What makes the number before it the base of a power. 90^\circ is 90 degrees.
RAISED = re.compile(r"\^(?!\{?\\circ)|\*\*[0-9(]| \*\* [0-9(]")
# owner/name[/config][:split], a dataset of the hub. What ends with .json or .jsonl is a file.
HUB = re.compile(r"(?!.*\.jsonl?\Z)([\w-][\w.-]*/[\w.-]+)(?:/([\w.-]+))?(?::([\w.%:[\]-]+))?")
# The instructions around each problem of DAPO. They ask for another form of answer than
# the template MATH does.
DAPO = re.compile(
    r"\ASolve the following math problem[^\n]*\n\n|\n\nRemember to put your answer[^\n]*\Z"
)
# LaTeX that may keep sympy busy for hours: series, integrals, towers of powers or factorials, huge
# exponents.
HEAVY = re.compile(
    r"\\(?:sum|prod|i*int|lim|Gamma)(?![a-z])|\^ *(?:\{[^}]*|\w)[\^!]"
    r"|(?:!|[0-9]{6})(?:\\right|[)} ])*!|(?:\^|binom)[{( -]*[0-9]{6}"
    r"|\w *[-+][^()]*\) *\^[{ ]*[0-9]{3}"
)


class Task(NamedTuple):
    """Problems and how to ask and judge them."""

    train: list[dict]
    held_out: list[dict]  # never trained on
    prompt: Callable[[dict], str | list]  # problem → the user's message, or a chat
    # (problem, text of the answer, did the model end it?) → 1.0 or 0.0
    reward: Callable[[dict, str, bool], float]


# --- the tasks


def _arithmetic(question, operation, default, data=None, operands=None, held_out=32):
    """→ the Task of all ordered pairs of operands from LOW-HIGH.

    Exactly held_out pairs are held out. ValueError: operands are not LOW-HIGH, or make under
    2·held_out or over MAX_PAIRS problems; data is given.
    """
    if data:
        raise ValueError(
            f"{data}: the arithmetic tasks make their own problems: leave out --data and --test"
        )
    match = re.fullmatch("([0-9]{1,9})-([0-9]{1,9})", operands or default)
    values = range(int(match[1]), int(match[2]) + 1) if match else ()
    if not values:  # no match, or LOW > HIGH
        raise ValueError(
            f"--operands {operands} must be LOW-HIGH with LOW <= HIGH, for example 2-12"
        )
    count = len(values) ** 2
    if not 2 * held_out <= count <= MAX_PAIRS:
        raise ValueError(
            f"--operands {values[0]}-{values[-1]} makes {count} problems, "
            f"not {2 * held_out} to {MAX_PAIRS}"
        )
    held = _draw_pairs(values, held_out)
    held_set = set(held)

    def reward(problem, text, finished):
        result = operation(problem["a"], problem["b"])
        return float(finished and last_number(text) == result)

    return Task(
        [{"a": a, "b": b} for a in values for b in values if (a, b) not in held_set],
        [{"a": a, "b": b} for a, b in held],
        question.format_map,
        reward,
    )


def _draw_pairs(values, count):
    """→ a list of count random ordered pairs of values. It has (4, 3) if it has (3, 4), because a
    model that was trained on one of them knows the other.
    """
    rng = random.Random(0)  # not --seed: every run holds out the same pairs
    # Of all pairs, the share 1/len(values) are squares (a, a). Draw the same share of squares,
    # rounded such that an even number of pairs remains, because those are drawn in twos.
    squares = 2 * round(count / len(values) / 2) + count % 2
    pairs = [(a, a) for a in rng.sample(values, squares)]
    unordered = list(combinations(values, 2))
    for a, b in rng.sample(unordered, (count - squares) // 2):
        pairs += [(a, b), (b, a)]
    rng.shuffle(pairs)
    return pairs


def gsm8k(data=None, operands=None, held_out=256):
    """→ the Task of word problems whose answers are numbers.

    ValueError: no data, or a line that cannot be read; under 4 problems; operands are given.
    """
    problems = read(data, _word_problem)
    return split_problems(problems, held_out, data, operands, gsm8k_reward, GSM8K.format_map)


def gsm8k_reward(problem, text, finished):
    """→ 1.0 if text and solution have the same final answer, and the text is finished; else 0.0."""
    return float(finished and final_answer(text) == final_answer(problem["answer"]))


def _word_problem(record):
    """→ the problem of a line of the data. ValueError: it has no single number as its answer."""
    problem = {key: _text(record, key) for key in ("question", "answer")}
    number = _marked_number(_plain_end(problem["answer"]))
    if not number or _value(number) is None:
        raise ValueError("its answer must end with '#### number'; --task math takes a plain answer")
    # After the number only a unit may follow, and a remark in parentheses. Further digits, as in
    # "1 000", would mean that the number was read in part, and a wrong answer would be rewarded.
    rest = number.string[number.end() :].partition("\n")[0]
    if re.search(r"\A *[!^²³]|[0-9]", re.sub(r"\(.*?\)", "", rest)):
        raise ValueError(
            f"its answer {number[0] + rest!r} is read as {number[0]}: write one plain number"
        )
    return problem


def math(data=None, operands=None, held_out=256):
    """→ the Task of problems, or chats' user messages, whose answers are formulas in LaTeX.

    ValueError: as gsm8k; math-verify does not run.
    """
    equal("1", "1")  # starts the judge: without math-verify, raise now and not in the first step
    problems = read(data, _latex_problem)
    return split_problems(problems, held_out, data, operands, math_reward, MATH.format_map)


def math_reward(problem, text, finished):
    r"""→ 1.0 if the formula in the last \boxed{…} equals the solution, and the text is finished;
    else 0.0. A formula that could keep sympy busy for hours scores 0 without being computed, unless
    the solution is such a formula, too.
    """
    gold = problem["answer"]
    answer = _last_box(text[-MAX_TEXT:]).rstrip(" .")
    if not finished or not 0 < len(answer) <= MAX_FORMULA:
        return 0.0
    steps = [(c in "([{") - (c in ")]}") for c in answer]  # 1 down, -1 up, 0 at other characters
    if max(accumulate(steps)) > MAX_DEPTH:
        return 0.0
    if HEAVY.search(answer) and not HEAVY.search(gold):
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


def _latex_problem(record):
    """→ the problem of a line of the data. The record is changed.

    ValueError: a field is missing; a long answer without a box; a chat of several turns.
    """
    if isinstance(record.get("prompt"), list):
        record["prompt"] = _user_message(record["prompt"])
    if isinstance(record.get("reward_model"), dict):
        record["reward_model"] = record["reward_model"].get("ground_truth")
    answer = BARE_BOX.sub(r"\\boxed{\1}", _text(record, "answer", "reward_model", "solution"))
    gold = _last_box(answer, default=answer.rpartition("####")[2]).strip()
    if not 0 < len(gold) <= MAX_FORMULA:
        raise ValueError(
            f"its answer must be short (1 to {MAX_FORMULA} characters) or stand in \\boxed{{…}}"
        )
    question = _text(record, "problem", "question", "prompt")
    return {"problem": DAPO.sub("", question), "answer": gold}


def _user_message(chat):
    """→ the content of a chat's only message of the user. Messages of the system in front of it are
    dropped. ValueError: the chat has other messages.
    """
    roles = [message.get("role") if isinstance(message, dict) else None for message in chat]
    if roles != ["system"] * (len(chat) - 1) + ["user"]:
        raise ValueError("a chat must be one message of the user, behind those of the system")
    return chat[-1].get("content")


# --- problems from files

# kind of error in a line → the end of its message
REMEDIES = {
    json.JSONDecodeError: "; write one JSON object a line",
    TypeError: "; write one JSON object a line",
    UnicodeDecodeError: "; save it as UTF-8",
}


def read(source, check):
    """→ a list: check(record) of each line of source that is not blank.

    check raises ValueError for a record that it refuses. ValueError: file, line and reason.
    """
    give = "FILE.jsonl, or, after pip install datasets, owner/name[/config][:split] of the hub"
    if not source:
        raise ValueError(f"this task needs problems: give --data {give}")
    problems = []
    number = 0
    try:
        for line in _lines(source):
            number += 1
            if line.strip():
                record = {**json.loads(line)}  # TypeError for an array
                problems.append(check(record))
    except Exception as error:  # the library datasets raises a dozen types of errors
        if number:
            remedy = REMEDIES.get(type(error), "")
            raise ValueError(f"{source}, line {number}: {error}{remedy}") from None
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise ValueError(f"{source} cannot be read ({reason}): give {give}") from None
    return problems


def _lines(source):
    """→ an iterable of the lines of a file, or of the records of a dataset of the hub, as JSON."""
    hub = HUB.fullmatch(str(source))
    if hub and not os.path.exists(source):
        from datasets import load_dataset

        name, config, split = hub.groups()
        rows = load_dataset(name, config, split=split or "train")
        return (json.dumps(row, default=str) for row in rows)
    return open(source, "rb")


def _text(record, *keys):
    """→ the first of these fields of the record that has text or a number, as text. ValueError:
    none has.
    """
    for key in keys:
        value = record.get(key)
        if type(value) in (str, int, float) and value == value:  # NaN does not equal itself
            text = str(value).strip()
            text.encode()  # raises on half an emoji, which JSON allows, no tokenizer
            if text:
                return text
    raise ValueError(f"it must be an object in which {' or '.join(map(repr, keys))} is some text")


def split_problems(problems, held_out, source, operands, reward, prompt):
    """→ the Task of problems from source, the name of a file or dataset in messages.

    Problems with the same prompt are one. held_out problems, at most a quarter, are held out: those
    whose prompts have the smallest hashes. So the split needs no seed, and a line that the user
    edits or deletes moves at most one other problem between train and held_out.
    ValueError: operands are given; under 4 problems, or with held_out=0 none.
    """
    if operands:
        raise ValueError(
            f"--operands {operands} has no meaning beside problems from {source}: leave it out"
        )
    by_prompt = {str(prompt(problem)): problem for problem in problems}
    if len(by_prompt) < (4 if held_out else 1):
        raise ValueError(
            f"{source} has {len(by_prompt)} problems, too few: it takes 4, or 1 to test on"
        )
    order = sorted(by_prompt, key=lambda text: hashlib.sha256(text.encode()).digest())
    held = set(order[: min(held_out, len(order) // 4)])
    return Task(
        [by_prompt[text] for text in by_prompt if text not in held],
        [by_prompt[text] for text in by_prompt if text in held],
        prompt,
        reward,
    )


def with_test_set(name, test, data=None, operands=None, trains=True):
    """→ the Task called name that holds out all problems of test, and trains on the rest of data.

    trains=False without data reads only test. ValueError: what the task raises; all problems of
    data are in test.
    """
    given = TASKS[name](data, operands) if trains or data else None
    task = TASKS[name](test, operands, held_out=0)
    train = []
    if given:
        asked = set(map(task.prompt, task.train))
        train = [p for p in given.train + given.held_out if task.prompt(p) not in asked]
        if not train:
            raise ValueError(
                f"every problem of --data {data} is in --test {test}: none is left to train on"
            )
    return task._replace(train=train, held_out=task.train)


# --- numbers and boxes in text


def last_number(text):
    """→ the last number in the text, a Fraction. None: it has none; a power; too many digits."""
    found = list(NUMBER.finditer(_plain_end(text)))
    return _value(found[-1]) if found else None


def final_answer(text):
    r"""→ the number after the last ####, else in the last \boxed{…}, else in the text: a Fraction
    or None.
    """
    end = _plain_end(text)
    marked = _marked_number(end)
    if marked:
        return _value(marked)
    box = _last_box(end)
    return last_number(box if NUMBER.search(box) else text)


def _plain_end(text):
    """→ the end of a text, in which fractions and thousands in LaTeX are plain numbers and units
    have no exponent.
    """
    end = text[-MAX_TEXT:]
    if len(text) > MAX_TEXT:
        end = end.lstrip("0123456789.,/")  # the rest of a number that was cut in two
    end = re.sub(r"(\\[dt]?frac) ?([0-9])([0-9])", r"\1{\2}{\3}", end)  # \frac12
    end = end.replace("{,}", ",")  # 1{,}000
    end = FRACTION.sub(lambda m: f"{m[1] or ''} {m[2]}/{m[3]}".lstrip(), end)
    return UNIT_EXPONENT.sub(r"\1\2", end)


def _last_box(text, default=""):
    r"""→ what is inside the last \boxed{…}; default without one."""
    boxes = BOXED.findall(text)
    return boxes[-1] if boxes else default


def _marked_number(text):
    """→ the match of the number after the last #### that a number follows; None without one."""
    number = None
    for mark in MARK.finditer(text):
        if not HEADING.match(text, mark.end()):
            number = NUMBER.match(text, mark.end()) or number
    return number


def _value(number):
    """→ the match as a Fraction. None: a power; a division by zero; too many digits."""
    start, end = number.span()
    before = number.string[max(0, start - 9) : start]  # 9: all that MINUEND looks at
    exponent = int(number["exponent"] or 0)
    if sum(map(str.isdigit, number[0])) > MAX_DIGITS or abs(exponent) > MAX_DIGITS:
        return None
    denominator = int(number["denominator"] or 1)
    if denominator == 0 or BASE.search(before) or RAISED.match(number.string, end):
        return None
    if number["decimal"]:
        mantissa = number["decimal"].replace(",", "")
        value = Fraction(f"{mantissa}e{exponent}")
    else:
        value = Fraction(int(number["numerator"]), denominator)
        if number["whole"] and value >= 1:
            return value  # "5 48/2" is two numbers, "1 1/2" is one
        value += int(number["whole"] or 0)
    negative = number["sign"] and not MINUEND.search(before)
    return -value if negative else value


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
