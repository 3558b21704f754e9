"""experiments/kv8_vllm.py beside a stand-in for vLLM, which no machine of the tests has."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from experiments import kv8_vllm

PROBLEMS = [{"question": f"What is {i} + 1?", "answer": f"It is\n#### {i + 1}"} for i in range(4)]
ANSWERS = ["#### 1", "#### 2", "#### 5", "#### 4"]  # the third is wrong, the last is cut off


@pytest.fixture
def data(tmp_path, monkeypatch):
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    return path


def start(monkeypatch, tmp_path, data, *flags):
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(
        sys, "argv", ["kv8_vllm", "M", "--data", f"{data}", "--out", f"{out}", *flags]
    )
    kv8_vllm.main()
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_it_counts_right_and_finished_answers_and_hands_the_format_on(monkeypatch, tmp_path, data):
    seen = {}

    class LLM:
        def __init__(self, **given):
            seen.update(given)

        def chat(self, chats, sampling, use_tqdm):
            seen.update(sampling, questions=[chat[0]["content"] for chat in chats])
            ends = ["stop"] * 3 + ["length"]
            done = [
                SimpleNamespace(text=t, finish_reason=e) for t, e in zip(ANSWERS, ends, strict=True)
            ]
            return [SimpleNamespace(outputs=[answer]) for answer in done]

    vllm = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams, vllm.__version__ = LLM, dict, "0"
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    for kv in ("fp8", "auto"):
        *_, record = start(monkeypatch, tmp_path, data, "--kv", kv, "--max-new-tokens", "9")
        assert (record["accuracy"], record["finished"], record["kv"]) == (0.5, 0.75, kv)
        assert (seen["kv_cache_dtype"], seen["temperature"], seen["max_tokens"]) == (kv, 0, 9)
        assert all(p["question"] in q for p, q in zip(PROBLEMS, seen["questions"], strict=True))


def test_without_vllm_it_says_which_python_to_take(monkeypatch, tmp_path, data, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit):
        start(monkeypatch, tmp_path, data)
    assert "start it with a Python that has vLLM" in capsys.readouterr().err
