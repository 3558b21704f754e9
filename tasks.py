r"""Tasks: problems, a prompt for each, and a reward that a program can verify: 1 if right, else 0.

    task = TASKS["multiplication"]()       # addition; with data: gsm8k, math
    task.train, task.held_out              # lists of problems, each a dict
    task.prompt(problem)                   # "What is 7 * 8?", the user's message, no chat template
    task.reward(problem, text, finished)   # 1.0 or 0.0

An answer scores 1 if the model ended it (finished) and if it is right:

    multiplication, addition    the last number in the text equals the result exactly
    gsm8k                       the answer's number equals the solution's. That number is in the
                                line behind the last "####": the text that follows on the same
                                line or, if that has no digit, the next line that is not empty.
                                Without "####" it is in the last \boxed{…}. In both places it is
                                the first number, behind the last "=" if there is one. Without
                                either, it is the last number in the text
    math                        math-verify finds the last \boxed{…} equal to the solution

    "7 * 8 = 56."         56    "-7", "−$7", "- 7"      −7      "1,000" is 1000; "3/4", "\frac34" ¾
    "$56", "56%", "56kg"  56    "7.0", "7 m^2", "**7**"  7      "1 1/2", "5e3", "5E-1"  1½ 5000 ½

A number that is only a part of an expression, or is spelled in another notation, is no answer and
scores 0, because reading the part alone would reward a wrong answer: 18², 2^18, √18, 18!, 18 * 2,
5 apples + 3 apples, 10–18, 5k, 5 million, 18,5, 1'000, 1 000, 0x12. Only ASCII digits are read, at
most 40 before the point and 40 behind it, or 20 in each part of a fraction. No text is evaluated as
code. Judging takes a few milliseconds, or at most 1 s of processor time for each comparison that
math-verify makes.

math-verify leaves out some parts of a formula, so tasks.py decides about these. If either text has
a base (52_8), dots, \prime, a ' behind a digit, ) or }, a negation (\neg, \not) or a word such as
"million", the whole texts must be the same, but for blanks, braces, \left, \right and \text. If the
solution has no %, 5\% is 1/20. (1, 2) is not {1, 2}. Of 5 = 6, both sides must be right.

data is a JSONL file, or a dataset of the hub as owner/name[/config][:split], whose records have

    gsm8k    question; answer, which ends with "#### 18"           openai/gsm8k/main
    math     problem, question or prompt, which may be a chat; and HuggingFaceH4/MATH-500:test
             answer, reward_model.ground_truth, solution          open-r1/DAPO-Math-17k-Processed/en

Questions that differ only in case, or in how many blanks separate their words, are one problem.
read() refuses a gold that nobody could answer, prose or two numbers, and names its line. hold_out()
refuses two answers to one question, and quotes the beginning of the prompt.

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
from itertools import combinations, starmap
from typing import NamedTuple

GSM8K = "{question}\nThink step by step, and end with a line of the form #### <number>."
MATH = "{problem}\nThink step by step, and put the final answer into \\boxed{{}}."

MAX_PAIRS = 1_000_000  # of operands: all pairs of 0-999 are held in memory
MAX_FORMULA = 500  # characters of a formula in LaTeX

# What LaTeX stands for in plain text, replaced in this order. An operator becomes ×; a root, a
# logarithm or a trigonometric function becomes √.
PLAIN = (
    (r"\\[dt]?frac *([0-9]) *([0-9])", r"\\frac{\1}{\2}"),
    (r"([0-9]?) ?\\[dt]?frac *\{ *(-?[0-9]+) *\} *\{ *([0-9]+) *\}", r"\1 \2/\3"),
    (r"\{,\}", ","),
    (r"\\(?:times|cdot|div|pm)(?![a-z])", " × "),
    (r"\\(?:sqrt|log|ln|sin|cos|tan)(?:\[[^]]{0,9}\])?[ ({]*", "√"),
    (r"\^ *\{? *\\circ *\}?", "°"),
    (r"\\(?:text|textbf|mathrm|mathbf|mbox|left|right) *|\\(?=[$%#])|[{}]", ""),
    (r"\\[,;:! ]", " "),
    (r"\\(?:boxed|[\\()[\]])", "|"),
    # the exponent of a unit, which does not change the number before it: 540 m^2, 540 cm3, m²
    (r"(?<![A-Za-z])([ms]|[A-Za-z]{2,20})([$.]?)(?:\^?[23]|[²³])(?![0-9])", r"\1\2"),
)
# A word; and a word that is a number: 18, -$1,000.50, 3/4, 1 1/2, 5e3. It may have a unit (18kg,
# 18th, 5%), emphasis (**18**), another word in front of it (total:18, COVID-19) and punctuation.
WORD = re.compile(r"[-–−$]*[0-9]+ [0-9]+/[^\s)]+|[^\s=<>≈~()\[\]|;“”&→—]+")
NUMBER = re.compile(
    r"(?:[^\W\d_]+[:.…-]+)?[*_`'\"#]*[-–−+]?(?:[A-Z]*[$€£¥₹])?[-–−]?"
    r"(?P<value>(?:[0-9]{1,20} )?[0-9]{1,20}/0*[1-9][0-9]{0,19}"
    r"|(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,12}|[0-9]{1,40})(?:\.[0-9]{1,40})?"
    r"(?:[eE][+-]?[0-9]{1,2})?"
    r"|\.[0-9]{1,40})"
    r"(?P<unit>[%°$€£¥₹]*[^\W\d_]*(?:[-/–][^\W\d_]+)*)[*_`'\".,:?…$]*"
)
# What changes the number before it: 5 million, 5k; 18 000; 18 * 2, 5 apples + 3 apples.
MULTIPLE = (
    r"[kKMBπ]|[bm]n|mil|pi|(?i:(?:hundred|thousand|[mbtr]+illion|lakh|crore)s?|squared|cubed)"
)
OPERATOR = r"(?:\s+[^\W\d_]+){0,3}(?:\s*[-–−+*×x·/÷^±]+\s*|\s+(?:plus|minus|times)\s+)"
BEHIND = re.compile(
    rf"[\s-]*(?:{MULTIPLE})(?![^\W\d_])|\s+[\d²³½¼¾]|\(\d+\)|\s+[-–−+*×·/÷^±]+\s+\(\d"
    rf"|[\w%°$)]*{OPERATOR}\$?\d"
)
# What changes the number behind it: 18 000; 2 * 18; sqrt(18); √18.
BEFORE = re.compile(rf"(?:\d\s+|[\d)%][^\W\d_]*{OPERATOR}[$(]*|[\w^]\(|√\s*)\Z")
MINUS = re.compile(r"(?<!\w)[-–−][\s$€£¥₹]*\Z")
# \boxed{…} with braces up to 5 deep, those of the box included; or, as in some solutions of MATH,
# \boxed 2 without braces: a number, or what ends where its formula ends.
BOX = re.compile(
    r"\\(?:boxed|fbox) *(?:\{(" + r"(?:[^{}]|\{" * 4 + "[^{}]*" + r"\})*" * 4 + r")\}"
    r"|(-?[0-9][0-9.,/]*(?<=[0-9])(?![^\s.,$\\])"
    r"|(?:\\\$|[^ ${])(?:\\\$|[^$\n])*?(?= *(?:\$|\\[])]|\\end|\n|\Z))))"
)
# owner/name[/config][:split], a dataset of the hub. What ends with .json or .jsonl is a file.
HUB = re.compile(r"(?!.*\.jsonl?\Z)([\w-][\w.-]*/[\w.-]+)(?:/([\w.-]+))?(?::([\w.%:[\]-]+))?")
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
TUPLE = re.compile(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]")
EQUATION = re.compile(r"=|\\(?:approx|to|implies|[a-zA-Z]*arrow)(?![a-z])")
# signs that math-verify does not read, each with LaTeX for it
SIGNS = r"½ \frac12 ⅓ \frac13 ⅔ \frac23 ¼ \frac14 ¾ \frac34 ² ^2 ³ ^3 · \cdot ∞ \infty ° ^\circ – -"


class Task(NamedTuple):
    """Problems and how to ask and judge them."""

    train: list[dict]
    held_out: list[dict]  # never trained on
    prompt: Callable[[dict], str | list]  # problem → the user's message, or a chat
    # (problem, text of the answer, did the model end it?) → 1.0 or 0.0; tools/own_task.py: a float
    reward: Callable[[dict, str, bool], float]


# --- the tasks


def _arithmetic(question, operation, default, data=None, operands=None, held_out=32):
    """→ the Task of all ordered pairs of operands from LOW-HIGH.

    Exactly held_out pairs are held out. ValueError: operands are not LOW-HIGH, or make under
    2·held_out or over MAX_PAIRS problems; data is given.
    """
    if data:
        raise ValueError(f"{data}: this task makes its own problems: leave out --data and --test")
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

    data: a JSONL file, or a dataset of the hub. held_out: how many problems to hold out, at most a
    quarter of all. ValueError: no data, or a line that cannot be read; under 4 problems, or with
    held_out 0 none; two answers to one question; operands are given.
    """
    task = Task(read(data, _word_problem), [], GSM8K.format_map, gsm8k_reward)
    return hold_out(task, held_out, data, operands, lambda p: final_answer(p["answer"]))


