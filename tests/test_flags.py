"""The command line: what flags become, which flags a run brings, what a command refuses.

python -m pytest tests/test_flags.py
"""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import FLAGS, ROOT, main
from safetensors.torch import save_file

import aqn
import grpo
import rollout
import train
from tools import calibrate, chat, memory, report, weights
from tools.ends import one_sentence
from tools.flags import FIELDS, Config, check, command_of, parse, spelled

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
    kv="int8",
    temperature=0.5,
    eval_problems=9,
    eval_samples=3,
    eval_top_p=0.5,
    seed=7,
)


@pytest.fixture
def ended(tmp_path):
    """ended(flags) → a folder with what a run leaves, enough to parse --resume and --adapter. Its
    config.json lacks the other flags, as an old one lacks new flags.
    """

    def make(**flags):
        folder = tmp_path / "ended"
        (folder / "adapter").mkdir(parents=True)
        (folder / "metrics.jsonl").touch()
        (folder / "checkpoint.safetensors").touch()
        (folder / "config.json").write_text(json.dumps(flags))
        return str(folder)

    return make


# --- what the flags become


def test_every_field_is_a_flag_with_its_default_and_a_help(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "999")
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"])
    said = capsys.readouterr().out
    for name, field in FIELDS.items():
        words = rf"{spelled(name)}(, --no-\S+| [A-Z_]+)\s+[^(\s].*"
        assert re.search(rf"^ +{words} \(default: {field.default}\)$", said, re.M), name


def test_every_flag_of_a_number_or_a_switch_sets_its_field():
    """In the field's type. Without flags, parse gives the defaults."""
    numbers = {int: 3, float: 0.5}
    values = {n: numbers[f.type] for n, f in FIELDS.items() if f.type in numbers}
    values["warmup"] = 2
    given = [f"{spelled(name)}={value}" for name, value in values.items()]
    want = Config(**values, aqn=False, preflight=True)
    assert repr(parse([*given, "--no-aqn", "--preflight"])) == repr(want)  # 3 is not 3.0
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
        "--stepz=3 | --stepz=3; .* --steps, ",
        "--lr 1 --clip 2 | --clip; .* --clip-low, --clip-high, ",
        "--max_new_tokens 9 | --max_new_tokens; .* --max-new-tokens, ",
        "gsm8k | gsm8k; .* --task, ",
    ],
)
def test_an_unknown_flag_names_those_nearest_to_it(case):
    """A prefix of a flag, or an underscore in it, counts as unknown."""
    flags, near = case.split(" | ")
    with pytest.raises(ValueError, match=f"^there is no {near}"):
        parse(flags.split())


NUMBERS = [name for name, field in FIELDS.items() if field.type in (int, float)]
LEAST = {  # by what a smaller number would mean: no answers, a division by 0, …; all others 0
    1: "prompts max_new_tokens max_prompt_tokens updates_per_step rank eval_every "
    "eval_samples save_every micro_tokens",
    2: "group_size",
    3: "sigma_stages",
    1e-9: "temperature max_grad_norm sigma_start sigma_end sigma_target memory_gb eval_top_p alpha",
}
MOST = dict(rank=256, seed=2**32 - 1, eval_top_p=1)  # all others 1e9, as good as none


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_outside_its_range_is_refused_by_name_and_value(name):
    least = next((low for low, names in LEAST.items() if name in names.split()), 0)
    most = MOST.get(name, 10**9)
    for value in (least, most):
        assert check(Config(**{"steps": 0, name: value}))
    for value in (math.nextafter(least, -1), math.nextafter(most, math.inf), math.nan):
        with pytest.raises(ValueError, match=f"^{spelled(name)} {value} .* {least} to {most}$"):
            check(Config(**{name: value}))


