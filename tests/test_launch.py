"""python -m pytest tests/test_launch.py"""

import dataclasses
import json
import math
import operator
import re
import shutil
import signal
import socket
import sys
import types
from pathlib import Path

import pytest
import torch
from command import FLAGS, ROOT, TIMINGS, Command, lines, main
from matplotlib.axes import Axes
from torch.distributed.run import main as torchrun

import lora
import train
from rollout import Sampler
from tasks import Task
from tools import launch, report, weights
from tools.adapter import other_base
from tools.flags import FIELDS, Config, check, parse

# what the run of an adapter was trained with; each differs from its default
SCORED = dict(
    model="/there/model",
    quant="bf16",
    rank=4,
    alpha=8,
    task="gsm8k",
    data="/there/data.jsonl",
    test="a/b:test",
    max_new_tokens=99,
    temperature=0.5,
    eval_problems=9,
    eval_samples=3,
    eval_top_p=0.5,
    seed=7,
)


@pytest.fixture
def ended(tmp_path):
    """ended(flags) → a folder with an adapter's folder, the config, the (empty) log and the
    checkpoint of a run: enough to parse --resume and --adapter."""

    def make(**flags):
        folder = tmp_path / "ended"
        (folder / "adapter").mkdir(parents=True)
        (folder / "metrics.jsonl").touch()
        (folder / "checkpoint.safetensors").touch()
        (folder / "config.json").write_text(json.dumps(vars(Config()) | flags))
        return str(folder)

    return make


@pytest.fixture
def command(tiny_chat, tmp_path, monkeypatch, capsys):
    """command(flags) is python train.py in this process → its exit code and its stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*flags):
        arguments = ["train.py", "--model", str(tiny_chat), *FLAGS, *flags]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as stop:
            launch.main(train.train, train.trial)
        return stop.value.code, capsys.readouterr().err

    return run


# --- what the flags become


def flag(name):
    return f"--{name.replace('_', '-')}"


def test_every_field_is_a_flag_with_its_default_and_a_help(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "999")
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"])
    said = capsys.readouterr().out
    for name, field in FIELDS.items():
        entry = rf"^ +{flag(name)}(, --no-\S+| [A-Z_]+)\s+[^(\s].* \(default: {field.default}\)$"
        assert re.search(entry, said, re.M), name


def test_every_flag_of_a_number_or_a_switch_sets_its_field():
    """In the field's type. Without flags, parse gives the defaults."""
    values, given = {}, []
    for f in dataclasses.fields(Config):
        if f.type is bool:
            values[f.name] = not f.default
            given.append(f"--no-{f.name}" if f.default else flag(f.name))
        elif f.type is not str:
            values[f.name] = {"warmup": 2}.get(f.name, 3 if f.type is int else 0.5)
            given.append(f"{flag(f.name)}={values[f.name]}")
    want = Config(**values)
    assert repr(parse(given)) == repr(want)  # 3 is not 3.0
    assert parse([]) == Config()


@pytest.mark.parametrize("flags", ["--steps x", "--steps .5", "--aqn=no", "--lr"])
def test_a_wrong_type_stops_with_2(flags, capsys):
    """In two lines, without the list of all flags."""
    with pytest.raises(SystemExit, match="2"):
        parse(flags.split())
    _, error = capsys.readouterr().err.splitlines()
    assert flags[:4] in error


@pytest.mark.parametrize(
    "case",
    [
        "--stepz=3 | --stepz=3; the nearest are --steps, ",
        "--lr 1 --clip 2 | --clip; the nearest are --clip-low, --clip-high, ",
        "--max_new_tokens 9 | --max_new_tokens; the nearest are --max-new-tokens, ",
        "gsm8k | gsm8k; the nearest are --task, ",
    ],
)
def test_an_unknown_flag_names_those_nearest_to_it(case):
    """A prefix of a flag, or an underscore in it, counts as unknown."""
    flags, near = case.split(" | ")
    with pytest.raises(ValueError, match=f"^there is no {near}"):
        parse(flags.split())