def gsm8k_reward(problem, text, finished):
    """→ 1.0 if text and solution have the same final answer, and the text is finished; else 0.0."""
    return float(finished and final_answer(text) == final_answer(problem["answer"]))


def _word_problem(record):
    """→ the problem of a line of the data. ValueError: it has no single number as its answer."""
    problem = {key: _text(record, key) for key in ("question", "answer")}
    _, mark, end = problem["answer"].rpartition("####")
    line = re.sub(r"\(.*?\)", "", end.partition("\n")[0])
    number = final_answer(mark + line)
    # behind the number only a remark in parentheses may have digits: "17 or 18" is no answer
    if not mark or number is None or number != last_number(line.rpartition("=")[2]):
        raise ValueError(
            "its answer must end with '#### number', one plain number, "
            f"not with {line[:60]!r}; --task math takes other answers"
        )
    return problem


def math(data=None, operands=None, held_out=256):
    """→ the Task of problems, or chats' messages, whose answers are formulas in LaTeX.

    ValueError: as gsm8k; math-verify does not run.
    """
    equal("1", "1")  # starts the judge: without math-verify, raise now and not in the first step
    task = Task(read(data, _latex_problem), [], MATH.format_map, math_reward)
    return hold_out(task, held_out, data, operands, operator.itemgetter("answer"))


