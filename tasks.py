# SPDX-License-Identifier: Apache-2.0 (QeRL from scratch)
r"""Tasks: problems, a prompt for each, and a reward that a program can verify: 1 if right, else 0.

    task = TASKS["multiplication"]()       # or addition; gsm8k takes data
    task.train, task.held_out              # lists of problems, each a dict
    task.prompt(problem)                   # "What is 7 * 8?", the user's message, no chat template
    task.reward(problem, text, finished)   # 1.0 or 0.0

An answer scores 1 if the model ended it (finished) and if its number is exactly the right one:

    multiplication, addition    the last number of the text (last_number)
    gsm8k                       what follows "####", else the last \boxed{…}, else the last number
                                (final_answer); the solution's number is found in the same way

A number counts only if plain words are beside it, and no operator, second number or number word
(read_number): $18 and 18kg are 18, while 18², 18 * 2, "17 or 18" and 18 dozen are no answer. No
text is evaluated as code.

data is a JSONL file, or a dataset of the hub as owner/name[/config][:split]. A record of gsm8k has
a question and an answer: a plain number, or what ends with "#### 18", as in openai/gsm8k/main, or
with \boxed{18}. tools/records.py reads chats and other columns. Questions that differ only in how
many blanks separate their words or, without LaTeX, in case, are one problem.

tools/math_task.py makes the Task of formulas in LaTeX, tools/own_task.py that of a user's own file.

Left out: partial credit; 1 1/2, 1e3, 1.000,00, m². Needs: nothing; for the hub, datasets.
"""

import hashlib
import json
import math
import operator
import os
import random
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import combinations
from typing import NamedTuple

GSM8K = "{question}\nThink step by step, and end with a line of the form #### <number>."

MAX_PAIRS = 1_000_000  # of operands: all pairs of 0-999 are held in memory


class Task(NamedTuple):
    """Problems and how to ask and judge them."""

    train: list[dict]
    held_out: list[dict]  # never trained on
    prompt: Callable[[dict], str | list]  # problem → the user's message, or a chat
    # (problem, text of the answer, did the model end it?) → 1.0 or 0.0; tools/own_task.py: a float
    reward: Callable[[dict, str, bool], float]


# --- arithmetic


