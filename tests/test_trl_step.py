"""python -m pytest tests/test_trl_step.py -q    TRL and vLLM are no requirement: doubles take their places"""
import importlib.metadata
import json
import runpy
import sys
from types import SimpleNamespace

import bench
import pytest
from command import ROOT

import tasks
import train

SECONDS = dict(sync=32, generate=16, tokenizer=8, rewards=4, recompute=2, update=1)


class Trainer:
    """Calls the methods that trl_step.py times, as TRL 1.16 does; each adds its seconds to the clock."""
    now, made = 0, None

    def __init__(self, model, reward, callbacks, train_dataset, peft_config, args):
        self.reward, self.callbacks, self.data, self.args = reward, callbacks, train_dataset, args
        Trainer.made = self
        self.vllm_generation = SimpleNamespace(sync_weights=lambda: self.spend("sync"))

    def spend(self, part):
        Trainer.now += SECONDS[part]

    def _generate_single_turn(self):
        self.vllm_generation.sync_weights()
        self.spend("generate")

    def _generate(self):
        self.spend("tokenizer")
        self._generate_single_turn()

    def _calculate_rewards(self, rows):
        self.spend("rewards")
        problems = [row["problem"] for row in rows for _ in range(2)]
        texts = [p["answer"] for p in problems]
        texts[2] = "#### -1"
        ids = [[5, 6, 2], [5, 6, 7]] * (len(problems) // 2)                # the second of two is cut off
        chats = [[{"role": "assistant", "content": text}] for text in texts]
        return self.reward(completions=chats, completion_ids=ids, problem=problems, prompts=[])

    def _generate_and_score_completions(self, rows):
        self._generate()
        self.rewards = self._calculate_rewards(rows)
        self.spend("recompute")

    def train(self):
        for step in range(self.args["max_steps"]):
            self._generate_and_score_completions(self.data[2 * step:2 * step + 2])
            self.spend("update")
            for callback in self.callbacks:
                callback.on_step_end(None, SimpleNamespace(global_step=step + 1), None)


@pytest.fixture
def doubles(monkeypatch, tmp_path):
    """→ GSM8K's file; trl, datasets, the clock and the GPU are replaced."""
    trl = SimpleNamespace(GRPOTrainer=Trainer, GRPOConfig=lambda folder, **fields: fields)
    monkeypatch.setitem(sys.modules, "trl", trl)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=SimpleNamespace(from_list=list)))
    monkeypatch.setattr(bench, "DEVICE", "cuda")
    monkeypatch.setattr(bench, "conditions", lambda: {"gpu": "a card"})
    monkeypatch.setattr(bench, "clock", lambda: Trainer.now)
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version",
                        lambda name: f"a {name}" if name in ("trl", "vllm") else real(name))
    data = tmp_path / "train.jsonl"
    problems = [json.dumps({"question": f"q{i}", "answer": f"#### {i}"}) for i in range(20)]
    data.write_text("\n".join(problems))
    return data


@pytest.fixture
def trl_step(doubles, monkeypatch):
    monkeypatch.delitem(sys.modules, "trl_step", raising=False)
    yield importlib.import_module("trl_step")
    sys.modules.pop("trl_step")


def test_the_seconds_of_a_step_add_up(trl_step, doubles, tiny, tmp_path):
    """Each part to itself, in each step anew; a right answer that is cut off scores 0."""
    log = tmp_path / "log.jsonl"
    trl_step.main(["--model", str(tiny), "--data", str(doubles), "--prompts", "2", "--group-size", "2",
                   "--micro-batch", "2", "--steps", "3", "--out", str(log)])
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [r["step"] for r in records] == [0, 1, 2]
    for r in records:
        assert (r["sync_s"], r["generate_s"], r["rollout_s"]) == (32, 16, 32 + 16 + 8 + 4)
        assert (r["recompute_s"], r["update_s"]) == (2, 2 + 1)
        assert (r["reward"], r["finished"], r["length"]) == (0.25, 0.5, 3)
        assert (r["gpu"], r["trl"], r["vllm"], r["micro_batch"]) == ("a card", "a trl", "a vllm", 2)
    assert Trainer.made.rewards == [1, 0, 0, 0]
    assert Trainer.made.args["gradient_accumulation_steps"] == 2 and Trainer.made.args["use_vllm"]


def test_its_problems_are_those_of_train_py(trl_step, doubles, tiny):
    """In the same order, and with the same prompts."""
    trl_step.main(["--model", str(tiny), "--data", str(doubles), "--prompts", "2", "--steps", "3"])
    task, config = tasks.gsm8k(str(doubles)), train.Config(prompts=2)
    prompts = [task.prompt(p) for step in range(3) for p in train.batch(task.train, config, step)]
    assert [row["prompt"] for row in Trainer.made.data] == [[{"role": "user", "content": p}] for p in prompts]


@pytest.mark.parametrize("flags, why", [
    (["--micro-batch", "48"], "error: --micro-batch 48 must divide the 256 answers of a step"),
    (["--micro-batch", "0"], "error: --micro-batch 0 must divide the 256 answers of a step"),
    (["--data", "none.jsonl"], "trl_step.py: none.jsonl"), (["--model", "/none"], "trl_step.py: /none")])
def test_bad_flags_get_one_sentence(doubles, tiny, flags, why, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trl_step.py", "--model", str(tiny), "--data", str(doubles), *flags])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "results/trl_step.py"), run_name="__main__")
    said = capsys.readouterr().err + str(stop.value.code)
    assert why in said and stop.value.code != 0