@pytest.mark.parametrize(
    "case",
    [
        "--no-aqn --sigma-start 1 --sigma-schedule cosine | --sigma-start --sigma-schedule",
        "--sigma-target .1 | --sigma-target",
        "--sigma-schedule adaptive --sigma-end 1 --sigma-stages 4 | --sigma-end --sigma-stages",
        "--sigma-schedule adaptive --sigma-start 1 --sigma-target .1 | ",
        "--eval-problems 0 --eval-samples 3 --eval-top-p .5 | --eval-samples --eval-top-p",
        "--clip-low .1 --clip-high .3 | --clip-low --clip-high",
        "--clip-high .3 --correction tis --loss gspo | --clip-high",
        "--clip-high .3 --loss cispo --updates-per-step 2 | --clip-high",
        "--steps 0 --lr 1 --loss grpo --prompts 4 | --lr --loss --prompts",
        "--memory-gb 10 --device cpu | --memory-gb",
        "--clip-high .3 --correction bypass | ",
        "--clip-low .3 --updates-per-step 2 | ",
        "--sigma-start 1 --eval-samples 3 --lr 1 --steps 2 | ",
        "--steps 0 --eval-samples 3 --seed 1 --device cpu | ",
    ],
)
def test_a_flag_that_does_nothing_beside_the_others_is_named(case, capsys):
    words, idle = case.split(" | ")
    parse(words.split())
    warnings = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in warnings] == idle.split()


def test_the_choices_are_the_names_that_the_method_knows():
    """flags.py spells them out, so that it needs no torch."""
    for name, known in dict(
        quant=weights.QUANT,
        kv=rollout.KV,
        loss=grpo.LOSSES,
        advantage=grpo.BASELINES,
        sigma_schedule=[*aqn.SCHEDULES, "adaptive"],
    ).items():
        assert [*FIELDS[name].metadata["choices"]] == [*known]


@pytest.mark.parametrize("flags", ["--stepz 3", "--steps x", "--prompts 0", "--help"])
def test_a_wrong_flag_does_not_wait_for_torch(flags):
    code = f"""
import runpy, sys
sys.argv = ["train.py", *{flags.split()}]
try:
    runpy.run_path("{ROOT}/train.py", run_name="__main__")
finally:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (0 if "help" in flags else 2), done.stderr
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize("shape", memory.MODELS)
def test_the_learning_rate_follows_the_model_unless_it_is_given(shape, capsys):
    rate = {"135m": 5e-4, "0.5b": 1e-4, "1.5b": 1e-4}.get(shape, 2e-5)
    left_out, given = Config(), Config(lr=0)
    for config in (left_out, given):
        config.follow_model(memory.plan(memory.config(shape), "bf16").weights / 2)
    assert (left_out.lr, given.lr) == (rate, 0)
    assert capsys.readouterr().out.startswith(f"--lr {rate:g} ")


@pytest.mark.parametrize("quiet", ["", "--steps 16 --model a/b", "--model smollm2"])
def test_few_steps_for_a_model_of_ones_own_are_told(quiet, ended, capsys):
    parse(quiet.split())
    parse(["--resume", ended(model="a/b")])
    assert not capsys.readouterr().out
    parse(["--model", "a/b"])
    assert re.search("16 steps.* --steps", capsys.readouterr().out)


STARTED = [["train.py"], ["../a b/idea.py"], ["-u", "idea.py"], ["-m", "ideas.mine"]]


@pytest.mark.parametrize("started", STARTED)
def test_a_command_names_the_program_that_was_started(started, monkeypatch):
    """Although runpy writes train.py into sys.argv."""
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python3", *started, "--task", "mine.py"])
    monkeypatch.setattr(sys, "argv", ["train.py", "--task", "mine.py"])
    assert shlex.split(command_of({"steps": 3})) == ["python", *started, "--steps", "3"]


def test_a_process_that_was_started_from_code_names_train_py(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-B", "-c", "import multiprocessing"])
    assert command_of({}) == "python train.py"


def test_a_command_says_again_what_differs_from_the_defaults(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--lr", "1"])
    given = [
        "--no-aqn",
        "--eval-problems",
        "0",
        "--task",
        "a b'c.py",
        "--lr",
        "0.001",
        "--template-kwargs",
        '{"a": 1}',
    ]
    config = parse(given)
    command = command_of(vars(config) | {"out": "x", "resume": "y"})
    assert parse(shlex.split(command)[2:]) == config


def test_the_longest_answer_depends_on_the_task():
    tasks = {"addition": 16, "gsm8k": 512, "math": 512, "mine.py": 512}
    assert {task: Config(task=task).max_new_tokens for task in tasks} == tasks


@pytest.mark.parametrize(
    "case",
    [
        *(
            f"{spelled(name)} nonsense | {', '.join(field.metadata['choices'])}"
            for name, field in FIELDS.items()
            if field.metadata["choices"]
        ),
        "--device cuda:1 | cpu",
        "--prompts 8 | ranks",
        "--warmup 16 | --steps 16",
        "--loss gspo --correction bypass | none or tis",
        "--task mine.py --data some.jsonl | --data",
        "--task mine.py --test some.jsonl | --test",
        "--task mine.py --operands 1-9 | --operands",
        "--task my/x.jsonl | PATH.py; .* --data, with --task gsm8k",
        "--task multiplicaton | did you mean multiplication.* --data",
        "--loss DAP0 | did you mean dapo",
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name_with_what_can(monkeypatch, case):
    """Three ranks share the prompts. A task of one's own would ignore data and operands."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    flags, remedy = case.split(" | ")
    flag, value, *more = flags.split()
    with pytest.raises(ValueError, match=f"^{flag} {value} .*{remedy}"):
        parse(["--prompts", "9", flag, value, *more])


