"""What a run asks and how it judges: prompts, chat templates, rewards; and the ranks that share it.

python -m pytest tests/test_environment.py
"""

import re
import shutil
import socket
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import FLAGS, ROOT, TIMINGS, Command, lines, main
from matplotlib.figure import Figure
from safetensors.torch import save_file
from torch.distributed.run import main as torchrun

from tasks import Task
from tools import report, weights
from tools.environment import load_environment, notes
from tools.flags import Config
from tools.ranks import join_ranks


def asks(train=("1",), held_out=("2",)):
    """→ a Task of these prompts."""
    problems = [[{"prompt": text} for text in texts] for texts in (train, held_out)]
    return Task(*problems, itemgetter("prompt"), None)


def loaded(folder, task=None, **flags):
    """→ the Environment that train.py makes of a model's folder and a Task."""
    config = Config(**dict(max_new_tokens=8) | flags)
    return load_environment(config, task or asks(), weights.open(str(folder)))


@pytest.fixture
def model(tiny_chat, tmp_path):
    """A copy of the tiny model without its chat template. A character is a token."""
    template = shutil.ignore_patterns("*.jinja")
    return Path(shutil.copytree(tiny_chat, tmp_path / "model", ignore=template))


@pytest.fixture
def mine(tmp_path):
    """mine(code) → the file of a task whose code may define a reward, or problems of its own."""

    def write(code):
        path = tmp_path / "mine.py"
        problems = "problems = lambda: [{'prompt': str(n)} for n in range(40)]"
        path.write_text(f"import os\n{problems}\nreward = lambda problem, text: 0\n{code}")
        return path

    return write


# --- prompts


def test_a_prompt_that_the_model_cannot_take_is_named_by_its_text(model):
    """Without a chat template an empty text has no tokens. The context is 128 tokens, 8 of them for
    the answer. A token beyond the vocabulary would end a process on a GPU.
    """
    environment = loaded(model)

    def encoded(prompt):
        return environment.encode_prompts([{"prompt": "1"}, {"prompt": prompt}])[1]

    assert len(encoded("1" * 120)) == 120
    chat = [{"role": "user", "content": "1" * 121}]
    for prompt, count in (("", 0), ("1" * 121, 121), (chat, 121)):
        text = re.escape(repr(str(prompt)[:60]))
        with pytest.raises(ValueError, match=f"{text} has {count} tokens: .* 1 to 120 of "):
            encoded(prompt)
    last = encoded("12")[-1]
    environment.model_config.vocab_size = last + 1
    assert encoded("12")
    environment.model_config.vocab_size = last
    with pytest.raises(ValueError, match=f"token {last} of the prompt '12', .* {last}: "):
        encoded("12")


def test_every_prompt_is_read_before_the_first_step(model):
    """Not only those with the most characters: the one that has no tokens is the shortest."""
    short = ["1" * 100] * 140
    for where in ("train", "held_out"):
        with pytest.raises(ValueError, match="'' has 0 tokens"):
            loaded(model, asks(**{where: [*short, "", *short]}))


@pytest.mark.parametrize("flags", [{}, dict(steps=0, preflight=True)])
def test_an_evaluation_reads_no_prompt_to_train_on(tiny_chat, flags):
    """With --steps 0 they may be too long for this --max-new-tokens."""
    task = asks(["1" * 200])
    assert loaded(tiny_chat, task, steps=0).task == task
    with pytest.raises(ValueError, match="202 tokens"):
        loaded(tiny_chat, task, **flags)


def test_an_environment_is_what_the_flags_say(tiny_chat):
    """A nucleus is evaluation's alone. A problem that is left out of it is not trained on."""
    task = asks(["1", "11"], ["2", "3"])
    flags = dict(temperature=0.5, seed=7, eval_top_p=0.5, eval_problems=1)
    environment = loaded(tiny_chat, task, **flags)
    assert environment.task == task._replace(held_out=task.held_out[:1])
    assert environment.longest_prompt == 4 and environment.params == (8, [2], 0.5, 1.0, 7)


def test_longer_prompts_are_dropped_and_counted(tiny_chat, capsys):
    """Also one that is too long for the context, but never all. A prompt has its text, a start and
    "=".
    """
    task = asks(["11", "111", "1111", "1" * 126], ["111"])
    kept = loaded(tiny_chat, task, max_prompt_tokens=5).task
    assert (kept.train, kept.held_out) == (task.train[:2], task.held_out)
    said = capsys.readouterr().out
    assert " 2 of 4 (train)" in said and " 1 of 1 (held_out)" in said
    short = asks(["11"], [])
    assert loaded(tiny_chat, short, max_prompt_tokens=4).task == short
    for most, problems in ((3, short), (4, task)):  # none to train on; none held out
        with pytest.raises(ValueError, match=f"--max-prompt-tokens {most}: "):
            loaded(tiny_chat, problems, max_prompt_tokens=most)


