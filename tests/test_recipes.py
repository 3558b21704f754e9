"""python -m pytest tests/test_recipes.py"""
import json
import math
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import checkpoint
import launch
import memory
import train

sys.path.insert(0, str(Path(__file__).parent.parent / "results"))
import recipes  # noqa: E402

# a tiny shape whose vocabulary still holds every id of the stand-in tokenizer
TINY = (64, 2, 4, 2, 96, 49152, False)
RECORD = {"gpu", "torch", "triton", "commit", "recipe", "rewards", "flags", "planned_gb", "load_s"}


def test_every_recipe_is_there():
    """The tests below are parametrized by this dict: over an empty one they would check nothing."""
    assert list(recipes.RECIPES) == ["3b-gsm8k", "7b-gsm8k", "7b-bigmath", "14b-bigmath", "32b-bigmath"]


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_is_a_config_with_the_papers_batch(name):
    """Only flags that exist, 128 answers a step, a warm-up of a tenth of the steps, a model of memory.py."""
    config = launch.check(train.Config(**recipes.RECIPES[name]))
    assert config.prompts * config.group_size == 128 and config.warmup * 10 == config.steps
    assert config.out == f"runs/{name}" and name.split("-")[0] in memory.MODELS


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_evaluation_is_the_papers_on_a_whole_test_set(name):
    """§4.1: temperature 0.6, top-p 0.95, 4096 tokens, several samples; no training data is loaded."""
    config = launch.check(train.Config(**recipes.evaluation(name)))
    trained = train.Config(**recipes.RECIPES[name])
    assert (config.temperature, config.eval_top_p, config.max_new_tokens) == (.6, .95, 4096)
    assert config.eval_samples > 1 and config.steps == 0 and config.data == "" != config.test != trained.data
    assert (config.task, config.model, config.quant) == (trained.task, trained.model, trained.quant)
    assert config.adapter == f"runs/{name}/adapter" and trained.eval_top_p == 1


def test_list_prints_commands_that_parse_back(capsys):
    """Each recipe's two commands parse back into its Configs. Below them: the planned memory, and the seconds
    of a step with prompts of 150 and answers of 500 tokens at the logged rates."""
    recipes.main(["list"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 * len(recipes.RECIPES)
    for i, name in enumerate(recipes.RECIPES):
        title, training, evaluation, planned, expected = lines[5 * i:5 * i + 5]
        assert title == name and "weights" in planned and "peak" in planned
        rates = recipes.measured(name)
        assert rates["recipe"] == name and rates["step"] == 1
        seconds = 128 * 500 / rates["rollout_tok_s"] + 128 * 650 / rates["update_tok_s"]
        assert f"expected: {seconds:.0f} s a step" in expected
        for line, flags in ((training, recipes.RECIPES[name]), (evaluation, recipes.evaluation(name))):
            python, script, *arguments = line.split()
            assert (python, script) == ("python", "train.py")
            assert launch.parse(train.Config, arguments) == train.Config(**flags)


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps({"question": f"What do {n} pens cost at $3?",
                                        "answer": f"{n} * 3 = {3 * n}\n#### {3 * n}"}) + "\n"
                            for n in range(2, 40)))
    return path


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    """SmolLM2's tokenizer: ids of Qwen's larger vocabulary that it lacks decode to an empty string."""
    _, made = smollm2
    assert made.decode([9906, len(made), 152063], skip_special_tokens=True) == made.decode([9906]) != ""
    return made


@pytest.mark.parametrize("name", ["3b-gsm8k", "7b-bigmath"])
def test_try_trains_and_leaves_nothing_behind(name, problems, tokenizer, tmp_path, monkeypatch, capsys):
    """Through train.train: some rows train, some are masked, gradients are finite, step 2 has noise."""
    source = SimpleNamespace(tokenizer=lambda: tokenizer)
    monkeypatch.setattr(checkpoint, "open", {"smollm2": source}.get)
    monkeypatch.setitem(memory.MODELS, name.split("-")[0], TINY)
    scratch, log = tmp_path / "scratch", tmp_path / "log.jsonl"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.chdir(tmp_path)
    evaluate, evaluated = train.evaluate, []
    monkeypatch.setattr(train, "evaluate", lambda config, *rest: evaluated.append(
        (config.eval_samples, config.temperature, config.eval_top_p)) or evaluate(config, *rest))
    recipes.main(["try", name, "--data", str(problems), "--new", "12", "--prompts", "3", "--group-size", "16",
                  "--out", str(log)])
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(r["kind"], r["step"]) for r in records] == [("step", 0), ("step", 1), ("eval", 2)]
    for r in records[:2]:
        assert 0 < r["rows"] < 48 and 0 < r["finished"] < 1 and "skipped" not in r
        assert r["grad_norm"] > 0 and math.isfinite(r["grad_norm"]) and r["signal"] > 0
        assert r["rollout_s"] > 0 < r["memory_gb"] and r["planned_gb"] > 0 and r["longest_prompt"] > 20
    assert records[0]["sigma"] == 0 < records[1]["sigma"] and records[2]["problems"] == 4
    assert evaluated == [(1, 1, 1)] * 2 + [(8, .6, .95)]
    changed = dict(steps=2, max_new_tokens=12, data=str(problems), prompts=3, group_size=16)
    for r in records:
        assert RECORD <= set(r) and r["recipe"] == name and "stand-in" in r["rewards"]
        assert r["flags"] == recipes.RECIPES[name] | changed
    assert sorted(tmp_path.iterdir()) == sorted([log, problems, scratch]) and not list(scratch.iterdir())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == records[-1]