@pytest.mark.parametrize(
    "names, least, most, below",
    [
        ("steps warmup resample eval_problems", 0, 10**9, -1),
        (
            "prompts max_new_tokens updates_per_step eval_every "
            "eval_samples save_every micro_tokens alpha",
            1,
            10**9,
            0,
        ),
        ("group_size", 2, 10**9, 1),
        ("sigma_stages", 3, 10**9, 2),
        ("rank", 1, 256, 0),
        ("seed", 0, 2**32 - 1, -1),
        ("beta clip_low clip_high lr weight_decay", 0, 10**9, -0.1),
        ("temperature max_grad_norm sigma_start sigma_end", 1e-9, 10**9, 0.0),
        ("eval_top_p", 1e-9, 1, 0.0),
    ],
)
def test_a_number_outside_its_range_is_refused_by_name_and_value(names, least, most, below):
    """The largest --clip-high and --max-grad-norm are as good as none."""
    for name in names.split():
        for value in (least, most):
            assert check(Config(**{"steps": 0, name: value}))
        for value in (below, math.nan, math.inf):
            with pytest.raises(ValueError, match=f"^{flag(name)} {value} .* {least} to {most}$"):
                check(Config(**{name: value}))


@pytest.mark.parametrize(
    "words", ["--steps 16 --warmup 100", "--warmup 16", "--steps 1 --warmup 1"]
)
def test_a_warm_up_that_never_ends_is_refused(words):
    with pytest.raises(ValueError, match="^--warmup [0-9]+ must be under --steps [0-9]+"):
        parse(words.split())


@pytest.mark.parametrize(
    "words, idle",
    [
        ("--no-aqn --sigma-start 1 --sigma-stages 4", "sigma_start sigma_stages"),
        ("--no-aqn --sigma-schedule cosine --sigma-end 1e-3", "sigma_schedule sigma_end"),
        ("--sigma-target .1", "sigma_target"),
        ("--sigma-schedule adaptive --sigma-end 1e-3 --sigma-stages 4", "sigma_end sigma_stages"),
        ("--sigma-schedule adaptive --sigma-start 1 --sigma-target .1", ""),
        ("--eval-problems 0 --eval-samples 3", "eval_samples"),
        ("--eval-problems 0 --eval-top-p .5", "eval_top_p"),
        ("--clip-low .1 --clip-high .3", "clip_low clip_high"),
        ("--clip-high .3 --correction tis --loss gspo", "clip_high"),
        ("--clip-high .3 --loss cispo --updates-per-step 2", "clip_high"),
        ("--steps 0 --lr 1 --loss grpo --prompts 4", "lr loss prompts"),
        ("--memory-gb 10 --device cpu", "memory_gb"),
        ("--clip-high .3 --correction bypass", ""),
        ("--clip-low .3 --updates-per-step 2", ""),
        ("--sigma-start 1 --eval-samples 3 --lr 1 --steps 2", ""),
        ("--steps 0 --eval-samples 3 --seed 1 --device cpu", ""),
    ],
)
def test_a_flag_that_does_nothing_beside_the_others_is_named(words, idle, capsys):
    parse(words.split())
    warnings = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in warnings] == list(map(flag, idle.split()))


def test_the_longest_answer_depends_on_the_task():
    tasks = {"addition": 16, "gsm8k": 512, "math": 512, "mine.py": 512}
    assert {task: Config(task=task).max_new_tokens for task in tasks} == tasks
    assert Config(task="gsm8k", max_new_tokens=16).max_new_tokens == 16