def math_reward(problem, text, finished):
    r"""→ 1.0 if the formula in the last \boxed{…} equals the solution, and the text is finished;
    else 0.0.
    """
    answer = _last_box(text).rstrip(" .")
    return float(finished and _same_formula(problem["answer"], answer))


def _same_formula(gold, answer):
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


def _rewrite(formula):
    r"""→ a formula with LaTeX for signs that math-verify does not read: √3, ½, 0.\overline{3}."""
    signs = SIGNS.split()
    for sign, latex in zip(signs[::2], signs[1::2], strict=True):
        formula = formula.replace(sign, f"{latex} ")
    formula = re.sub(r"√ *([0-9.]+|\w)", r"\\sqrt{\1}", formula)
    formula = re.sub(r"\\?%|(\\text\{)? *percent\b\}?", r"\\%", formula)
    # 20 times the period: math-verify compares 6 digits
    return re.sub(r"(\.[0-9]*)\\overline\{?([0-9]+)\}?", lambda m: m[1] + 20 * m[2], formula)


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

    ValueError: a field is missing; an answer in prose; one that is empty or exceeds MAX_FORMULA,
    counted inside its last box or else behind its last ####; one that does not equal itself; a chat
    of several turns.
    """
    if isinstance(record.get("prompt"), list):
        record["prompt"] = _user_message(record["prompt"])
    if isinstance(record.get("reward_model"), dict):
        record["reward_model"] = record["reward_model"].get("ground_truth")
    answer = _text(record, "answer", "reward_model", "solution")
    gold = (_last_box(answer) or answer.rpartition("####")[2]).strip()
    if not 0 < len(gold) <= MAX_FORMULA:
        raise ValueError(f"its answer must have 1 to {MAX_FORMULA} characters, or a \\boxed{{…}}")
    # math-verify takes the letters of "The answer is 5" for variables, so that 5 would score 0.
    # "5 apples" is no such gold: the number alone equals it.
    number = re.sub(r"(?<![\\{A-Za-z])[A-Za-z]{4,}", "", gold)
    prose = " " in gold and number != gold and "\\text" not in gold and not equal(gold, number)
    # an integer equals itself: do not start math-verify for each of thousands
    if prose or not (gold.isdecimal() or _same_formula(gold, gold)):
        raise ValueError(
            f"no answer would equal its answer {gold[:60]!r}: write "
            "the formula alone, and words that belong to it as \\text{…}"
        )
    question = _text(record, "problem", "question", "prompt")
    return {"problem": DAPO.sub("", question), "answer": gold}


def _user_message(chat):
    """→ the contents of a chat, a message of the user behind messages of the system, as one text.

    ValueError: the chat has other messages.
    """
    roles = [message.get("role") if isinstance(message, dict) else None for message in chat]
    if roles != ["system"] * (len(chat) - 1) + ["user"]:
        raise ValueError("a chat must be one message of the user, behind those of the system")
    return "\n\n".join(_text(message, "content") for message in chat)


# --- problems from files


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
            remedy = ""
            if isinstance(error, (json.JSONDecodeError, TypeError, UnicodeDecodeError)):
                remedy = "; write one JSON object a line, as plain UTF-8 (no Parquet, no archive)"
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


def hold_out(task, count, source, operands=None, gold=None):
    """→ the Task with `count` of its problems, at most a quarter, held out.

    Those are held out whose prompts have the smallest hashes. So the split needs no seed, and a
    line that the user edits or deletes moves at most one other problem between train and held_out.
    Problems whose prompts share a key (_asked) are one, and the last of them is kept. task: a Task
    with all its problems in train. source: the name of their file or dataset. gold: problem → its
    right answer.
    ValueError: operands are given; under 4 problems, or with count 0 none; two golds for a prompt.
    """
    if operands:
        raise ValueError(f"--operands {operands} has no meaning beside {source}: leave it out")
    by_prompt = {}  # key of a prompt, from _asked → its problem
    for problem in task.train:
        key = _asked(task.prompt(problem))
        other = by_prompt.get(key, problem)
        if gold and gold(other) != gold(problem):
            raise ValueError(
                f"{source} has two answers, {gold(other)} and {gold(problem)}, to the problem "
                f"{key[:60]!r}: delete one"
            )
        by_prompt[key] = problem
    if len(by_prompt) < (4 if count else 1):
        raise ValueError(
            f"{source} has {len(by_prompt)} problems, too few: it takes 4, or 1 to test on"
        )

    def digest(key):
        return hashlib.sha256(str(task.prompt(by_prompt[key])).encode()).digest()

    held = set(sorted(by_prompt, key=digest)[: min(count, len(by_prompt) // 4)])
    return task._replace(
        train=[problem for key, problem in by_prompt.items() if key not in held],
        held_out=[problem for key, problem in by_prompt.items() if key in held],
    )


def _asked(prompt):
    """→ a prompt's key. Prompts that differ only in case or in the amount of blanks share a key."""
    return " ".join(str(prompt).split()).casefold()