def test_arguments_reach_the_chat_template_or_are_refused(model):
    """One that the template does not read would do nothing."""
    with pytest.raises(ValueError, match="--template-kwargs .*chat_template is not set"):
        loaded(model, template_kwargs='{"thinks": true}')
    template = "{{ bos_token }}{{ messages[0]['content'] }}{% if thinks %}?{% endif %}="
    (model / "chat_template.jinja").write_text(template)
    lengths = [
        loaded(model, template_kwargs=text).longest_prompt
        for text in ("", '{"thinks": false}', '{"thinks": true}')
    ]
    assert lengths == [3, 3, 4]
    for text in (
        '{"think": true}',
        '{"content": "2"}',
        '{"messages": []}',
        '{"thinks": 1, "add_generation_prompt": false}',
        '{"tokenize": 1}',
        '{"strftime_now": 1}',
    ):
        with pytest.raises(ValueError, match=r"--template-kwargs {.* 'thinks'\]$"):
            loaded(model, template_kwargs=text)
    for text in ("[1]", "{", "3", "null", "[" * 100_000):
        with pytest.raises(ValueError, match=f"--template-kwargs {re.escape(text)} is no JSON"):
            loaded(model, template_kwargs=text)


# --- what is logged and told


def test_the_named_parts_of_a_reward_are_logged_and_drawn(mine, start, tmp_path, monkeypatch):
    task = mine("reward = lambda text, finished: {'length': len(text), 'ended': finished}")
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    assert start("--task", task, "--overlong", "none", "--steps", 2, "--eval-problems", 0) == 0
    for record in lines(tmp_path / "run"):
        assert record["reward/ended"] == record["finished"]
    drawn = {curve.get_label() for curve in figures[0].axes[0].lines}
    assert {"reward/length", "reward/ended"} <= drawn


@pytest.mark.parametrize(
    "case",
    [
        '"HuggingFaceTB/SmolLM2-135M-Instruct" is smollm2',
        '"HuggingFaceTB/SmolLM2-135M" is not smollm2',
        '"Qwen/Qwen2.5-7B" is /models/qwen2.5-7b/',
        '"Qwen/Qwen2.5-7B" is not Qwen/Qwen2.5-7B-Instruct',
        '"Qwen/Qwen2.5-7B" is /hub/models--Qwen--Qwen2.5-7B/snapshots/0a1b/',
        '"Qwen/Qwen2.5-7B-Instruct" is /m/qwen2.5-7b-instruct-q4_k_m.gguf',
        '"unsloth/Llama-3.2-1B" is /m/Llama-3.2-1B.F16.gguf',
        "null is smollm2",
        '["a"] is not smollm2',
    ],
)
def test_an_adapter_of_another_base_model_is_told(tmp_path, case):
    base, name = re.split(" is (?:not )?", case)
    (tmp_path / "adapter_config.json").write_text(f'{{"base_model_name_or_path": {base}}}')
    save_file({}, tmp_path / "adapter_model.safetensors")
    said = notes(SimpleNamespace(inexact=False), name, "nvfp4", str(tmp_path))
    assert ["not on" in note for note in said] == [True] * ("is not" in case)


# --- several ranks


def ranks(count=2):
    """→ the environment variables that torchrun would give to each of its processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(count))
    return [meeting | dict(RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]


@pytest.mark.parametrize(
    "device, wrong",
    [
        ("cpu", dict(RANK="2")),
        ("cpu", dict(RANK="-1")),
        ("cpu", dict(RANK="a")),
        ("cpu", dict(WORLD_SIZE="")),
        ("cuda", dict(LOCAL_RANK="")),
    ],
)
def test_a_rank_that_is_not_among_the_ranks_does_not_wait_for_them(monkeypatch, device, wrong):
    for name, value in (ranks()[1] | wrong).items():
        monkeypatch.setenv(name, value)
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}={wrong[name]}.* torchrun"):
        join_ranks(device)


@pytest.mark.parametrize("count", [1, 2])
def test_torchrun_does_not_take_a_pointless_preflight_for_a_crash(tiny_chat, tmp_path, count):
    """It would print a traceback for any code but 0."""
    flags = *FLAGS, "--model", tiny_chat, "--preflight", "--overlong", "none"
    jobs = [Command(tmp_path, *flags, env=env) for env in ranks(count)]
    assert [job.code for job in jobs] == [0] * count, jobs[0].said


# train.py, which at its very end names its threads
THREADS = f"""
import atexit, pathlib, runpy, sys
sys.path.insert(0, "{ROOT}")
@atexit.register
def say():
    names = [t.read_text().strip() for t in pathlib.Path("/proc/self/task").glob("*/comm")]
    print("threads:", *names, flush=True)