@pytest.mark.parametrize(
    "case",
    [
        "--quant nonsense | bf16",
        "--task nonsense | gsm8k",
        "--loss nonsense | cispo",
        "--correction nonsense | bypass",
        "--overlong nonsense | mask",
        "--schedule nonsense | cosine",
        "--sigma-schedule nonsense | logarithmic",
        "--device cuda:1 | cpu",
        "--prompts 8 | ranks",
        "--loss gspo --correction bypass | none or tis",
        "--task mine.py --data some.jsonl | --data",
        "--task mine.py --test some.jsonl | --test",
        "--task mine.py --operands 1-9 | --operands",
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name_with_what_can(monkeypatch, case):
    """Three ranks share the prompts. A task of one's own would ignore data and operands."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    flags, remedy = case.split(" | ")
    shared = ["--prompts", "9", *flags.split()]
    with pytest.raises(ValueError, match="^" + " ".join(shared[2:4])) as refused:
        parse(shared)
    assert remedy in str(refused.value) and "\n" not in str(refused.value)


def test_paths_are_stored_absolute(tmp_path, monkeypatch):
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    names = "model", "data", "test", "adapter"
    config = parse(["--task=gsm8k", *(f"--{n}=mine.py" for n in names)])
    assert {getattr(config, name) for name in names} == {str(tmp_path / "mine.py")}


# --- flags that a run brings


@pytest.mark.parametrize("name", ["ended", "ended/adapter/", "ended/adapter-best"])
def test_an_adapter_of_a_run_is_used_as_it_was_trained(ended, tmp_path, monkeypatch, capsys, name):
    """What a score depends on is that run's, unless a flag says otherwise, and one line says so.
    Its lr and the paths of its own are not."""
    folder = ended(**SCORED, lr=1.0, out="/there", adapter="/there/adapter")
    Path(folder, "adapter-best").mkdir()
    monkeypatch.chdir(tmp_path)
    given = dict(quant="nvfp4", seed=0, steps=0)
    flags = f"--adapter {name} --quant nvfp4 --seed=0 --steps 0"
    config = parse(flags.split())
    adapter = f"{tmp_path}/{name}" if "best" in name else f"{folder}/adapter"
    assert config == Config(**SCORED | given, adapter=adapter)
    said = capsys.readouterr().out
    assert said.startswith(f"from {folder}/config.json: ") and said.count("\n") == 1
    for key, value in SCORED.items():
        assert (f" {flag(key)} {value}" in said) == (key not in given)


def test_an_adapter_from_elsewhere_brings_no_flags(tmp_path, capsys):
    """Even in a folder with a config.json, if that is a model's."""
    adapter = tmp_path / "peft"
    adapter.mkdir()
    (tmp_path / "config.json").write_text('{"model_type": "llama", "temperature": 0.5}')
    config = parse(["--adapter", str(adapter)])
    assert config == Config(adapter=str(adapter)) and not capsys.readouterr().out


@pytest.mark.parametrize(
    "given",
    [
        "--model other",
        "--quant rtn",
        "--rank 3",
        "--alpha 3",
        "--task addition",
        "--data x.jsonl",
        "--test x.jsonl",
        "--operands 2-9",
        "--out other",
        "--adapter other",
        "--updates-per-step 2",
        "--eval-problems 99",
        "--seed 8",
    ],
)
def test_a_resume_keeps_what_its_checkpoint_was_trained_on(ended, given):
    """Refused before anything is loaded. Other problems would have accuracies that the best one
    so far cannot be compared with."""
    folder = ended(**SCORED)
    with pytest.raises(ValueError, match=f"^{given} beside --resume {folder}: "):
        parse(["--resume", folder, *given.split()])


def test_a_run_that_counted_updates_as_steps_resumes_if_it_made_one_a_rollout(ended):
    """Until November 2026 config.json named them updates_per_rollout."""
    folder = ended(steps=8)
    flags = vars(Config(steps=8)) | dict(updates_per_rollout=1)
    del flags["updates_per_step"]
    Path(folder, "config.json").write_text(json.dumps(flags))
    assert parse(["--resume", folder]).steps == 8


def test_a_resume_takes_the_runs_own_flags_and_those_given_beside_it_win(
    ended, tmp_path, monkeypatch
):
    """The run's own value may be given again, a path from anywhere. An integer in config.json is
    accepted for a float."""
    data = tmp_path / "data.jsonl"
    data.touch()
    own = SCORED | dict(data=str(data), overlong="penalty", beta=1, clip_low=0.1)
    folder = ended(**own)
    monkeypatch.chdir(folder)
    want = Config(**own | dict(lr=1.0, prompts=4), resume=folder, out=folder)
    given = ["--resume", folder, "--lr", "1", "--prompts=4"]
    assert parse(given) == want
    again = ["--data", "../data.jsonl", "--rank", "4", "--model", own["model"], "--out", folder]
    assert parse(given + again) == want


@pytest.mark.parametrize("name", ["--resume", "--adapter"])
def test_a_program_that_a_stored_config_names_runs_only_if_it_is_named_again(
    ended, tmp_path, name, monkeypatch
):
    """Whoever made the folder could otherwise run code by it."""
    evil = tmp_path / "evil.py"
    evil.write_text("raise KeyboardInterrupt('it ran')")
    folder = ended(task=str(evil), data="", operands="")
    with pytest.raises(ValueError, match=f"{evil}.* add --task {evil}"):
        main(name, folder, "--steps", 0)
    monkeypatch.chdir(tmp_path)
    for spelling in (evil, "evil.py", "./evil.py"):
        assert parse([name, folder, "--task", str(spelling)]).task == str(evil)


def test_another_task_does_not_inherit_the_operands_and_the_data_of_an_adapters_run(
    ended, tmp_path
):
    mine = tmp_path / "mine.py"
    mine.touch()
    folder = ended(data="", operands="3-9", temperature=0.5)
    for task in (str(mine), "addition"):
        config = parse(["--adapter", folder, "--task", task])
        assert (config.operands, config.temperature) == ("", 0.5)
    assert parse(["--adapter", folder, "--task", "multiplication"]).operands == "3-9"


def test_only_the_first_rank_tells_where_flags_come_from(ended, monkeypatch, capsys):
    folder = ended(data="")
    for rank, told in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        parse(["--adapter", folder])
        assert len(capsys.readouterr().out.splitlines()) == told


@pytest.mark.parametrize("count", [1, 2])
def test_torchrun_does_not_take_a_pointless_preflight_for_a_crash(tiny_chat, tmp_path, count):
    """It would print a traceback for any code but 0. One process without torchrun says 3."""
    flags = *FLAGS, "--model", tiny_chat, "--preflight", "--overlong", "none"
    jobs = [Command(tmp_path, *flags, env=env) for env in ranks(count)]
    assert [job.code for job in jobs] == [0] * count, jobs[0].said
    assert main(*flags) == 3


@pytest.mark.parametrize(
    "base, model, other",
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2", False),
        ("Qwen/Qwen2.5-7B", "/models/qwen2.5-7b", False),
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", True),
        ("/tmp/base", "smollm2", True),
        ("", "smollm2", False),
        ("HuggingFaceTB/SmolLM2-135M", "smollm2", True),
        ("Qwen/Qwen2.5-7B", "/hub/models--Qwen--Qwen2.5-7B/snapshots/0a1b/", False),
        ("Qwen/Qwen2.5-7B", "/hub/models--Qwen--Qwen2.5-7B-Instruct/snapshots/0a1b", True),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct-GGUF/q-q4_k_m.gguf", True),
        ("Qwen/Qwen2.5-7B-Instruct", "/m/qwen2.5-7b-instruct-q4_k_m.gguf", False),
        ("unsloth/Llama-3.2-1B", "/m/Llama-3.2-1B.F16.gguf", False),
        (None, "smollm2", False),
        (["a"], "smollm2", True),
    ],
)
def test_an_adapter_of_another_base_model_is_told(tmp_path, monkeypatch, base, model, other):
    settings = {"base_model_name_or_path": base}
    monkeypatch.setattr(lora, "read_adapter", lambda folder: (settings, {}))
    assert other_base("adapter", model) == (str(base) if other else "")


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "Expecting"),
        ("[1]", "mapping"),
        ('{"steps": null, "lr": 1}', "NoneType"),
        ('{"steps": 2.5}', "'steps': 2.5"),
        ('{"clip_low": "0.1"}', "'clip_low': '0.1'"),
        ('{"steps": 1e999}', "infinity"),
        ('{"scale": "group"}', "'scale'"),
        ('{"updates_per_rollout": 2, "steps": 8}', "2 updates of a rollout as 2 steps; now "),
        (None, "No such file"),
    ],
)
def test_a_config_that_is_damaged_or_of_another_version_is_named_with_the_way_on(
    ended, text, words
):
    """For --resume and --adapter."""
    folder = ended()
    config = Path(folder, "config.json")
    config.write_text(text) if text else config.unlink()
    for name in ("--resume", "--adapter"):
        with pytest.raises(ValueError, match=f"^{config} .*{words}.*: .* another run with --ad"):
            parse([name, folder])


