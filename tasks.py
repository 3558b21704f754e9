r"""Tasks: a list of problems, a prompt for each, and a reward that a program can verify: 1 if right, else 0.

    task = TASKS["multiplication"]()          # also addition; gsm8k, with data="train.jsonl"
    task.train, task.held_out                 # lists of problems, each a dict
    task.prompt(problem)                      # "What is 7 * 8?", the user's message without a chat template
    task.reward(problem, text, finished)      # 1.0 or 0.0

An answer scores 1 if it is finished (the model ended it) and its number is exactly the right one:

    multiplication, addition    the last number in the text
    gsm8k                       the number right behind the last "####" that has one; without such, the last
                                one in the last \boxed{…}; without such, the last one in the text

    "7 * 8 = 56."         56    "-7", "−7", "-$7"       −7      "1,000" is 1000; "1,00" ends with 00
    "$56", "56%", "56kg"  56    "5-3", "5 - 3", "5 -3"   3      "3/4", "\frac{3}{4}" ¾; "1 1/2" 1½
    "7.0"                  7    "5e3", "2.5E-1"    5000, ¼      "3^2", "9**9": powers score 0

A minus belongs to the number that it touches, unless it takes away from another. A percent sign is a unit.
Only ASCII digits are digits, the last 2,000 characters are read, a number of over 40 digits scores 0. No text
is evaluated, and none, however hostile, costs more than a few milliseconds.

The paper (QeRL §4.1) trains on GSM8K and BigMath. Its released code pays 0.2 for the format, and compares
GSM8K's answers as strings, where "1,250" is not "1250"; here the number alone is paid. Arithmetic is ours.

Left out: BigMath and symbolic answers, partial credit, 1.000,00 and 1 000 as thousands.
Needs: nothing.   `python tasks.py FILE.jsonl…` checks a file in GSM8K's format against the reward.
"""

import json
import operator
import random
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

MULTIPLICATION = "What is {a} * {b}?"
ADDITION = "What is {a} + {b}?"
GSM8K = "{question}\nThink step by step, and end with a line of the form #### <number>."

SPLIT_SEED = 0                      # not the run's: whatever its --seed, a run holds out the same problems
MAX_PAIRS = 1_000_000               # 0-999 squared; the pairs are listed in memory
READ, MAX_DIGITS = 2000, 40         # characters, digits

NUMBER = re.compile(r"""
    (?P<sign>[-\u2212])? (?:\\?[$€£])?
    (?: (?:(?P<whole>[0-9]+)[ ])? (?P<over>[0-9]+) / (?P<under>[0-9]+) (?![.]?[0-9])
      | (?P<decimal> (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]+) (?:[.][0-9]+)? | (?<![\w.])[.][0-9]+ )
        (?:[eE](?P<exp>[+-]?[0-9]+))? )
    """, re.VERBOSE)
FRAC = re.compile(r"(?:([0-9]) ?)?\\[dt]?frac\{ ?(-?[0-9]+) ?\}\{ ?([0-9]+) ?\}")
MARK = re.compile(r"####[ \t=:*_`(<\\$]*")
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
BINARY = re.compile(r"(?:[^\W_]|[)\]}%]|[0-9]\$|[0-9%][ \t]{1,8})\Z")        # a minus behind this takes away
POWER = re.compile(r"(?:[0-9)]\*\*|[0-9)] \*\* |\^ ?[({]?)\Z")               # "is **bold**" is no power
RAISED = re.compile(r"\^(?!\{?\\circ)|\*\*[0-9(]| \*\* [0-9(]")              # nor is 90^\circ


class Task(NamedTuple):
    train: list[dict]
    held_out: list[dict]                                # never trained on
    prompt: Callable[[dict], str]                       # problem → the user's message
    reward: Callable[[dict, str, bool], float]          # problem, text, did the model end it → 1.0 or 0.0