def _arithmetic(
    question: str,
    operation: Callable[[int, int], int],
    default: str,
    data: str | None = None,
    operands: str | None = None,
    held_out: int = 32,
) -> Task:
    """→ the Task of all ordered pairs of operands from LOW-HIGH.

    Exactly held_out pairs are held out. ValueError: operands are not LOW-HIGH, or make under
    2·held_out or over MAX_PAIRS problems; data is given.
    """
    if data:
        raise ValueError(
            f"{data}: this task makes its own problems: leave out --data and --test, or take "
            "--task gsm8k, which reads them"
        )
    match = re.fullmatch("([0-9]{1,9})-([0-9]{1,9})", operands or default)
    low, high = map(int, match.groups()) if match else (1, 0)
    values = range(low, high + 1)
    if not values:
        raise ValueError(
            f"--operands {operands} must be LOW-HIGH with LOW <= HIGH, for example 2-12"
        )
    count = len(values) ** 2
    if not 2 * held_out <= count <= MAX_PAIRS:
        raise ValueError(
            f"--operands {low}-{high} makes {count} problems, not {2 * held_out} to {MAX_PAIRS}"
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


def _draw_pairs(values: range, count: int) -> list[tuple[int, int]]:
    """→ count random ordered pairs of values: both (3, 4) and (4, 3) or neither, because a model
    that was trained on one of them knows the other.
    """
    rng = random.Random(0)  # not --seed: every run holds out the same pairs
    # Hold out the same share of squares (a, a) as all pairs have: of the 121 pairs of 2-12, 11 are
    # squares, so of 32 pairs 2 or 3. It is 2, because the other pairs are drawn in pairs.
    squares = 2 * round(count / len(values) / 2) + count % 2
    pairs = [(a, a) for a in rng.sample(values, squares)]
    unordered = list(combinations(values, 2))
    for a, b in rng.sample(unordered, (count - squares) // 2):
        pairs += [(a, b), (b, a)]
    rng.shuffle(pairs)
    return pairs


# --- GSM8K


def gsm8k(
    data: str | None = None,
    operands: str | None = None,
    held_out: int = 256,
    columns: Callable[[dict], dict] = dict,
) -> Task:
    """→ the Task of word problems whose answers are numbers.

    data: a JSONL file, or a dataset of the hub. held_out: how many problems to hold out, at most a
    quarter of all. columns: a record → {"question": text, "answer": text}. ValueError: what read
    and hold_out raise, among others for an answer that is no plain number.
    """
    problems = read(data, lambda record: _word_problem(columns(record)))
    task = Task(problems, [], GSM8K.format_map, gsm8k_reward)
    return hold_out(task, held_out, data, operands, lambda p: final_answer(p["answer"]))


def gsm8k_reward(problem: dict, text: str, finished: bool) -> float:
    """→ 1.0 if text and solution have the same final answer, and the text is finished; else 0.0."""
    return float(finished and final_answer(text) == final_answer(problem["answer"]))


def _word_problem(record: dict) -> dict:
    """→ the problem of a line of the data. ValueError: its answer is no plain number, and none is
    marked as the final one.
    """
    problem = {key: text_of(record, key) for key in ("question", "answer")}
    answer = problem["answer"]
    marked = "####" in answer or "\\boxed" in answer
    if (final_answer if marked else read_number)(answer) is None:
        line = answer.rpartition("####")[2].partition("\n")[0]
        raise ValueError(
            "its answer must be one plain number, or end with '#### number', "
            f"not with {line[:60]!r}; --task math takes other answers"
        )
    return problem


# --- the number of an answer
#
# A readable text is WORDS, a VALUE, WORDS, once DECORATION is read as blanks. A number that is only
# a part of what is written, as 18 is of 18², 18 * 2 and 18 million, would reward a wrong answer. So
# WORDS lists the characters that may be beside a number, and no NUMERAL may be its neighbor.

# LaTeX's \text{, \boxed{, \( and \, ; bold and italic type, currencies, quotes
DECORATION = r"\\(?:text|boxed|[][(),;:!%$ ])|\*\*|[{}$€£¥₹'\"’“”`~≈#]|(?<![\w}])_|_(?![\w{])"
# letters and punctuation, without digits and operators; the / of km/h and the - of 18-packs
WORDS = r"(?:[a-zA-Z\s.,:;?!—()%°]|[/-](?=[a-zA-Z]))*"
# 18, -7, 1,000, 18.50 or 3/4
VALUE = r"-?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+|/[1-9][0-9]*)?)"
# A VALUE begins the text or follows whitespace, which refuses x18. 18! is a factorial.
NUMBER = re.compile(rf"{WORDS}(?<!\S)({VALUE})(?!\W*!){WORDS}")
# words that change the number beside them: 5k, 5 squared, 3 dozen, 2 fifths, minus 5
NUMERAL = re.compile(
    r"[kKMB]|[bm]n|mil|pi|(?i:(?:minus|negative|twice|double|triple|squared|cubed|half|halves|third"
    r"|quarter|dozen|hundred|thousand|lakh|crore|million|billion|trillion|two|three|four|five|six"
    r"|seven|eight|nine|ten|eleven|twelve|[a-z]+teen|twenty|thirty|forty|fifty|sixty|seventy|eighty"
    r"|ninety|fif|eigh|nin)(?:s|ths?)?)"
)
# what may be between the two: half of 18, 2 and a half
LINKS = frozenset("and or of to by point a an one".split())
# where a text is cut into pieces: after a clause (not at LaTeX's space "\, "), at = and "is"
CUT = re.compile(r"(?<!\\)[.,:;?]\s|[=<>\n]|\b(?:is|are|equals|gives)\b")
# a product or a sum, followed by a verb that announces its value: 7 * 8 makes 56
OPERATION = re.compile(r"[0-9] ?[*×x+] ?[0-9]+(?= (?!times|plus|minus)(?:[a-z]+s|equal) )")
# \boxed{…} with braces up to two deep, as in \boxed{18\text{ kg}}
BOX = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")


def read_number(text: str) -> Fraction | None:
    r"""→ the number of a text that consists of one number and plain words; None for any other text.

        18.  → 18       $18     → 18       **18**     → 18        about 18 kg   → 18
        18%  → 18       \$18.00 → 18       \boxed{18} → 18        18\text{ cm}  → 18
        -7   → -7       −$7.50  → -15/2    1,000      → 1000      18 km/h       → 18
        3/4  → 3/4      18kg    → 18       "18"       → 18        18-packs      → 18

        18²  → None     18*2    → None     5 million  → None      17 or 18      → None
        2^18 → None     18 x 2  → None     5k         → None      3 of 18 pens  → None
        √18  → None     10–18   → None     1'000      → None      5 a + 3 b     → None
        18!  → None     10:30   → None     1 000      → None      1 1/2         → None
        x18  → None     18,5    → None     0x12       → None      \frac12       → None

    A number has at most 40 characters, because int() raises an error for thousands of digits.
    """
    text = re.sub(DECORATION, " ", text)
    text = re.sub(r"[-–−]\s*", "-", text)
    match = NUMBER.fullmatch(text)
    if not match or len(match[1]) > 40:
        return None
    before = re.findall("[a-zA-Z]+", text[: match.start(1)])
    after = re.findall("[a-zA-Z]+", text[match.end(1) :])
    # After the number its unit may come before the numeral: 2 feet and a half.
    if any(map(_begins_with_numeral, (before[::-1], after, after[1:]))):
        return None
    return Fraction(match[1].replace(",", ""))


def _begins_with_numeral(words: list[str]) -> bool:
    """→ whether the first of these words that is no LINK is a NUMERAL."""
    first = next((word for word in words if word.lower() not in LINKS), "")
    return NUMERAL.fullmatch(first) is not None


def last_number(text: str) -> Fraction | None:
    """→ the number in the last piece of a text that has a digit; None if it cannot be read.

    A text is cut into pieces after a clause or a line, at "=" and at "is", and between an
    operation and its verb:

        7 * 8 = 56.      → 56        7 times 8 is 56   → 56        56, not 54    → 54
        7 * 8 makes 56   → 56        7 * 8 times 2     → None      7 * 8 and 56  → None
        56 is 7 * 8      → None      56. I mean 7 * 8  → None      56 in 2 steps → None
    """
    text = OPERATION.sub(r"\g<0>\n", text)
    for piece in reversed(CUT.split(text)):
        if any(map(str.isnumeric, piece)):  # digits of any script, which read_number refuses
            return read_number(piece)
    return None


def final_answer(text: str) -> Fraction | None:
    r"""→ the number in the line after the last "####"; without that mark, in the last \boxed{…};
    without either, the last number. Of a line or a box, only what follows the last "=" is read.

        #### 18            → 18      #### 6 * 3 = 18    → 18      #### 17, or 18         → None
        \boxed{18} of 20   → 18      \boxed{x = 18}     → 18      #### Step 1. It is 18  → None
        \boxed{17} #### 18 → 18      It is 18.          → 18      #### 18 = 6 * 3        → None
        #### 18 ####       → 18      #### minus 5       → None    #### 2 and a half      → None
    """
    text = text.rstrip("# \t\r\n")  # some texts end with a second, empty mark
    _, mark, line = text.rpartition("####")
    box = BOX.match(text, text.rfind("\\boxed{"))
    if mark:
        line = line.strip().partition("\n")[0]
    elif box:
        line = box[1]
    else:
        return last_number(text)
    return read_number(line.rpartition("=")[2])


# --- problems from files

# owner/name[/config][:split], a dataset of the hub. What ends with .json or .jsonl is a file.
HUB = re.compile(r"(?!.*\.jsonl?\Z)([\w-][\w.-]*/[\w.-]+)(?:/([\w.-]+))?(?::([\w.%:[\]+-]+))?")


def read(source: str | None, check: Callable[[dict], dict]) -> list[dict]:
    """→ the problems in a file or a dataset of the hub: check(record) of each line that is not
    blank.

    check raises ValueError for a record that it refuses. ValueError: source, line and reason.
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
                record = None
                # TypeError for an array
                record = {**json.loads(line, object_pairs_hook=unique_keys)}
                problems.append(check(record))
    except Exception as error:  # the library datasets raises a dozen types of errors
        if number:
            remedy = ""
            if record is None or type(error) is not ValueError:  # which check raises
                remedy = "; write one JSON object a line, as plain UTF-8 (no Parquet, no archive)"
            # JSON's error has a place, whose line is counted from this one
            said = f"column {error.pos + 1}: {error.msg}" if hasattr(error, "colno") else error
            raise ValueError(f"{source}, line {number}: {said}{remedy}") from None
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise ValueError(f"{source} cannot be read ({reason}): give {give}") from None
    return problems


def unique_keys(pairs: list[tuple]) -> dict:
    """→ a JSON object, as json.loads(text, object_pairs_hook=unique_keys) calls it. ValueError: a
    key occurs twice, so that one of two values would be lost.
    """
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError(f"a key occurs twice among {', '.join(record)}")
    return record


def _lines(source: str) -> Iterable[str | bytes]:
    """→ the lines of a file, or the records of a dataset of the hub as JSON."""
    hub = HUB.fullmatch(str(source))
    if not hub or os.path.exists(source):
        return open(source, "rb")
    from datasets import load_dataset

    name, config, split = hub.groups()
    rows = load_dataset(name, config, split=split or "train")
    return (json.dumps(row, default=str) for row in rows)


def text_of(record: dict, *keys: str) -> str:
    """→ the first of these fields that has text or a finite number, as text: 0.00001 for 1e-05.
    ValueError: none has.
    """
    for key in keys:
        value = record.get(key)
        if type(value) in (int, float) and abs(value) < math.inf:  # which NaN is not
            value = format(Decimal(str(value)), "f")
        if isinstance(value, str):
            text = value.strip()
            text.encode()  # raises on half an emoji, which JSON allows, no tokenizer
            if text:
                return text
    raise ValueError(
        f"{' or '.join(map(repr, keys))} must be some text or a number; "
        f"the columns found are {', '.join(map(repr, record)) or 'none'}"
    )


def hold_out(
    task: Task,
    count: int,
    source: str,
    operands: str | None = None,
    gold: Callable[[dict], object] | None = None,
) -> Task:
    """→ the Task with `count` of its problems, at most a quarter, held out.

    Those are held out whose prompts have the smallest hashes. So the split needs no seed, and a
    line that the user edits or deletes moves at most one other problem between train and held_out.
    Problems with the same prompt, as _prompt_key compares prompts, are one: the last is kept.

    task: all its problems are in train. source: the file or dataset that messages name. gold:
    problem → its right answer. ValueError: operands are given; under 4 problems, or with count 0
    none; two golds for a prompt.
    """
    if operands:
        raise ValueError(f"--operands {operands} has no meaning beside {source}: leave it out")
    problems, digests = {}, {}  # both by the key of a prompt
    for problem in task.train:
        prompt = task.prompt(problem)
        key = _prompt_key(prompt)
        other = problems.get(key, problem)
        if gold and gold(other) != gold(problem):
            raise ValueError(
                f"{source} has two answers, {gold(other)} and {gold(problem)}, to the problem "
                f"{key[:60]!r}: delete one"
            )
        problems[key] = problem
        digests[key] = hashlib.sha256(str(prompt).encode()).digest()
    if len(problems) < (4 if count else 1):
        raise ValueError(
            f"{source} has {len(problems)} problems, too few: it takes 4, or 1 to test on"
        )
    held = set(sorted(digests, key=digests.get)[: min(count, len(digests) // 4)])
    return task._replace(
        train=[problem for key, problem in problems.items() if key not in held],
        held_out=[problem for key, problem in problems.items() if key in held],
    )


def _prompt_key(prompt: str | list) -> str:
    """→ a prompt's key. Prompts that differ only in the amount of blanks share it, and without
    LaTeX, where x is not X, those that differ only in case.
    """
    key = " ".join(str(prompt).split())
    return key if "\\" in key else key.casefold()


def with_test_set(
    make: Callable[..., Task],
    test: str,
    data: str | None = None,
    operands: str | None = None,
    trains: bool = True,
) -> Task:
    """→ the Task that holds out all problems of test, and trains on the rest of data.

    make(data, operands, held_out) makes a Task: gsm8k, or math of tools/math_task.py. trains=False
    without data reads only test. ValueError: what make raises; all problems of data are in test.
    """
    given = make(data, operands, held_out=0) if trains or data else None
    task = make(test, operands, held_out=0)
    train = []
    if given:
        asked = {_prompt_key(task.prompt(problem)) for problem in task.train}
        if len(given.train) >= 4:  # the order of earlier runs, which a resume needs
            given = hold_out(given, 256, data)
        problems = given.train + given.held_out
        train = [problem for problem in problems if _prompt_key(task.prompt(problem)) not in asked]
        if not train:
            raise ValueError(
                f"every problem of --data {data} is in --test {test}: none is left to train on"
            )
    return task._replace(train=train, held_out=task.train)


TASKS = {
    "multiplication": partial(_arithmetic, "What is {a} * {b}?", operator.mul, "2-12"),
    "addition": partial(_arithmetic, "What is {a} + {b}?", operator.add, "0-99"),
    "gsm8k": gsm8k,
}

if __name__ == "__main__":
    example = {"question": "A pen costs $3. What do 6 pens cost?", "answer": "6 * 3 = 18\n#### 18"}
    for text in ("#### 18", "It is $18.00.", "#### 17, or 18", "2 * 3**2"):
        print(f"    {gsm8k_reward(example, text, True)}  {text}")