def test_a_run_of_ones_own_task_goes_on_and_is_scored_from_anywhere(
    start, tmp_path, monkeypatch, capsys
):
    """Another folder has another file of the task's name. The scores, greedy and sampled, are those
    at the end of the run, to the last digit. A bound on the problems to evaluate leaves those to
    train on as they are, and the run says both."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine.py").write_text("1 / 0")
    (tmp_path / "mine.py").write_text(
        "problems = lambda: [{'prompt': str(n)} for n in range(40)]\n"
        "reward = lambda finished, text: len(text)"
    )
    monkeypatch.chdir(tmp_path)
    flags = "--eval-samples", 2, "--eval-problems", 5, "--seed", 3
    assert start("--task", "mine.py", "--steps", 1, *flags) == 0
    said = capsys.readouterr().out
    assert "30 problems to train on, 5 held out" in said and "evaluating 5 problems" in said
    monkeypatch.chdir("there")
    run = tmp_path / "run"
    mine = "--task", "../mine.py"
    assert main("--resume", run, "--steps", 2, *mine) == 0
    score = "--steps", 0, "--device", "cpu", "--out", "score", "--adapter", run
    assert main(*score, *mine) == 0
    want, (got,) = report.read(run)["eval", 2], report.read("score").values()
    scores = operator.itemgetter("eval_greedy", "eval_greedy_loose", "eval_sampled", "problems")
    assert scores(got) == scores(want) and got["problems"] == 5
    assert 0 < got["eval_greedy"] != got["eval_sampled"]


# --- what a command says and refuses


def interrupted(*_, **__):
    signal.raise_signal(signal.SIGINT)


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 GiB")


@pytest.mark.parametrize(
    "where, name, ends, code, said",
    [
        (launch, "load", interrupted, 130, ""),
        (Sampler, "generate", interrupted, 130, "\nstopped after 0 steps; go on with: .*\n"),
        (launch, "load", out_of_memory, 2, "train.py: out of memory: .*--max-new-tokens.*\n"),
    ],
)
def test_a_stop_before_the_first_step_has_no_traceback(
    command, monkeypatch, where, name, ends, code, said
):
    """Ctrl-C while the model is loaded, or the first evaluation samples; too little memory."""
    monkeypatch.setattr(where, name, ends)
    got, error = command()
    assert got == code and re.fullmatch(said, error)


@pytest.mark.parametrize(
    "case",
    [
        "--model /nonexistent | /nonexistent is neither",
        "--resume {tmp}/nowhere | nowhere",
        "--task gsm8k --data {tmp}/missing.jsonl | missing.jsonl",
        "--task gsm8k | --data FILE.jsonl",
        "--operands 3 | --operands 3",
        "--task gsm8k --test {tmp}/missing.jsonl | needs problems: give --data",
        "--task gsm8k --test {tmp}/missing.jsonl --steps 0 | missing.jsonl",
        "--test {tmp}/file | leave out --data and --test",
        "--out {tmp}/file | file",
        "--adapter {tmp} | adapter_config.json",
        "--max-new-tokens 129 | --max-new-tokens 129 leaves 1 to -1",
        "--max-new-tokens 127 | the prompt '",
        "--preflight --resume {tmp}/ended | --adapter {tmp}/ended/adapter",
        "--task gsm8k --data {tmp}/long.jsonl | the prompt '1+1+1+",
        "--task gsm8k --data {tmp}/half.jsonl | half.jsonl, line 5: 'utf-8'",
    ],
)
def test_what_a_user_can_get_wrong_is_one_line_and_exit_code_2(
    command, tiny_chat, tmp_path, ended, case
):
    flags, words = case.format(tmp=tmp_path).split(" | ")
    (tmp_path / "file").write_text("not a folder")
    ended(model=str(tiny_chat), rank=4)
    good = [json.dumps({"question": f"{i}+1", "answer": f"#### {i + 1}"}) + "\n" for i in range(5)]
    (tmp_path / "long.jsonl").write_text("".join(good).replace("4+1", "1+" * 99 + "1"))
    (tmp_path / "half.jsonl").write_text("".join(good).replace("4+1", r"half an emoji: \ud83d"))
    code, error = command(*flags.split())
    assert code == 2 and words in error
    assert error.startswith("train.py: ") and error.count("\n") == 1


def test_a_prompt_that_the_model_cannot_take_is_named_by_its_text(tiny_chat):
    """Without a chat template an empty text has no tokens. The context is 128 tokens, 8 of them for
    the answer. A token beyond the vocabulary would end a process on a GPU."""
    source = weights.open(str(tiny_chat))
    tokenizer, task = source.tokenizer(), Task([], [], operator.itemgetter("prompt"), None)
    tokenizer.chat_template = None
    environment = launch.Environment(task, tokenizer, [], source.config, max_new_tokens=8)

    def encoded(*prompts):
        return environment.encode_prompts([{"prompt": prompt} for prompt in prompts])

    longest = "1" * 120
    assert [len(ids) for ids in encoded(longest, "1")] == [120, 1]
    chat = [{"role": "user", "content": "1" * 121}]
    for prompt, count in (("", 0), ("1" * 121, 121), (chat, 121)):
        with pytest.raises(ValueError, match=f"has {count} tokens: .* leaves 1 to 120") as refused:
            encoded(longest, prompt)
        assert f"prompt {str(prompt)[:60]!r} has" in str(refused.value)
    last = encoded("12")[0][-1]
    source.config.vocab_size = last + 1
    assert encoded("12")
    source.config.vocab_size = last
    with pytest.raises(ValueError, match=f"token {last} of the prompt '12', .* ends at {last}: "):
        encoded("12")


def environment_of(folder, task=None, **flags):
    """→ the Environment that train.py would make of a model's folder and a Task."""
    task = task or Task([{"prompt": "1"}], [{"prompt": "2"}], operator.itemgetter("prompt"), None)
    config = Config(**dict(model=str(folder), max_new_tokens=8) | flags)
    return launch.load_environment(config, task, weights.open(str(folder)))


