"""Other people's data: the columns of a record that are read, and files that are no JSONL.

    question_and_answer({"problem": "2 + 3?", "ground_truth": 5}) → {"question": …, "answer": "5"}

Needs: tasks.py.
"""

import os
import re
from shlex import quote

from tasks import text_of

# how a file begins that is no JSONL: what it is, and how to make JSONL of it
FORMATS = {
    rb"\x1f\x8b": "a file of gzip: run gunzip < {path} > {made}",
    rb"PAR1": "Parquet: write pandas.read_parquet(…).to_json(…, orient='records', lines=True)",
    rb"\[": (
        "a JSON array, not an object a line: run python -c 'import json, sys; "
        'sys.stdin.reconfigure(encoding="utf-8-sig"); '
        "[print(json.dumps(x)) for x in json.load(sys.stdin)]' < {path} > {made}"
    ),
    rb"[^{\n]*[,;\t]": (
        "CSV or another table, not JSON: run python -c 'import csv, json, sys; "
        'sys.stdin.reconfigure(encoding="utf-8-sig"); '
        'head, *rows = sys.stdin; between = max(",;\\t", key=head.count); '
        "rows = csv.DictReader([head, *rows], delimiter=between); "
        "[print(json.dumps(x)) for x in rows]' < {path} > {made}"
    ),
}


def question_and_answer(record: dict) -> dict[str, str]:
    """→ {"question": text, "answer": text}, each from the first of these columns that has text or a
    number:

        problem, question, prompt, messages
        answer, ground_truth (also inside of reward_model), solution, or the chat's answer

    prompt and messages may be a chat: what the user says, after the system's messages, and what
    the assistant answers. ValueError: no column has text; a chat of several turns.
    """
    columns = dict(record)
    if isinstance(record.get("reward_model"), dict):
        columns |= record["reward_model"]
    for key in ("prompt", "messages"):
        if isinstance(record.get(key), list):
            columns[key], answered = _turn(record[key])
            if answered:
                columns.setdefault("solution", answered)
    return {
        "question": text_of(columns, "problem", "question", "prompt", "messages"),
        "answer": text_of(columns, "answer", "ground_truth", "solution"),
    }


def _turn(chat: list) -> tuple[str, str]:
    """→ what a chat asks, messages of the system included; what its assistant answers, or "".

    ValueError: the chat has other messages.
    """
    roles = [message.get("role") if isinstance(message, dict) else None for message in chat]
    if not re.fullmatch("(system )*user( assistant)?", " ".join(map(str, roles))):
        raise ValueError(
            "a chat must be one message of the user, after those of the system, and at most one "
            "answer of the assistant"
        )
    texts = [text_of(message, "content") for message in chat]
    asked = roles.index("user") + 1
    return "\n\n".join(texts[:asked]), "".join(texts[asked:])


def refuse_other_formats(path: str) -> None:
    """ValueError: there is a file, and it is no JSONL; says what it is, and how to make JSONL of
    it.
    """
    if os.path.isfile(path):  # no dataset of the hub
        with open(path, "rb") as file:
            head = file.read(10_000).removeprefix(b"\xef\xbb\xbf").lstrip()
        for beginning, what in FORMATS.items():
            if re.match(beginning, head):
                stem = re.sub(r"(\.(jsonl?|csv|tsv|txt|gz))+$", "", path)
                made = quote(f"{stem}.lines.jsonl")  # never the file itself
                raise ValueError(f"{path} is {what.format(path=quote(path), made=made)}")