runpy.run_path("{ROOT}/train.py", run_name="__main__")
"""


def test_two_ranks_train_as_one_process(tiny_chat, tmp_path, capfd):
    """torchrun splits prompts and sums gradients, and one rank logs. Records are compared up to the
    first update, because AdamW makes a full step of a gradient that is only rounding.

    A thread of gloo that outlives its group releases a tensor while Python ends, which aborts a
    process now and then: a module imported after the group began may hold it (default arguments
    of torch do).
    """
    script, folder = tmp_path / "script.py", tmp_path / "two"
    script.write_text(THREADS)
    flags = *FLAGS, "--steps", "2", "--eval-problems", "5", "--model", str(tiny_chat), "--out"
    torchrun(["--standalone", "--nproc-per-node=2", str(script), *flags, str(folder)])
    said = capfd.readouterr().out
    assert main(*flags, tmp_path / "one") == 0
    one, two = report.read(tmp_path / "one"), report.read(folder)
    assert list(one) == list(two) and len(lines(folder)) == len(two)
    assert one["step", 1]["grad_norm"]  # the first gradient
    asked = [
        [r["prompt"] for r in report.jsonl(path / "eval.jsonl")]
        for path in (tmp_path / "one", folder)
    ]
    assert asked[0] == asked[1] and len(asked[0]) == 2 * 5  # of all ranks, in order
    skipped = {"kind", *TIMINGS}
    for where in list(one)[:3]:
        want = {key: value or 0 for key, value in one[where].items() if key not in skipped}
        assert {key: two[where][key] or 0 for key in want} == pytest.approx(want, rel=1e-4)
    assert said.count("run folder") == 1
    assert len(re.findall("threads: (?!.*gloo)", said)) == 2
    assert main("--resume", folder, "--steps", 3) == 0  # by one process
    records = report.read(folder)
    assert 0 <= records["step", 0]["rollout_idle"] < 1 and "rollout_idle" not in records["step", 2]


def test_a_rank_that_fails_ends_the_job_with_its_error(tiny_chat, mine, tmp_path):
    """The other rank notices, and does not wait for ever."""
    task = mine("def reward(problem, text):\n    assert os.environ['RANK'] == '0', 'it fell over'")
    flags = *FLAGS, "--model", tiny_chat, "--task", task, "--out", tmp_path / "run"
    first, second = (Command(tmp_path, *flags, env=env) for env in ranks())
    assert first.code and second.code  # neither 0 nor None
    assert "it fell over" in second.said and "it fell over" not in first.said


def disagree(tmp_path, *flags):
    """Start a rank in each of the folders 0 and 1. Both must end, each in one sentence."""
    jobs = []
    for rank, env in enumerate(ranks()):
        there = tmp_path / str(rank)
        there.mkdir(exist_ok=True)
        code = f"import os; os.chdir({str(there)!r})"
        jobs.append(Command(tmp_path, *flags, code=code, env=env))
    for job in jobs:
        assert job.code == 2 and re.fullmatch("train.py: [^\n]+\n", job.said), job.said
    assert "the ranks do not agree" in jobs[0].said + jobs[1].said


@pytest.mark.parametrize(
    "code",
    [
        "problems = lambda: [{'prompt': str(n) + os.environ['RANK']} for n in range(40)]",
        "1 / int(os.environ['RANK'])",
    ],
)
def test_ranks_with_different_problems_do_not_train(tiny_chat, mine, tmp_path, code):
    """Or with none, because one has failed."""
    disagree(tmp_path, *FLAGS, "--model", tiny_chat, "--task", mine(code), "--out", "run")


def test_ranks_that_find_different_folders_do_not_train(tiny_chat, tmp_path, whole):
    """Another checkpoint; a run where a new one shall begin. The first rank's stays as it is."""
    for rank in "01":
        shutil.copytree(whole, tmp_path / rank / "run")
    (tmp_path / "1/run/checkpoint.safetensors").unlink()
    disagree(tmp_path, "--resume", "run", "--steps", 8)
    disagree(tmp_path, *FLAGS, "--model", tiny_chat, "--out", "run")
    config = tmp_path / "0/run/config.json"
    assert config.read_bytes() == (whole / "config.json").read_bytes()