@pytest.mark.parametrize("where", ["train", "held_out"])
def test_every_prompt_is_read_before_the_first_step(tiny_chat, where):
    """Not only those with the most characters: the one that has no tokens is the shortest."""
    short = [{"prompt": "1" * 100} for _ in range(140)]
    tokenizer = weights.open(str(tiny_chat)).tokenizer()
    problems = {"train": short, "held_out": short} | {where: [*short[:70], {"prompt": ""}, *short]}
    task = Task(**problems, prompt=operator.itemgetter("prompt"), reward=None)
    source = types.SimpleNamespace(
        tokenizer=lambda: tokenizer,
        stop_ids=lambda: [2],
        config=weights.open(str(tiny_chat)).config,
    )
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="prompt '' has 0 tokens"):
        launch.load_environment(Config(max_new_tokens=8), task, source)


@pytest.mark.parametrize("most, left", [(7, (3, 1)), (5, (2, 1)), (121, (3, 1))])
def test_longer_prompts_are_dropped_and_counted(tiny_chat, capsys, most, left):
    """Of those to train on and of those held out, and never all of them. A prompt has its text, a
    start and "="; one that does not fit into the context may be dropped, too."""
    train, held_out = [{"prompt": "1" * n} for n in (2, 3, 5)], [{"prompt": "1" * 3}]
    task = Task(train, held_out, operator.itemgetter("prompt"), None)
    kept = environment_of(tiny_chat, task, max_prompt_tokens=most).task
    assert (len(kept.train), len(kept.held_out)) == left
    said = capsys.readouterr().out
    assert f"keeps {left[0]} of 3 (train)" in said and f"keeps {left[1]} of 1 (held_out)" in said
    long = task._replace(train=[*train, {"prompt": "1" * 126}])
    with pytest.raises(ValueError, match="128 tokens: .* --max-prompt-tokens"):
        environment_of(tiny_chat, long)
    assert environment_of(tiny_chat, long, max_prompt_tokens=most).task.train == kept.train
    for most in (3, 4):  # no problem is left at all; none is held out
        with pytest.raises(ValueError, match=f"--max-prompt-tokens {most}: every prompt is longer"):
            environment_of(tiny_chat, task, max_prompt_tokens=most)
    no_test = task._replace(held_out=[])
    assert len(environment_of(tiny_chat, no_test, max_prompt_tokens=4).task.train) == 1