def test_paths_are_stored_absolute(tmp_path, monkeypatch):
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    names = "model data test adapter".split()
    given = vars(parse(["--task=gsm8k", *(f"--{name}=mine.py" for name in names)]))
    assert {given[name] for name in names} == {str(tmp_path / "mine.py")}


# --- flags that a run brings


@pytest.mark.parametrize("name", ["ended", "ended/adapter/", "ended/adapter-best"])
def test_an_adapter_of_a_run_is_used_as_it_was_trained(ended, tmp_path, monkeypatch, capsys, name):
    """What a score depends on is that run's, unless a flag says otherwise, and one line says so.
    Its lr and the paths of its own are not.
    """
    folder = ended(**SCORED, lr=1.0, out="/there", adapter="/there/adapter")
    Path(folder, "adapter-best").mkdir()
    monkeypatch.chdir(tmp_path)
    given = dict(quant="nvfp4", seed=0, steps=0)
    config = parse(f"--adapter {name} --quant nvfp4 --seed=0 --steps 0".split())
    adapter = f"{tmp_path}/{name}" if "best" in name else f"{folder}/adapter"
    assert config == Config(**SCORED | given, adapter=adapter)
    (said,) = capsys.readouterr().out.splitlines()
    assert folder in said
    for key, value in SCORED.items():
        assert (f" {spelled(key)} {value}" in said) == (key not in given)


def test_a_reference_that_is_not_the_adapter_one_starts_from_is_told(tmp_path, capsys):
    for flags, told in (("--beta .1", 1), ("", 0)):
        parse(["--adapter", str(tmp_path), *flags.split()])
        assert capsys.readouterr().out.count(f"not to {tmp_path}") == told
    parse(["--beta", ".1"])
    assert not capsys.readouterr().out


def test_an_adapter_from_elsewhere_brings_its_rank_and_alpha_unless_they_are_given(tmp_path):
    """PEFT takes any alpha. One that is no number is load_adapter's to refuse."""
    settings = {"peft_type": "LORA", "r": 7, "lora_alpha": 2.5}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    save_file({}, tmp_path / "adapter_model.safetensors")
    flags = parse(["--adapter", str(tmp_path)])
    assert (flags.rank, flags.alpha) == (7, 2.5)
    flags = parse(["--adapter", str(tmp_path), "--rank", "8"])
    assert (flags.rank, flags.alpha) == (8, 2.5)
    (tmp_path / "adapter_config.json").write_text('{"r": "7", "lora_alpha": null}')
    assert parse(["--adapter", str(tmp_path)]) == Config(adapter=str(tmp_path))


