"""Questions to a trained model: python -m tools.chat.

python -m pytest tests/test_chat.py
"""

import io
import json
import re
import shutil
import sys

import pytest

from tools import chat, weights


class Terminal(io.StringIO):
    """Counts what is written at a time."""

    pieces = 0

    def isatty(self):
        return True

    def write(self, text):
        self.pieces += 1
        return super().write(text)


def answers(said):
    """→ pairs: what the base and what the adapter answered."""
    found = re.findall(r"^    base: (.*)\n adapter: (.*)$", said, re.M)
    assert found and all(base != adapted for base, adapted in found), said
    return found


def test_a_question_gets_the_answers_of_the_base_and_of_the_adapter(whole, monkeypatch, capsys):
    """From the command line, or one a line; each is a chat of its own. What grows on a terminal is
    what is printed elsewhere.
    """
    flags = ["--max-new-tokens", "30"]
    chat.main([str(whole), "2 + 2?", *flags])
    (alone,) = answers(capsys.readouterr().out)
    monkeypatch.setattr(sys, "stdin", io.StringIO("3 * 3?\n\n2 + 2?\n"))
    monkeypatch.setattr(sys, "stdout", Terminal())
    chat.main([str(whole / "adapter"), *flags])
    _, again = answers(sys.stdout.getvalue())
    assert again == alone and sys.stdout.pieces > 60


@pytest.mark.gpu
def test_gpu_answers_with_and_without_the_adapter(whole, capsys):
    """Their decode steps have other kernels, which no graph may load while it is captured."""
    chat.main([str(whole), "2 + 2?", "--device", "cuda", "--max-new-tokens", "20"])
    assert answers(capsys.readouterr().out)


def test_the_sampler_keeps_keys_and_values_as_the_runs_did(whole, tmp_path, monkeypatch):
    """From there, unless a flag says otherwise."""
    run = shutil.copytree(whole, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"kv": "int8"}))
    used = []
    monkeypatch.setattr(chat, "ask", lambda question, environment, sampler: used.append(sampler.kv))
    for flags in [], ["--kv", "bf16"]:
        chat.main([str(run), "2 + 2?", *flags])
    assert used == ["int8", "bf16"]


def test_a_run_of_ones_own_task_is_asked_without_starting_it(whole, tmp_path, capsys):
    run = shutil.copytree(whole, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    (tmp_path / "mine.py").write_text("raise KeyboardInterrupt('it ran')")
    (run / "config.json").write_text(json.dumps(config | {"task": str(tmp_path / "mine.py")}))
    chat.main([str(run), "2 + 2?"])
    assert answers(capsys.readouterr().out)


@pytest.mark.parametrize("stops, cut", [(range(32), 0), ([], 2)])
def test_an_answer_that_did_not_end_is_marked(whole, monkeypatch, capsys, stops, cut):
    """Every token of the model ends an answer, or none does."""
    monkeypatch.setattr(weights.Source, "stop_ids", lambda source: list(stops))
    chat.main([str(whole), "2 + 2?", "--max-new-tokens", "3"])
    assert capsys.readouterr().out.count("(cut after 3 tokens: raise --max-new-tokens)\n") == cut


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is no folder"):
        chat.main([str(tmp_path / "nowhere"), "What is 7 * 8?"])


def test_a_wrong_adapter_is_named_before_a_model_loads(whole, tiny_chat, capsys):
    with pytest.raises(ValueError, match=f"^{tiny_chat} holds no adapter_config.json"):
        chat.main([str(tiny_chat), "What is 7 * 8?"])
    with pytest.raises(ValueError, match="adapter_config.json has r=.*, this model takes 5"):
        chat.main([str(whole), "What is 7 * 8?", "--rank", "5"])
    assert "loading" not in capsys.readouterr().err


def test_a_question_behind_flags_is_sent_to_its_place(whole):
    with pytest.raises(ValueError, match=f"'2 . 3\\?' stands behind flags: .* behind {whole}"):
        chat.main([str(whole), "--kv", "int8", "2 * 3?"])


@pytest.mark.parametrize("flag", ["--temperature", "--task", "--resume", "--data=x", "--prmpts"])
def test_a_flag_that_changes_no_answer_is_refused(whole, flag):
    with pytest.raises(ValueError, match=f"^{flag.split('=')[0]} has no use here: .* --model, "):
        chat.main([str(whole), "2 + 2?", flag, "2"])


def test_a_question_that_is_no_text_is_named(whole):
    with pytest.raises(ValueError, match="'2 .udcff' is not valid UTF-8"):
        chat.main([str(whole), "2 \udcff"])


@pytest.mark.parametrize("words", [[], ["--device", "cpu"]])
def test_without_a_run_the_usage_is_told(words):
    with pytest.raises(ValueError, match="usage: "):
        chat.main(words)