def multiplication(data=None, operands=None, held_out=32):
    """Times tables: all ordered pairs of operands from LOW-HIGH, "2-12" unless told otherwise.

    Exactly held_out problems are set aside, in mirrored pairs and squares: with 3 * 4 goes 4 * 3.
    ValueError: operands not LOW-HIGH; fewer than twice held_out problems, or over MAX_PAIRS; data given.
    """
    return _arithmetic(MULTIPLICATION, operator.mul, data, operands or "2-12", held_out)


def addition(data=None, operands=None, held_out=32):
    """Sums: as multiplication(), with operands "0-99" unless told otherwise: 10,000 ordered pairs."""
    return _arithmetic(ADDITION, operator.add, data, operands or "0-99", held_out)


def _arithmetic(question, operation, data, operands, held_out):
    if data:
        raise ValueError(f"data={data!r}: the arithmetic tasks make their own problems and read no file")
    match = re.fullmatch("([0-9]{1,9})-([0-9]{1,9})", operands)
    low, high = map(int, match.groups()) if match else (1, 0)
    if low > high:
        raise ValueError(f"operands={operands!r} must be LOW-HIGH with LOW <= HIGH, for example 2-12")
    n = high - low + 1
    if not 2 * held_out <= n * n <= MAX_PAIRS:
        raise ValueError(f"operands={operands!r} make {n * n} problems: it takes {2 * held_out} (to hold "
                         f"out {held_out} and train on as many) to {MAX_PAIRS}")
    rng, values = random.Random(SPLIT_SEED), range(low, high + 1)
    # squares in proportion, 1 pair in n, but odd or even as held_out is, for the other pairs come in twos
    squares = 2 * round(held_out / n / 2) + held_out % 2
    held = [(a, a) for a in rng.sample(values, squares)]
    for a, b in rng.sample(list(combinations(values, 2)), (held_out - squares) // 2):
        held += [(a, b), (b, a)]
    rng.shuffle(held)
    kept_apart = set(held)
    return Task(train=[{"a": a, "b": b} for a in values for b in values if (a, b) not in kept_apart],
                held_out=[{"a": a, "b": b} for a, b in held],
                prompt=lambda problem: question.format(**problem),
                reward=lambda problem, text, finished: float(
                    bool(finished) and last_number(text) == operation(problem["a"], problem["b"])))


def gsm8k(data=None, operands=None, held_out=256):
    """Word problems from the JSONL file data, a record {"question": "…", "answer": "… #### 18"} a line.

    held_out of them, at most a quarter, are set aside.
    ValueError: no data, or a file or a line of it that cannot be read; fewer than 4 records; operands given.
    """
    if operands:
        raise ValueError(f"operands={operands!r}: gsm8k takes its problems from a file and has no operands")
    if not data:
        raise ValueError("gsm8k needs a file of problems: give one with --data FILE.jsonl")
    problems = read(data)
    if len(problems) < 4:
        raise ValueError(f"{data} holds {len(problems)} problems, too few to hold out a quarter: it takes 4")
    held = random.Random(SPLIT_SEED).sample(range(len(problems)), min(held_out, len(problems) // 4))
    kept_apart = set(held)
    return Task([problem for i, problem in enumerate(problems) if i not in kept_apart],
                [problems[i] for i in held], gsm8k_prompt, gsm8k_reward)


def gsm8k_prompt(problem):
    return GSM8K.replace("{question}", problem["question"].strip())     # format would trip over a brace


def gsm8k_reward(problem, text, finished):
    return float(bool(finished) and final_answer(text) == final_answer(problem["answer"]))


def read(path):
    """The records of a GSM8K file; blank lines are skipped. ValueError: names file, line and reason."""
    problems, number = [], 0
    try:
        with open(path, "rb") as file:
            for line in file:
                number += 1
                problems += [_record(line)] if line.strip() else []
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): name a JSONL file of problems") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}: {error}") from None
    return problems


def _record(line):
    record = json.loads(line.decode("utf-8-sig"))
    for key in ("question", "answer"):
        if not isinstance(record, dict) or not isinstance(record.get(key), str) or not record[key].strip():
            raise ValueError(f"it must be an object in which {key!r} is some text")
    if not _marked(_tail(record["answer"])) or final_answer(record["answer"]) is None:
        raise ValueError("its answer must end with '#### number'")
    return record


# --- numbers in text
def last_number(text):
    """The last number in the text, a Fraction; None if there is none, or if it is a power or too long."""
    return _last(_tail(text))


def final_answer(text):
    r"""The number behind the last ####, in the last \boxed{…}, or the last of all: Fraction or None."""
    text = _tail(text)
    if marked := _marked(text):
        return _value(marked)
    boxed = BOXED.findall(text)
    return _last(boxed[-1] if boxed and NUMBER.search(boxed[-1]) else text)


def _tail(text):
    tail = text[-READ:]
    if len(text) > READ:
        tail = tail.lstrip("0123456789.,/")             # what is left of a number that the cut went through
    return FRAC.sub(lambda m: f"{m[1] + ' ' if m[1] else ''}{m[2]}/{m[3]}", tail.replace("{,}", ","))


def _marked(text):
    found = [NUMBER.match(text, mark.end()) for mark in MARK.finditer(text)]
    return next((number for number in reversed(found) if number), None)


def _last(text):
    found = list(NUMBER.finditer(text))
    return _value(found[-1]) if found else None


def _value(number):
    """The match as a Fraction; None for a power, a division by zero, too many digits."""
    before = number.string[max(0, number.start() - 9):number.start()]
    exp = int((number["exp"] or "0")[:MAX_DIGITS])      # cut: int() refuses strings of thousands of digits
    if sum(map(str.isdigit, number[0])) > MAX_DIGITS or abs(exp) > MAX_DIGITS:
        return None
    if POWER.search(before) or RAISED.match(number.string, number.end()):
        return None
    if number["decimal"]:
        value = Fraction(number["decimal"].replace(",", "")) * Fraction(10) ** exp
    elif int(number["under"]) == 0:
        return None
    else:
        value = Fraction(int(number["over"]), int(number["under"]))
        if number["whole"] and value >= 1:
            return value                                # "5 48/2" is two numbers, "1 1/2" is one
        value += int(number["whole"] or 0)
    return -value if number["sign"] and not BINARY.search(before) else value


TASKS = {"multiplication": multiplication, "addition": addition, "gsm8k": gsm8k}


# --- checking a file
def check(path):
    """[problems in the file, their own answers that score 1, their answers plus one that score 0]"""
    problems, accepted, rejected = read(path), 0, 0
    for problem in problems:
        more = f"{problem['answer'].rpartition('####')[0]}#### {final_answer(problem['answer']) + 1}"
        accepted += gsm8k_reward(problem, problem["answer"], True) == 1
        rejected += gsm8k_reward(problem, more, True) == 0
    return [len(problems), accepted, rejected]


def main(paths):
    """Check the files; the exit code: 0 if all is as it should be, 1 if not, 2 if one cannot be read."""
    try:
        counts = {path: check(path) for path in paths}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    counts["total"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    for name, (problems, accepted, rejected) in counts.items():
        print(f"{name}: {problems} problems, {accepted} gold answers accepted, {rejected} gold+1 rejected")
    return 0 if all(count[0] and count == count[:1] * 3 for count in counts.values()) else 1


def demo():
    for task in (multiplication(), addition()):
        print(f"{len(task.train)} problems, {len(task.held_out)} held out: {task.prompt(task.held_out[0])}")
    problem = {"question": "A pen costs $3. What do 6 pens cost?", "answer": "6 * 3 = 18\n#### 18"}
    print(gsm8k_prompt(problem))
    for text in ("#### 18", r"\boxed{18}", "It is $18.00.", "#### 17, or 18", "-18", "2 * 3**2", "18 or 20"):
        print(f"    {gsm8k_reward(problem, text, True)}  {text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if sys.argv[1:] else demo())
