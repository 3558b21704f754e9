"""Other people's data: columns, chats, and files that are no JSONL.

python -m pytest tests/test_records.py
"""

import gzip
import json
import subprocess

import pytest

from tools.environment import load_task
from tools.flags import Config

PROMPT = [{"role": "user", "content": "2 + 3?"}]
TURN = [*PROMPT, {"role": "assistant", "content": "2 + 3 = 5\n#### 5"}]
RECORDS = [
    {"question": "2 + 3?", "answer": "#### 5"},
    {"question": "2 + 3?", "answer": 5},
    {"problem": "2 + 3?", "solution": "It is \\boxed{5}.", "level": 1},
    {"prompt": "2 + 3?", "ground_truth": 5.0},
    {"prompt": "2 + 3?", "answer": None, "solution": "$5"},
    {"prompt": PROMPT, "reward_model": {"ground_truth": "5", "style": "rule"}},
    {"messages": TURN},
    {"messages": TURN[:1], "answer": "5"},
]


def config(path, task="gsm8k"):
    return Config(task=task, data=str(path))


@pytest.mark.parametrize("record", RECORDS)
def test_gsm8k_takes_the_columns_that_people_have(record, tmp_path):
    """Beside records of its own: each may have other columns."""
    data = tmp_path / "some.jsonl"
    others = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(3)]
    data.write_text("".join(json.dumps(r) + "\n" for r in [*others, record]))
    task = load_task(config(data))
    (problem,) = [p for p in task.train + task.held_out if p["question"] == "2 + 3?"]
    assert [task.reward(problem, text, True) for text in ("#### 5", "#### 6")] == [1, 0]


TABLE = "question,answer\n" + "".join(f'"{n}, or more?",{n}\n' for n in range(5))
ROWS = [{"question": f"{n}, or more?", "answer": n} for n in range(5)]
FILES = {  # what a file holds, and what it is called
    "table": (TABLE.encode(), "CSV"),
    "tabs": (TABLE.replace(",", "\t").encode(), "CSV"),
    "array": (json.dumps(ROWS).encode(), "JSON array"),
    "pretty": (json.dumps(ROWS, indent=2).encode("utf-8-sig"), "JSON array"),
    "gz": (gzip.compress("\n".join(map(json.dumps, ROWS)).encode()), "gzip"),
    "parquet": (b"PAR1\x15\x04", "Parquet"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_jsonl_is_named_as_what_it_is(name, tmp_path):
    data = tmp_path / "some.json"
    content, called = FILES[name]
    data.write_bytes(content)
    for flags in (
        config(data),
        config(data, "math"),
        Config(task="gsm8k", test=str(data), steps=0),
    ):
        with pytest.raises(ValueError, match=f"^{data} is a?.*{called}"):
            load_task(flags)


@pytest.mark.parametrize(
    "name, called",
    [("table", "my $1.csv"), ("tabs", "a.jsonl"), ("array", "a.jsonl"), ("gz", "a.jsonl.gz")],
)
def test_the_remedy_makes_a_file_that_is_read(name, called, tmp_path):
    """As printed, in a shell, beside a file of any name, and under a name of one .jsonl."""
    data = tmp_path / called
    content, _ = FILES[name]
    data.write_bytes(content if name == "gz" else b"\xef\xbb\xbf" + content)  # as Excel does
    with pytest.raises(ValueError) as refused:
        load_task(config(data))
    command = str(refused.value).partition(": run ")[2]
    subprocess.run(command, shell=True, check=True)
    (made,) = set(tmp_path.iterdir()) - {data}
    assert made.suffix == ".jsonl" and str(made).count("json") == 1
    task = load_task(config(made))
    assert sorted(p["question"].replace("\t", ",") for p in task.train + task.held_out) == [
        r["question"] for r in ROWS
    ]