def with_test_set(name, test, data=None, operands=None, trains=True):
    """→ the Task called name that holds out all problems of test, and trains on the rest of data.

    trains=False without data reads only test. ValueError: what the task raises; all problems of
    data are in test.
    """
    given = TASKS[name](data, operands) if trains or data else None
    task = TASKS[name](test, operands, held_out=0)
    train = []
    if given:
        asked = {_asked(task.prompt(problem)) for problem in task.train}
        problems = given.train + given.held_out
        train = [problem for problem in problems if _asked(task.prompt(problem)) not in asked]
        if not train:
            raise ValueError(
                f"every problem of --data {data} is in --test {test}: none is left to train on"
            )
    return task._replace(train=train, held_out=task.train)


# --- numbers and boxes in text


def final_answer(text):
    r"""→ the answer that a text gives, a Fraction; None if it gives none that can be read.

    It is in the line of the last ####: what follows the mark or, if that has no digit, the next
    line that is not empty. There, it is the first number behind the last "=". Without a mark it is
    the first number, behind the last "=", in the last \boxed{…}, else the last number in the text.
    """
    _, mark, end = text.rpartition("####")
    line = _last_box(text)
    if mark:
        line, *below = end.splitlines() or [""]
        if not _has_digit(line):
            line = next(filter(str.strip, below), "")
    elif not line:
        return last_number(text)
    return _number(line.rpartition("=")[2], 0)


def last_number(text):
    """→ the last number in the text, a Fraction. None: it has none, or it cannot be read."""
    for line in reversed(text.splitlines()):
        if _has_digit(line):
            return _number(line, -1)
    return None


def _has_digit(text):
    """→ whether a text has a digit of any script. ½ and 十 are two that cannot be read."""
    return any(map(str.isnumeric, text))


def _number(line, which):
    """→ the first (which = 0) or the last (-1) number in a line, a Fraction.

    None: the line has no number, or something changes it. A number that is only a part of what is
    written, as 18 is of 18², 18 * 2, 18,5 and 18 million, would reward a wrong answer.
    """
    for latex, plain in PLAIN:
        line = re.sub(latex, plain, line)
    words = [word for word in WORD.finditer(line) if _has_digit(word[0])]
    if not words:
        return None
    number = NUMBER.fullmatch(line, *words[which].span())
    if not number or _has_digit(number["unit"]) or BEHIND.match(line, number.end("value")):
        return None
    before = line[: number.start("value")][-60:]
    if BEFORE.search(before):
        return None
    *whole, value = map(Fraction, number["value"].replace(",", "").split())
    if whole and value >= 1:
        return None  # "5 48/2" is no mixed number
    value += sum(whole)
    return -value if MINUS.search(before) else value


def _last_box(text):
    r"""→ what is inside the last \boxed{…} or \fbox{…} of a text; "" without one."""
    box = BOX.match(text, max(text.rfind("\\boxed"), text.rfind("\\fbox")))
    return box[1] or box[2] or "" if box else ""


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