def test_an_evaluation_reads_no_prompt_to_train_on_and_counts_all(tiny_chat):
    """With --steps 0 they may be too long for this --max-new-tokens."""
    task = Task([{"prompt": "1" * 200}], [{"prompt": "2"}], operator.itemgetter("prompt"), None)
    assert environment_of(tiny_chat, task, steps=0).task == task
    for flags in (dict(steps=1), dict(steps=0, preflight=True)):
        with pytest.raises(ValueError, match="202 tokens"):
            environment_of(tiny_chat, task, **flags)


def test_a_stop_text_must_be_one_token(tiny_chat):
    assert environment_of(tiny_chat).stop_ids == [2]
    assert environment_of(tiny_chat, stop="=").stop_ids[1:] == environment_of(
        tiny_chat
    ).tokenizer.encode("=", add_special_tokens=False)
    assert environment_of(tiny_chat, stop="<unk>").stop_ids == [2, 0]
    for stop in ("12", "==", "1 ", "Z", "é"):  # the model has no Z, but "<unk>" for it
        with pytest.raises(ValueError, match=f"--stop '{stop}' is .* not one"):
            environment_of(tiny_chat, stop=stop)


def test_a_stop_text_ends_answers(start, tiny_chat, tmp_path):
    """And is no part of them."""
    (tmp_path / "mine.py").write_text(
        "problems = lambda: [{'prompt': str(n)} for n in range(40)]\n"
        "reward = lambda text, finished: '=' in text\n"
    )
    flags = "--task", tmp_path / "mine.py", "--steps", 2, "--eval-problems", 0
    assert start(*flags, "--overlong", "none") == 0
    other = tmp_path / "other"
    assert start(*flags, "--overlong", "none", "--stop", "=", "--out", other) == 0
    without, ended = (report.read(out)["step", 0] for out in (tmp_path / "run", other))
    assert without["reward"] > 0 and ended["reward"] == 0
    assert ended["finished"] > without["finished"]
    assert main("--resume", other, "--task", tmp_path / "mine.py", "--steps", 3) == 0
    assert report.read(other)["step", 2]["reward"] == 0
    with pytest.raises(ValueError, match="--stop 1 beside --resume"):
        main("--resume", other, "--task", tmp_path / "mine.py", "--stop", 1)


