"""Other people's data: the columns of a record that are read, and files that are no JSONL.

    question_and_answer({"problem": "2 + 3?", "ground_truth": 5}) → {"question": …, "answer": "5"}

Needs: tasks.py.
"""

import os
import re

from tasks import text_of

QUESTION = "problem", "question", "prompt", "messages"
ANSWER = "answer", "ground_truth", "solution", "messages"
# how a file begins that is no JSONL: what it is, and how to make JSONL of it
FORMATS = {
    rb"\x1f\x8b": "a file of gzip: unpack it with gunzip",
    b"PK": "a zip archive: unpack it",
    b"PAR1": 'Parquet: use pandas.read_parquet(…).to_json(…, orient="records", lines=True)',
    rb"\[": (
        "a JSON array, not an object a line: python -c "
        "'import json, sys; [print(json.dumps(x)) for x in json.load(sys.stdin)]' "
        "< {path} > {path}l"
    ),
    rb"[^{\n]*[,;\t]": (
        "a table, such as CSV, not an object a line: python -c "
        "'import csv, json, sys; [print(json.dumps(x)) for x in csv.DictReader(sys.stdin)]' "
        "< {path} > {path}.jsonl"
    ),
}


def question_and_answer(record: dict) -> dict[str, str]:
    """→ {"question": text, "answer": text}, each from the first column of QUESTION and ANSWER that
    has text or a number. ground_truth may be inside of reward_model.

    prompt and messages may be a chat: what the user says, behind the system's messages, and what
    the assistant answers. ValueError: no column has text; a chat of several turns.
    """
    reward_model = record.get("reward_model")
    columns = record | (reward_model if isinstance(reward_model, dict) else {})
    answered = ""
    for key in ("prompt", "messages"):
        if isinstance(record.get(key), list):
            columns[key], answered = _turn(record[key])
    question = text_of(columns, *QUESTION)
    columns["messages"] = answered
    return {"question": question, "answer": text_of(columns, *ANSWER)}


def _turn(chat: list) -> tuple[str, str]:
    """→ what a chat asks, messages of the system included; what its assistant answers, or "".

    ValueError: the chat has other messages.
    """
    roles = [message.get("role") if isinstance(message, dict) else None for message in chat]
    if not re.fullmatch("(system )*user( assistant)?", " ".join(map(str, roles))):
        raise ValueError(
            "a chat must be one message of the user, behind those of the system, and at most one "
            "answer of the assistant"
        )
    texts = [text_of(message, "content") for message in chat]
    asked = roles.index("user") + 1
    return "\n\n".join(texts[:asked]), "".join(texts[asked:])


def refuse_other_formats(path: str) -> None:
    """ValueError: there is a file, and it is no JSONL; says what it is, and how to make JSONL of
    it.
    """
    if not os.path.isfile(path):  # a dataset of the hub, or missing
        return
    with open(path, "rb") as file:
        head = file.read(10_000).removeprefix(b"\xef\xbb\xbf").lstrip()
    for beginning, what in FORMATS.items():
        if re.match(beginning, head):
            raise ValueError(f"{path} is {what.format(path=path)}")