def test_an_adapter_from_elsewhere_brings_no_flags(tmp_path, capsys):
    """Even in a folder with a config.json, if that is a model's."""
    adapter = tmp_path / "peft"
    adapter.mkdir()
    (tmp_path / "config.json").write_text('{"model_type": "llama", "temperature": 0.5}')
    assert parse(["--adapter", str(adapter)]) == Config(adapter=str(adapter))
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "given",
    [
        "--model other",
        "--quant rtn",
        "--rank 3",
        "--alpha 2.5",
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
    so far cannot be compared with.
    """
    folder = ended(**SCORED)
    with pytest.raises(ValueError, match=f"^{given} beside --resume {folder}: "):
        parse(["--resume", folder, *given.split()])


def test_a_run_of_an_earlier_version_goes_on_if_its_old_flags_did_nothing(ended):
    """Until November 2026 config.json named updates_per_step otherwise, and it had two flags that
    are gone.
    """
    folder = ended(rank=8, updates_per_rollout=1, stop="", gradient_checkpointing=None)
    assert parse(["--resume", folder]).rank == 8


@pytest.mark.parametrize(
    "case",
    [
        "{ | Expecting",
        "[1] | mapping",
        '{"steps": null, "lr": 1} | NoneType',
        "{\"steps\": 2.5} | 'steps': 2.5",
        "{\"clip_low\": \"0.1\"} | 'clip_low': '0.1'",
        '{"steps": 1e999} | infinity',
        "{\"prompts\": 8.0} | 'prompts': 8.0",
        "{\"lr\": true} | 'lr': True",
        "{\"aqn\": 0} | 'aqn': 0",
        '{"rank": 32, "rank": 8} | a key occurs twice',
        f"{'[' * 10**5} | nest too deep",
        '{"scale": "group"} | \'scale\'',
        '{"updates_per_rollout": 2} | 2 updates of a rollout',
        '{"stop": "="} | --stop =',
        '{"gradient_checkpointing": true} | --gradient-checkpointing True',
        '{"gradient_checkpointing": false} | --gradient-checkpointing False',
    ],
)
def test_a_config_that_is_damaged_or_of_another_version_is_named_with_the_way_on(ended, case):
    text, words = case.split(" | ")
    folder = ended()
    config = Path(folder, "config.json")
    config.write_text(text)
    for name in ("--resume", "--adapter"):
        with pytest.raises(ValueError, match=f"^{config} .*{words}.* --adapter"):
            parse([name, folder])


def test_a_resume_takes_the_runs_own_flags_and_those_given_beside_it_win(
    ended, tmp_path, monkeypatch
):
    """The run's own value may be given again, a path from anywhere. An integer in config.json is
    accepted for a float.
    """
    data = tmp_path / "data.jsonl"
    data.touch()
    own = SCORED | dict(data=str(data), overlong="penalty", beta=1, clip_low=0.1)
    folder = ended(**own)
    monkeypatch.chdir(folder)
    want = Config(**own, lr=1.0, prompts=4, resume=folder, out=folder)
    given = f"--resume {folder} --lr 1 --prompts=4"
    again = f"{given} --data ../data.jsonl --rank 4 --alpha 8 --model {own['model']} --out {folder}"
    for flags in (given, again):
        assert parse(flags.split()) == want


def test_a_resume_tells_which_flags_a_config_lacks(ended, capsys):
    """And nothing of a whole one."""
    folder = ended()
    for absent in ([], ["--kv"], ["--group-size", "--seed"]):
        flags = {
            name: field.default for name, field in FIELDS.items() if spelled(name) not in absent
        }
        Path(folder, "config.json").write_text(json.dumps(flags))
        parse(["--resume", folder, "--steps", "20"])
        said = capsys.readouterr().err
        assert ("lacks" in said) == bool(absent)
        assert f"{', '.join(absent)}: their defaults hold" in said or not absent
    parse(["--resume", folder, "--steps", "20", "--seed", "0"])  # which is told, if it is given
    assert "lacks --group-size: their" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["--resume", "--adapter"])
def test_a_program_that_a_stored_config_names_runs_only_if_it_is_named_again(
    ended, tmp_path, name, monkeypatch
):
    """Whoever made the folder could otherwise run code by it."""
    evil = tmp_path / "evil.py"
    evil.write_text("raise KeyboardInterrupt('it ran')")
    folder = ended(task=str(evil))
    with pytest.raises(ValueError, match=f"{evil}.* --task {evil}"):
        main(name, folder, "--steps", 0)
    monkeypatch.chdir(tmp_path)
    for spelling in (str(evil), "evil.py", "./evil.py"):
        assert parse([name, folder, "--task", spelling]).task == str(evil)


@pytest.mark.parametrize("task, operands", [("addition", ""), ("multiplication", "3-9")])
def test_another_task_does_not_inherit_the_operands_of_an_adapters_run(ended, task, operands):
    folder = ended(operands="3-9", temperature=0.5, eval_problems=0)
    config = parse(["--adapter", folder, "--task", task])
    found = config.operands, config.temperature, config.eval_problems
    assert found == (operands, 0.5, None)  # 0 evaluates nothing


@pytest.mark.parametrize("count", ["0", "a", "", "-1", "1.5"])
def test_a_number_of_ranks_that_makes_no_sense_is_refused(monkeypatch, count):
    monkeypatch.setenv("WORLD_SIZE", count)
    with pytest.raises(ValueError, match=f"^WORLD_SIZE={count} .*torchrun"):
        parse([])


def test_only_the_first_rank_tells_where_flags_come_from(ended, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    parse(["--adapter", ended()])
    assert not capsys.readouterr().out


# --- what a command says and refuses


@pytest.mark.parametrize(
    "error, code, said",
    [
        (KeyboardInterrupt(), 130, ""),
        (torch.OutOfMemoryError("two\nlines"), 2, "train.py: .*--max-new-tokens.*\n"),
    ],
)
def test_ctrl_c_and_too_little_memory_have_no_traceback(error, code, said, capsys):
    with pytest.raises(SystemExit) as stop, one_sentence("train.py"):
        raise error
    assert stop.value.code == code and re.fullmatch(said, capsys.readouterr().err)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    "command", ["train.py --rank 0", "-m tools.memory --rank 0", "-m tools.report list --rank"]
)
def test_a_command_whose_streams_are_closed_ends_as_it_should(command, closed):
    """As a daemon may start it."""
    line = f"{shlex.quote(sys.executable)} {command} {closed}"
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    assert ("--rank" in done.stderr) == ("2>" not in closed)


def test_ctrl_c_while_a_command_imports_has_no_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    for command in (["-m", "tools.chat", "run"], ["-m", "tools.export", "a", "b"]):
        words = [sys.executable, *command]
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == -signal.SIGINT and not done.stderr, done.stderr


@pytest.mark.parametrize(
    "case",
    [
        "--model /nonexistent | /nonexistent is neither",
        "--resume {tmp}/nowhere | nowhere",
        "--task gsm8k --data {tmp}/missing.jsonl | missing.jsonl",
        "--task gsm8k | --data FILE.jsonl",
        "--operands 3 | --operands 3",
        "--task gsm8k --test {tmp}/missing.jsonl | give --data",
        "--task gsm8k --test {tmp}/missing.jsonl --steps 0 | missing.jsonl",
        "--test {tmp}/ended/metrics.jsonl | leave out --data and --test",
        "--out {tmp}/ended/metrics.jsonl | metrics.jsonl",
        "--max-new-tokens 129 | --max-new-tokens 129 leaves 1 to -1",
        "--max-new-tokens 127 | the prompt '",
        "--preflight --resume {tmp}/ended | --adapter {tmp}/ended/adapter",
    ],
)
def test_what_a_user_can_get_wrong_is_one_line_and_exit_code_2(
    tiny_chat, tmp_path, ended, monkeypatch, capsys, case
):
    """Said before the model loads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "load", None)
    flags, words = case.format(tmp=tmp_path).split(" | ")
    ended(model=str(tiny_chat), rank=4)
    with pytest.raises(SystemExit, match="2"), one_sentence("train.py"):
        train.main(parse(["--model", str(tiny_chat), *FLAGS, *flags.split()]))
    assert re.fullmatch(f"train.py: .*{re.escape(words)}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("tool", [calibrate, chat, report])
@pytest.mark.parametrize("words", ["--help", "-h", "runs/x --prompts 3 --help"])
def test_a_tool_tells_how_it_is_used(tool, words, capsys):
    tool.main(words.split())
    assert f"python -m {tool.__name__} " in capsys.readouterr().out