def test_arguments_reach_the_chat_template_or_are_refused(tiny_chat, tmp_path):
    """One that the template does not read would do nothing."""
    folder = shutil.copytree(tiny_chat, tmp_path / "model")
    template = "{{ bos_token }}{{ messages[0]['content'] }}{% if thinks %}?{% endif %}="
    (folder / "chat_template.jinja").write_text(template)
    problem = [{"prompt": "1"}]
    plain = environment_of(folder).encode_prompts(problem)
    off = environment_of(folder, template_kwargs='{"thinks": false}').encode_prompts(problem)
    thinks = environment_of(folder, template_kwargs='{"thinks": true}')
    assert plain == off and len(thinks.encode_prompts(problem)[0]) == len(plain[0]) + 1
    for given in (
        '{"enable_thinking": false}',
        '{"think": true}',
        '{"content": "2"}',
        '{"messages": []}',
        '{"thinks": 1, "add_generation_prompt": false}',
        '{"tokenize": 1}',
        '{"strftime_now": 1}',
    ):
        with pytest.raises(ValueError, match=r"--template-kwargs {.* it reads .*'thinks'\]$"):
            environment_of(folder, template_kwargs=given)
    for given in ("[1]", "{", "thinks", "3", "null", "[" * 100_000):
        with pytest.raises(ValueError, match=f"--template-kwargs {re.escape(given)} is no JSON"):
            environment_of(folder, template_kwargs=given)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="--template-kwargs .*chat_template is not set"):
        environment_of(folder, template_kwargs='{"thinks": true}')


def test_the_named_parts_of_a_reward_are_logged_and_drawn(tiny_chat, tmp_path):
    """Their sum trains."""
    (tmp_path / "mine.py").write_text(
        "problems = lambda: [{'prompt': str(n)} for n in range(40)]\n"
        "def reward(text, finished):\n    return {'length': len(text) / 8, 'ended': finished}\n"
    )
    task, out = tmp_path / "mine.py", tmp_path / "run"
    flags = *FLAGS, "--model", tiny_chat, "--out", out, "--task", task, "--overlong", "none"
    assert main(*flags, "--steps", 2) == 0
    for (kind, _), record in report.read(out).items():
        if kind == "step":
            total = record["reward/length"] + record["reward/ended"]
            assert record["reward"] == pytest.approx(total, rel=1e-4)
            assert record["reward/ended"] == pytest.approx(record["finished"], rel=1e-4)
    with pytest.MonkeyPatch.context() as patch:
        drawn = []
        plot = Axes.plot
        patch.setattr(Axes, "plot", lambda *a, **k: (drawn.append(k["label"]), plot(*a, **k))[1])
        report.plot([out])
    assert {"reward/length", "reward/ended"} <= set(drawn)


