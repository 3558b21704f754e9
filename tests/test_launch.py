"""python -m pytest tests/test_launch.py"""
import copy
import dataclasses
import json
import math
import operator
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import FLAGS, ROOT, Command, lines, main

import checkpoint
import launch
import runs
import train
from tasks import Task


@pytest.fixture
def ended(tmp_path):
    """ended(flags) → a folder with an adapter's folder, the config, the (empty) log and checkpoint of a run:
    enough to parse --resume and --adapter."""
    def make(**flags):
        (tmp_path / "ended/adapter").mkdir(parents=True)
        (tmp_path / "ended/metrics.jsonl").touch()
        (tmp_path / "ended/checkpoint.safetensors").touch()
        (tmp_path / "ended/config.json").write_text(json.dumps(vars(train.Config()) | flags))
        return str(tmp_path / "ended")
    return make


def test_out_of_memory_before_the_first_step_is_one_line_too(tiny_chat, tmp_path, monkeypatch, capsys):
    def short(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    monkeypatch.setattr(launch, "load", short)
    monkeypatch.setattr(sys, "argv", ["train.py", "--model", str(tiny_chat), "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "--gradient-checkpointing" in error and error.count("\n") == 1


@pytest.mark.parametrize("flags", [dict(data="some.jsonl"), dict(test="some.jsonl"),
                                   dict(operands="1-9")])
def test_a_task_of_ones_own_takes_neither_data_nor_operands(flags):
    """The task makes its problems itself, so it would ignore them."""
    with pytest.raises(ValueError, match="^--task mine.py takes no --data, --test, --operands$"):
        launch.check(train.Config(task="mine.py", **flags))


def test_two_ranks_train_as_one_process(whole, tiny_chat, tmp_path):
    """torchrun splits prompts and sums gradients, and one rank logs. Answers are compared up to the first
    update, because AdamW makes a full step of a gradient that is only rounding."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               ROOT / "train.py", *FLAGS, "--model", tiny_chat, "--out", folder]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    one, two = runs.read(whole), runs.read(folder)
    assert list(one) == list(two) and len(lines(folder)) == len(two)
    first = min(s for (kind, s), r in one.items() if kind == "step" and r["grad_norm"])
    for step in range(first + 1):
        for key in ("reward", "signal", "finished", "length", "rows", "entropy", "kl_noise", "clip_fraction",
                    "grad_norm"):
            want = one["step", step][key]
            assert two["step", step][key] == (want if want is None else pytest.approx(want, rel=1e-4)), key
    assert ended.stdout.count("run folder") == 1 and ended.stdout.count("step    0") == 1
    steps = [r for (kind, _), r in two.items() if kind == "step"]
    assert all(0 <= r["rollout_idle"] < 1 for r in steps) and "rollout_idle" not in one["step", 0]
    assert main("--resume", folder, "--steps", len(steps) + 1) == 0
    assert "rollout_idle" not in runs.read(folder)["step", len(steps)]                 # by one process


def ranks(count=2):
    """→ the environment variables that torchrun would give to each of its processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(count), OMP_NUM_THREADS="1")
    return [meeting | dict(RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]


def test_a_rank_that_fails_ends_the_job_with_its_error(tiny_chat, tmp_path):
    """The other rank notices, and does not wait for ever."""
    (tmp_path / "mine.py").write_text("""
import os
def problems():
    return [{"prompt": f"{n} - 1 =", "answer": n - 1} for n in range(10, 60)]
def reward(problem, text):
    assert os.environ["RANK"] == "0", "rank 1 fell over"
    return 0.0
""")
    flags = "--task", tmp_path / "mine.py", "--model", tiny_chat, "--out", tmp_path / "run"
    first, second = (Command(tmp_path, *flags, env=env) for env in ranks())
    assert second.code not in (0, None) and "rank 1 fell over" in second.said
    assert first.code not in (0, None) and "rank 1 fell over" not in first.said


def test_the_threads_of_the_ranks_end_before_python_does(tiny_chat, tmp_path):
    """A thread of gloo that outlives the group releases a tensor while Python ends, which aborts a process
    now and then: something imported after the group began may hold it (default arguments of torch do)."""
    code = f"""
import atexit, pathlib, runpy
@atexit.register
def say():
    print("threads:", *(t.read_text().strip() for t in pathlib.Path("/proc/self/task").glob("*/comm")))
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""
    flags = *FLAGS, "--steps", "1", "--updates-per-rollout", "1", "--eval-problems", "0", "--model", tiny_chat
    ended = subprocess.run([sys.executable, "-c", code, *flags, "--out", tmp_path / "run"],
                           capture_output=True, text=True, env=os.environ | ranks(1)[0])
    assert ended.returncode == 0, ended.stderr
    threads = ended.stdout.split("threads:")[1]
    assert threads.strip() and "gloo" not in threads


def test_every_field_is_a_flag_with_its_comment_as_help(capsys):
    """--help shows every field, and --no-… for a bool. Without flags, parse gives the defaults."""
    with pytest.raises(SystemExit, match="0"):
        launch.parse(train.Config, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    source = (ROOT / "train.py").read_text()
    for f in dataclasses.fields(train.Config):
        comment, = re.findall(rf"^    {f.name}: .*?  # (.+)$", source, re.M)
        flag = f"--{f.name.replace('_', '-')}"
        assert " ".join(comment.split()) in text and re.search(f"{flag}[ ,]", text)
        assert (f"--no-{flag[2:]}" in text) == (f.type is bool)
    assert launch.parse(train.Config, []) == train.Config()
    assert launch.parse(train.Config, ["--no-aqn", "--clip-low", "0.1", "--task", "addition"]) == \
        train.Config(aqn=False, clip_low=.1, task="addition")


def test_help_is_grouped_by_the_titles_in_config(capsys):
    """A title is a comment "# --- title" above the group's first field, or beside the name of the class."""
    with pytest.raises(SystemExit, match="0"):
        launch.parse(train.Config, ["--help"])
    _, _, *groups = re.split(r"^(\w+):\n", capsys.readouterr().out, flags=re.M)[1:]
    first = {title: re.search(r"--([\w-]+)", text)[1]
             for title, text in zip(groups[::2], groups[1::2], strict=True)}
    assert first == dict(model="model", task="task", sampling="prompts", objective="loss", noise="aqn",
                         schedule="steps", run="eval-every")


@pytest.mark.parametrize("flags", ["--steps x", "--steps .5", "--aqn=no", "--lr"])
def test_a_wrong_type_stops_with_2(flags, capsys):
    """In two lines, without the list of all flags."""
    with pytest.raises(SystemExit, match="2"):
        launch.parse(train.Config, flags.split())
    usage, error = capsys.readouterr().err.splitlines()
    assert "error: " in error and flags[:4] in error and usage.endswith("train.py [--flag value]")


@pytest.mark.parametrize("flags, near", [
    ("--stepz 3", "--stepz; the nearest are --steps, "), ("--step=3", "--step=3; the nearest are --steps, "),
    ("--lr 1 --clip 2", "--clip; the nearest are --clip-low, --clip-high, "),
    ("--max_new_tokens 9", "--max_new_tokens; the nearest are --max-new-tokens, "),
    ("gsm8k", "gsm8k; the nearest are --task, ")])
def test_an_unknown_flag_names_those_nearest_to_it(flags, near):
    """A prefix of a flag, or an underscore in it, counts as unknown."""
    with pytest.raises(ValueError, match=f"^there is no {near}.*; --help lists all$"):
        launch.parse(train.Config, flags.split())


# what the run of an adapter was trained with; each differs from its default
SCORED = dict(model="/there/model", quant="bf16", rank=4, alpha=8, task="gsm8k", data="/there/data.jsonl",
              test="a/b:test", max_new_tokens=99, temperature=.5, eval_problems=9, eval_samples=3,
              eval_top_p=.5, seed=7)


@pytest.mark.parametrize("name", ["ended", "ended/adapter", "ended/adapter/", "ended/adapter-best"])
@pytest.mark.parametrize("more", [[], ["--steps", "0"]])
def test_an_adapter_of_a_run_is_used_as_it_was_trained(ended, tmp_path, monkeypatch, capsys, name, more):
    """What a score depends on is that run's, unless a flag says otherwise, and one line says so. Its lr and
    the paths of its own are not."""
    folder = ended(**SCORED, lr=1.0, out="/there", adapter="/there/adapter")
    Path(folder, "adapter-best").mkdir()
    monkeypatch.chdir(tmp_path)
    adapter = os.path.join(folder, "adapter-best" if "best" in name else "adapter")
    want = train.Config(**SCORED, adapter=adapter, steps=0 if more else 16)
    assert launch.parse(train.Config, ["--adapter", name, *more]) == want
    assert capsys.readouterr().out == (
        f"from {folder}/config.json: --model /there/model --quant bf16 --rank 4 --alpha 8 --task gsm8k "
        "--data /there/data.jsonl --test a/b:test --max-new-tokens 99 --temperature 0.5 --eval-problems 9 "
        "--eval-samples 3 --eval-top-p 0.5 --seed 7\n")
    config = launch.parse(train.Config, ["--adapter", name, "--quant", "nvfp4", "--seed=0", *more])
    assert config == dataclasses.replace(want, quant="nvfp4", seed=0)
    assert not {"--quant", "--seed"} & set(capsys.readouterr().out.split())


def test_an_adapter_from_elsewhere_brings_no_flags(ended, tmp_path, capsys):
    """Neither alone, nor in a folder of a model, whose config.json is another."""
    for config in (None, '{"model_type": "llama", "temperature": 0.5}'):
        (tmp_path / "other/peft").mkdir(parents=True, exist_ok=True)
        if config:
            (tmp_path / "other/config.json").write_text(config)
        got = launch.parse(train.Config, ["--adapter", str(tmp_path / "other/peft")])
        assert got == train.Config(adapter=str(tmp_path / "other/peft")) and not capsys.readouterr().out


def test_an_adapter_of_ones_own_task_is_scored_from_anywhere(start, tmp_path, monkeypatch, capsys): 
    """The scores, greedy and sampled, are those at the end of the run, to the last digit."""
    (tmp_path / "there").mkdir()
    Path(tmp_path / "mine.py").write_text("problems = lambda: [{'prompt': str(n)} for n in range(40)]\n"
                                          "reward = lambda p, text, finished: len(text)")
    monkeypatch.chdir(tmp_path)
    assert start("--task", "mine.py", "--steps", 2, "--eval-samples", 2, "--seed", 3) == 0
    monkeypatch.chdir("there")
    assert main("--steps", 0, "--device", "cpu", "--out", "score", "--adapter", tmp_path / "run") == 0
    want, (got,) = runs.read(tmp_path / "run")["eval", 2], runs.read("score").values()
    keys = "eval_greedy", "eval_greedy_loose", "eval_sampled", "problems"
    assert [got[k] for k in keys] == [want[k] for k in keys] and 0 < got["eval_greedy"] != got["eval_sampled"]


@pytest.mark.parametrize("name, value", [
    ("model", "other"), ("quant", "rtn"), ("rank", "3"), ("alpha", "3"), ("task", "addition"),
    ("data", "x.jsonl"), ("test", "x.jsonl"), ("operands", "2-9"), ("out", "other"), ("adapter", "other"),
    ("updates-per-rollout", "2"), ("eval-problems", "99")])
def test_a_resume_keeps_what_its_checkpoint_was_trained_on(ended, tmp_path, monkeypatch, name, value):
    """Refused before anything is loaded; the run's own value may be given again, a path from anywhere. Other
    problems would have accuracies that the best one so far cannot be compared with."""
    folder = ended(**SCORED | dict(data=str(tmp_path / "data.jsonl")))
    with pytest.raises(ValueError, match=f"^--{name} {value} beside --resume {folder}: that run has its own"):
        launch.parse(train.Config, ["--resume", folder, f"--{name}", value])
    (tmp_path / "data.jsonl").touch()
    monkeypatch.chdir(folder)
    again = ["--resume", folder, "--data", "../data.jsonl", "--rank", "4", "--model", SCORED["model"]]
    assert launch.parse(train.Config, again) == launch.parse(train.Config, ["--resume", folder])


@pytest.mark.parametrize("where, said", [
    ("launch.load = stop", ""), ("Sampler.generate = stop", "\nstopped after 0 steps; go on with: .*run\n")])
def test_ctrl_c_before_the_first_step_ends_without_a_traceback(tiny_chat, tmp_path, where, said):
    """While the model is loaded, and while the first evaluation samples: exit code 130."""
    code = f"""import os, signal, time, launch
from rollout import Sampler
def stop(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
{where}"""
    run = Command(tmp_path, *FLAGS, "--model", tiny_chat, "--out", tmp_path / "run", code=code)
    assert run.code == 130 and re.fullmatch(said, run.said)


def test_a_resume_takes_the_runs_own_flags_and_those_given_beside_it_win(ended):
    """An integer in config.json is accepted for a float."""
    folder = ended(rank=4, overlong="penalty", beta=1, clip_low=.1)
    config = launch.parse(train.Config, ["--resume", folder, "--lr", "1"])
    assert (config.rank, config.overlong, config.beta, config.clip_low) == (4, "penalty", 1, .1)
    assert (config.lr, config.resume, config.out) == (1, folder, folder)
    assert launch.parse(train.Config, ["--lr", "1", "--resume", folder, "--out", folder]) == config


@pytest.mark.parametrize("text, words", [
    ("{", "Expecting"), ("[1]", "mapping"), ('{"steps": null, "lr": 1}', "NoneType"), ("", "Expecting"),
    ('{"steps": 2.5}', "'steps': 2.5"), ('{"clip_low": "0.1"}', "'clip_low': '0.1'"),
    ('{"steps": 1e999}', "infinity"), ('{"scale": "group"}', "argument 'scale'"), (None, "No such file")])
def test_a_config_that_is_damaged_or_of_another_version_is_named_with_the_way_on(ended, text, words):
    """For --resume and --adapter. A copy of the adapter elsewhere brings no flags, and starts a run."""
    folder = ended()
    Path(folder, "config.json").unlink()
    if text is not None:
        Path(folder, "config.json").write_text(text)
    for flag in ("--resume", "--adapter"):
        with pytest.raises(ValueError, match=f"^{folder}/config.json has no flags of this .*{words}.*: name "
                           "the folder of a run, or copy its adapter elsewhere and begin another run with"):
            launch.parse(train.Config, [flag, folder])
    copied = shutil.copytree(f"{folder}/adapter", f"{folder}-adapter")
    assert launch.parse(train.Config, ["--adapter", copied]) == train.Config(adapter=copied)


@pytest.mark.parametrize("name, value, words", [
    *((name, "nonsense", "nonsense must be one of") for name in (
        "quant", "task", "loss", "correction", "overlong", "schedule", "sigma_schedule")),
    *((name, 0, "0 must be 1 to ") for name in (
        "prompts", "max_new_tokens", "updates_per_rollout", "eval_every", "eval_samples",
        "save_every", "micro_tokens", "rank", "alpha")),
    *((name, -1, "-1 must be 0 to ") for name in ("steps", "warmup", "resample", "eval_problems")),
    ("beta", -.1, "-0.1 must be 0 to "), ("beta", float("nan"), "nan must be 0 to "),
    ("lr", -1e-3, "-0.001 must be 0 to "), ("lr", math.inf, "inf must be 0 to 1000000000"),
    *((name, math.inf, "inf must be ") for name in ("beta", "temperature", "sigma_start")),
    ("weight_decay", -.1, "-0.1 must be 0 to "),
    ("seed", -1, "-1 must be 0 to 4294967295"), ("seed", 2**32, "4294967296 must be 0 to 4294967295"),
    ("clip_low", -.5, "-0.5 must be 0 to "), ("clip_high", float("nan"), "nan must be 0 to "),
    ("rank", 513, "513 must be 1 to 512"), ("device", "cuda:1", "cuda:1 must be cpu, or cuda"),
    *((name, value, f"{value} must be 1e-09 to 1")
      for name in ("sigma_start", "sigma_end", "temperature", "max_grad_norm", "eval_top_p")
      for value in (0.0, -1.0, float("nan"))),
    ("group_size", 1, "1 must be 2 to "), ("sigma_stages", 2, "2 must be 3 to "),
    ("eval_top_p", 1.01, "1.01 must be 1e-09 to 1"),
    ("updates_per_rollout", 3, "3 must divide 16 steps"),
    ("loss", "gspo", "needs --correction none or tis")])
def test_a_config_that_cannot_work_is_refused_by_name_and_value(name, value, words):
    """One sentence begins with the flag. The config has correction=bypass, which gspo refuses. The largest
    --clip-high and --max-grad-norm are as good as none."""
    assert launch.check(train.Config(clip_high=1e9, max_grad_norm=1e9))
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        launch.check(train.Config(**dict(correction="bypass") | {name: value}))
    assert f"--{name.replace('_', '-')} {value}" in str(refused.value) and "\n" not in str(refused.value)


def test_prompts_that_the_ranks_cannot_share_equally_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert launch.check(train.Config(prompts=9))
    with pytest.raises(ValueError, match="^--prompts 8 must be a multiple of the ranks$"):
        launch.check(train.Config(prompts=8))


@pytest.mark.parametrize("number, evaluations", [(5, [5, 5]), (99, [32, 32]), (0, [])])
def test_eval_problems_bounds_the_evaluation_or_skips_it(start, tmp_path, capsys, number, evaluations):
    """The training problems stay the same, and the run says what it evaluates before it begins."""
    assert start("--steps", 1, "--eval-problems", number) == 0
    records = runs.read(tmp_path / "run").values()
    assert [r["problems"] for r in records if r["kind"] == "eval"] == evaluations
    said = capsys.readouterr().out
    assert f"89 problems to train on, {min(number, 32)} held out" in said and said.count("\nstep ") == 1
    assert said.count(f"evaluating {min(number, 32)} problems: greedy, and 1 sampled") == len(evaluations)


def test_a_run_is_resumed_from_another_folder(start, whole, tmp_path, monkeypatch): 
    """Paths are stored absolute: another folder may hold another file of this name, or none."""
    (tmp_path / "there").mkdir()
    task = "problems = lambda: [{'prompt': str(n)} for n in range(40)]\nreward = lambda p, text: len(text)"
    Path(tmp_path / "mine.py").write_text(task)
    Path(tmp_path / "there/mine.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    assert start("--task", "mine.py", "--adapter", os.path.relpath(whole / "adapter"), "--steps", 2) == 0
    monkeypatch.chdir("there")
    assert main("--resume", tmp_path / "run", "--steps", 3) == 0
    stored = json.loads((tmp_path / "run/config.json").read_text())
    assert stored["task"] == str(tmp_path / "mine.py") and stored["adapter"] == str(whole / "adapter")
    given = {name: "../mine.py" for name in ("model", "data", "test", "adapter")}
    flags = ["--task=gsm8k", *(f"--{name}={path}" for name, path in given.items())]
    config = launch.parse(train.Config, flags)
    assert {name: getattr(config, name) for name in given} == dict.fromkeys(given, str(tmp_path / "mine.py"))


@pytest.mark.parametrize("flags, words", [
    ("--model /nonexistent", "/nonexistent is neither"), ("--resume {tmp}/nowhere", "nowhere"),
    ("--task gsm8k --data {tmp}/missing.jsonl", "missing.jsonl"), ("--task gsm8k", "--data FILE.jsonl"),
    ("--task gsm8k --test {tmp}/missing.jsonl", "this task needs problems"),
    ("--task gsm8k --test {tmp}/missing.jsonl --steps 0", "missing.jsonl cannot be read"),
    ("--test {tmp}/file", "make their own problems: leave out --data and --test"),
    ("--out {tmp}/file", "file"), ("--loss nonsense", "nonsense"), ("--operands 3", "--operands 3 must"),
    ("--adapter {tmp}", "adapter_config.json"), ("--group-size 1", "--group-size 1 must be 2 to"),
    ("--max-new-tokens 129", "tokens: --max-new-tokens 129 leaves 1 to -1; mend"),
    ("--max-new-tokens 127", "the prompt '"),
    ("--preflight --resume {tmp}/ended", "but --adapter {tmp}/ended/ad"), ("--stepz 3", "--steps"),
    ("--task gsm8k --data {tmp}/long.jsonl", "the prompt '1+1+1+"),
    ("--task gsm8k --data {tmp}/half.jsonl", "half.jsonl, line 5: 'utf-8' codec can't encode")])
def test_what_a_user_can_get_wrong_is_one_line_and_exit_code_2(
        tiny_chat, tmp_path, ended, monkeypatch, capsys, flags, words):
    """python train.py …, run in this process."""
    (tmp_path / "file").write_text("not a folder")
    ended(model=str(tiny_chat), rank=4)
    good = [json.dumps({"question": f"{i}+1", "answer": f"#### {i + 1}"}) + "\n" for i in range(5)]
    (tmp_path / "long.jsonl").write_text("".join(good).replace("4+1", "1+" * 99 + "1"))
    (tmp_path / "half.jsonl").write_text("".join(good).replace("4+1", r"half an emoji: \ud83d"))
    argv = ["train.py", "--model", tiny_chat, *FLAGS, *flags.format(tmp=tmp_path).split()]
    monkeypatch.setattr(sys, "argv", list(map(str, argv)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and words.format(tmp=tmp_path) in error
    assert error.startswith("train.py: ") and "\n" not in error


def test_a_prompt_that_no_answer_can_follow_is_named_by_its_text(tiny_chat):
    """Without a chat template an empty text has no tokens. The context is 128 tokens, 8 for the answer."""
    source = checkpoint.open(str(tiny_chat))
    tokenizer = source.tokenizer()
    tokenizer.chat_template = None
    task = Task([], [], operator.itemgetter("prompt"), None)
    longest, given = {"prompt": "1" * 120}, (train.Config(max_new_tokens=8), source.config, task, tokenizer)
    assert [len(p) for p in launch.encoded(*given, [longest])] == [120]
    for text, count in (("", 0), ("1" * 121, 121)):
        with pytest.raises(ValueError, match=f"'{text[:60]}' has {count} tokens: .* leaves 1 to 120"):
            launch.encoded(*given, [longest, {"prompt": text}])
    with pytest.raises(ValueError, match=r"prompt ..{'role': 'user', 'content': '1+\" has 121 tok"):
        launch.encoded(*given, [{"prompt": [{"role": "user", "content": "1" * 121}]}])


def test_a_chat_is_trained_on_or_refused_before_the_model_loads(start, tiny_chat, tmp_path, monkeypatch):
    """Not at the first step, because the template of this model takes no system message."""
    (tmp_path / "mine.py").write_text(
        "def problems():\n    return [{'n': str(n)} for n in range(40)]\n"
        "def prompt(problem):\n    return [{'role': 'system', 'content': '1+1'},\n"
        "            {'role': 'user', 'content': problem['n']}]\n"
        "def reward(problem, text):\n    return float(len(text))\n")
    assert start("--task", tmp_path / "mine.py", "--steps", 1) == 0
    asked = runs.jsonl(tmp_path / "run/samples.jsonl")
    assert all(s["prompt"][0] == {"role": "system", "content": "1+1"} for s in asked)
    assert runs.show([tmp_path / "run"]).count("| [{'role': 'system', 'content': '1+1'}, ") == 2
    refuses = shutil.copytree(tiny_chat, tmp_path / "refuses")
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}1"
    (refuses / "chat_template.jinja").write_text(template)
    monkeypatch.setattr(launch, "load", None)
    with pytest.raises(ValueError, match="takes no such chat, so write it as one user message: no system$"):
        start("--task", tmp_path / "mine.py", "--model", refuses)


def test_a_tokenizer_that_is_larger_than_the_model_is_told(tiny_chat):
    """Otherwise its tokens cause an index error, on a GPU a failed assertion that ends the process."""
    source = checkpoint.open(str(tiny_chat))
    smaller, task = copy.deepcopy(source.config), Task([], [], operator.itemgetter("prompt"), None)
    smaller.vocab_size = 3
    with pytest.raises(ValueError, match="token [0-9]+ of the prompt '12', and the model ends at 3: take"):
        launch.encoded(train.Config(), smaller, task, source.tokenizer(), [{"prompt": "12"}])