def test_a_chat_is_trained_on_or_refused_before_the_model_loads(
    start, tiny_chat, tmp_path, monkeypatch
):
    """Not at the first step, because the template of this model takes no system message. Without
    problems to evaluate on there is no evaluation."""
    (tmp_path / "mine.py").write_text(
        "def problems():\n    return [{'n': str(n)} for n in range(40)]\n"
        "def prompt(problem):\n    return [{'role': 'system', 'content': '1+1'},\n"
        "            {'role': 'user', 'content': problem['n']}]\n"
        "def reward(problem, text):\n    return float(len(text))\n"
    )
    flags = "--task", tmp_path / "mine.py", "--steps", 1, "--eval-problems", 0
    assert start(*flags) == 0
    assert list(report.read(tmp_path / "run")) == [("step", 0)]
    worst, best = report.jsonl(tmp_path / "run/samples.jsonl")
    assert worst["prompt"][0] == best["prompt"][0] == {"role": "system", "content": "1+1"}
    refuses = shutil.copytree(tiny_chat, tmp_path / "refuses")
    (refuses / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    monkeypatch.setattr(launch, "load", None)
    with pytest.raises(ValueError, match="one user message: no system$"):
        start(*flags, "--model", refuses)


# --- several ranks


def ranks(count=2):
    """→ the environment variables that torchrun would give to each of its processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = dict(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(count), OMP_NUM_THREADS="1"
    )
    return [meeting | dict(RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]


# train.py, which at its very end names its threads
THREADS = f"""
import atexit, pathlib, runpy
@atexit.register
def say():
    names = [t.read_text().strip() for t in pathlib.Path("/proc/self/task").glob("*/comm")]
    print("threads:", *names, flush=True)
runpy.run_path("{ROOT}/train.py", run_name="__main__")
"""


def test_two_ranks_train_as_one_process(start, tiny_chat, tmp_path, monkeypatch, capfd):
    """torchrun splits prompts and sums gradients, and one rank logs. Records are compared up to the
    first update, because AdamW makes a full step of a gradient that is only rounding.

    A thread of gloo that outlives its group releases a tensor while Python ends, which aborts a
    process now and then: a module imported after the group began may hold it (default arguments
    of torch do).
    """
    (tmp_path / "train_ranks.py").write_text(THREADS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder, flags = tmp_path / "two", ["--steps", 2, "--eval-problems", 5]
    job = "--standalone", "--nproc-per-node", 2, tmp_path / "train_ranks.py"
    torchrun([str(word) for word in (*job, *FLAGS, *flags, "--model", tiny_chat, "--out", folder)])
    said = capfd.readouterr().out
    assert start(*flags) == 0
    one, two = report.read(tmp_path / "run"), report.read(folder)
    assert list(one) == list(two) and len(lines(folder)) == len(two)
    assert one["step", 1]["grad_norm"]  # the first gradient
    for where in list(one)[:3]:
        for key in one[where].keys() - {"kind", *TIMINGS}:
            want = one[where][key] or 0  # None: not measured
            assert (two[where][key] or 0) == pytest.approx(want, rel=1e-4), (where, key)
    assert said.count("run folder") == 1 and said.count("step    0") == 1
    threads = re.findall("threads: (.+)", said)
    assert len(threads) == 2 and "gloo" not in "".join(threads)
    assert main("--resume", folder, "--steps", 3) == 0  # by one process
    records = report.read(folder)
    assert 0 <= records["step", 0]["rollout_idle"] < 1 and "rollout_idle" not in records["step", 2]


def test_a_rank_that_fails_ends_the_job_with_its_error(tiny_chat, tmp_path):
    """The other rank notices, and does not wait for ever."""
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "problems = lambda: [{'prompt': str(n)} for n in range(40)]\n"
        "def reward(problem, text):\n"
        "    assert os.environ['RANK'] == '0', 'rank 1 fell over'\n"
        "    return 0.0\n"
    )
    flags = "--task", tmp_path / "mine.py", "--eval-problems", 0, "--out", tmp_path / "run"
    first, second = (
        Command(tmp_path, *FLAGS, "--model", tiny_chat, *flags, env=env) for env in ranks()
    )
    assert second.code not in (0, None) and "rank 1 fell over" in second.said
    assert first.code not in (0, None) and "rank 1 fell over" not in first.said


DIFFERENT = {
    "problems": "[{'prompt': f\"{n} {os.environ['RANK']}\"} for n in range(40)]",
    "golds": "[{'prompt': str(n), 'gold': os.environ['RANK']} for n in range(40)]",
    "failure": "[{'prompt': str(n)} for n in range(40 * (os.environ['RANK'] == '0'))]",
}


@pytest.mark.parametrize(
    "what", [*DIFFERENT, "no checkpoint", "another checkpoint", "a full --out"]
)
def test_ranks_that_do_not_agree_end_in_one_sentence_each(tiny_chat, tmp_path, whole, what):
    """Each rank is in a folder of its own, and the flags are the same."""
    for rank in "01":
        (tmp_path / rank).mkdir()
    flags = *FLAGS, "--model", tiny_chat, "--eval-problems", 0, "--out", "run"
    if what in DIFFERENT:
        (tmp_path / "mine.py").write_text(
            f"import os\nproblems = lambda: {DIFFERENT[what]}\nreward = lambda problem, text: 0.0\n"
        )
        flags += "--task", tmp_path / "mine.py"
    elif what == "a full --out":
        shutil.copytree(whole, tmp_path / "0/run")
    else:
        flags = "--resume", "run", "--steps", 8
        runs = [Path(shutil.copytree(whole, tmp_path / rank / "run")) for rank in "01"]
        (runs[1] / "checkpoint.safetensors").unlink()
        if what == "no checkpoint":
            (runs[1] / "checkpoint.previous.safetensors").unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("run/config.json")}
    jobs = []
    for rank, env in enumerate(ranks()):
        there = f"import os; os.chdir({str(tmp_path / str(rank))!r})"
        jobs.append(Command(tmp_path, *flags, code=there, env=env))
    for job in jobs:
        assert job.code == 2, job.said
        assert re.fullmatch("train.py: [^\n]+\n", job.said), job.said
    assert "the ranks do not agree" in "".join(job.said for job in jobs)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("run/config.json")}
