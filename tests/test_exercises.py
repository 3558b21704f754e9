"""docs/exercises.md: the named tests are green for the real function and for a reader's right one,
and red for an empty one and for wrong ones that a reader may write.

python -m pytest tests/test_exercises.py -m "slow or not slow"
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

import pytest
from command import ROOT, forks
from test_structure import tracked

from docs import empty

PAGE = (ROOT / "docs/exercises.md").read_text()
# each exercise: its function (module.name or module.Class.name), and what its command gives pytest
EXERCISES = [
    (name, shlex.split(command))
    for name, command in re.findall(
        r"^Empty `([\w.]+)`.*?```bash\npython -m pytest (.*?)\n```", PAGE, re.M | re.S
    )
]


# each exercise: what a reader may write, right and unlike the real one, and changes that each make
# it wrong. Whoever finds a wrong version that is green adds it here.
ATTEMPTS = {
    "grpo.advantages": (
        """
rewards = rewards.double()
better = rewards - rewards.mean(1, keepdim=True)
if scale == "group":
    better = better / (rewards.std(1, keepdim=True) + 1e-4)
better[rewards.amax(1) == rewards.amin(1)] = 0
return better.float()
""",
        [
            ("rewards.double()", "rewards.float()"),
            (".mean(1, keepdim=True)", ".mean()"),
            ("std(1, keepdim=True)", "std(1, keepdim=True, correction=0)"),
            (" + 1e-4", ""),
            ('scale == "group"', "True"),
            ("better[", "better[:0]["),
            ("rewards.amax(1) == rewards.amin(1)", "rewards.std(1) < 1e-6"),
            (".float()", ""),
        ],
    ),
    "grpo.dapo": (
        """
A = advantages[:, None]
ratio = torch.exp(log_ratio)
free, held = ratio * A, torch.clamp(ratio, *bounds) * A
stopped = held < free
return -(weights * torch.where(stopped, held, free)).sum(1), stopped
""",
        [
            ("weights * ", ""),
            ("torch.exp(log_ratio)", "1 + log_ratio"),
            ("*bounds", "0.8, 1.28"),
            ("held < free", "held > free"),
            ("held < free", "(held < free).any(1, keepdim=True)"),
            ("held < free", "held != free"),
            ("held < free", "held <= free"),
            ("torch.where(stopped, held, free)", "free"),
            ("torch.where(stopped, held, free)", "held"),
            ("sum(1)", "sum()"),
            ("sum(1)", "mean(1)"),
        ],
    ),
    "grpo.kl_k3": (
        "return torch.special.expm1(log_ratio) - log_ratio",
        [
            ("torch.special.expm1(log_ratio)", "log_ratio.exp() - 1"),
            ("- log_ratio", "+ log_ratio"),
            ("- log_ratio", "- log_ratio.detach()"),
            ("torch.special.expm1(log_ratio)", ""),
            ("torch.special.expm1(log_ratio) - log_ratio", "log_ratio.square() / 2"),
        ],
    ),
    "nvfp4._nearest_e2m1": (
        """
size = x.abs()
step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
return (torch.round(size / step) * step).clamp(max=6) * x.sign()
""",
        [
            (".clamp(max=6)", ""),
            (" * x.sign()", ""),
            ("torch.round(size / step)", "torch.floor(size / step + 0.5)"),
            ("1.0, 2.0", "1.0, 1.0"),
            ("size < 4", "size < 3"),
        ],
    ),
    "aqn.sigma": (
        """
if schedule == "adaptive":
    return current if current else start
if schedule not in SCHEDULES:
    raise ValueError(f"I know no schedule {schedule}")
if stages < 3:
    raise ValueError(f"{stages} stages are too few")
for value in (start, end):
    if value <= 0:
        raise ValueError(f"noise of {value}?")
if step < 0 or step >= total_steps:
    raise ValueError(f"there is no step {step}")
stage = step * stages // total_steps
return SCHEDULES[schedule](start, end, (stage - 1) / (stages - 2)) if stage else 0.0
""",
        [
            ("current if current else start", "start"),
            ("current if current else start", "current"),
            ("{schedule}", ""),
            ("(start, end, ", "(1e-2, 1e-4, "),
            ("stages < 3", "stages < 2"),
            ("(start, end):", "(start,):"),
            ("value <= 0", "value < 0"),
            ("step < 0 or ", ""),
            ("step >= total_steps", "step > total_steps"),
            ("step * stages // total_steps", "step * 10 // total_steps"),
            ("step * stages // total_steps", "step // (total_steps // stages)"),
            ("SCHEDULES[schedule]", 'SCHEDULES["exponential"]'),
            ("(stage - 1) / (stages - 2)", "stage / (stages - 1)"),
            (" if stage else 0.0", ""),
        ],
    ),
    "rollout.Rollout.answer_mask": (
        """
place = torch.arange(self.tokens.shape[1]) - self.prompt_lengths[:, None]
return (place >= 0) & (place < self.lengths[:, None])
""",
        [
            ("place >= 0", "place > 0"),
            ("(place >= 0) & ", ""),
            ("place < ", "place <= "),
            ("place < ", "place + 1 < "),
            ("place < self.lengths[:, None]", "self.tokens != 0"),
            ("place < self.lengths[:, None]", "self.tokens != 2"),
            ("place < self.lengths[:, None]", "self.logprobs != 0"),
        ],
    ),
    "tasks.final_answer": (
        r"""
text = text.rstrip("#\n\r\t ")
if "####" in text:
    piece = text.split("####")[-1].lstrip().split("\n")[0]
else:
    box = BOX.match(text, max(0, text.rfind("\\boxed{")))
    if not box:
        return last_number(text)
    piece = box.group(1)
return read_number(piece.split("=")[-1])
""",
        [
            ("#\\n\\r\\t ", ""),
            ('if "####" in text', 'if "####" in text and "boxed" not in text'),
            ("[-1].lstrip()", "[1].lstrip()"),
            (".lstrip()", ""),
            ('.split("\\n")[0]', ""),
            ("rfind", "find"),
            ("read_number(", "last_number("),
            ('.split("=")[-1]', ""),
            ('.split("=")[-1]', '.split("=")[0]'),
        ],
    ),
    "rollout.Scheduler.reserve": (  # the youngest row first: the same rows run on
        """
for row in reversed(self.running[:]):
    while row in self.running:
        missing = self.pages_ahead(row) - len(row.pages)
        if missing <= len(self.pool.free):
            row.pages += self.pool.take(missing)
            break
        self.preempt()
""",
        [
            ("while row in self.running", "while True"),
            ("while row in self.running", "if row in self.running"),
            (" - len(row.pages)", ""),
            ("missing <= ", "missing < "),
            ("take(missing)", "take(missing > 0)"),
        ],
    ),
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of git's files, in which a test may break the code."""
    folder = tmp_path_factory.mktemp("exercises")
    for name in tracked("*.py", "pyproject.toml", "README.md", "docs", "tests"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def run_pytest(folder, arguments, log):
    """In a process that was forked with torch imported: pytest, with the modules of a folder."""
    sys.stdout = sys.stderr = open(log, "w")
    sys.path = [str(folder), *(path for path in sys.path if not path.startswith(str(ROOT)))]
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{ROOT}{os.sep}"):
            del sys.modules[name]
    os.chdir(folder)
    sys.dont_write_bytecode = True  # two versions of a file may have the same second and size
    code = pytest.main(["-q", "-x", *arguments])
    sys.stdout.flush()
    os._exit(code)


def outcome(folder, arguments):
    """→ pytest's exit code, and what it printed."""
    with tempfile.NamedTemporaryFile("r") as log:
        process = forks().Process(target=run_pytest, args=(folder, arguments, log.name))
        process.start()
        process.join(120)
        return process.exitcode, log.read()


def test_the_page_has_eight_exercises_and_names_each_in_its_table():
    assert len(EXERCISES) == 8 == PAGE.count("<details>")
    files = re.findall(r"^\| \d .*?`(\w+)\.py`", PAGE, re.M)
    assert files == [name.partition(".")[0] for name, _ in EXERCISES]


def test_the_command_empties_a_function_and_shows_its_docstring(clone, monkeypatch, capsys):
    monkeypatch.setattr(empty, "ROOT", clone)
    for name in empty.names():
        path = clone / f"{name.partition('.')[0]}.py"
        code = path.read_text()
        empty.main(name)
        assert capsys.readouterr().out.rstrip().endswith(empty.EMPTY)
        assert len(path.read_text()) < len(code)
        path.write_text(code)
    for names in (["unheard.of"], ["grpo.advantages", "aqn.sigma"]):
        with pytest.raises(SystemExit, match=f"{' '.join(names)}: give one of grpo.advantages, "):
            empty.main(*names)


def test_the_command_keeps_a_readers_code(tmp_path, monkeypatch, capsys):
    """Only git knows which code is ours. What is no Python, or has no such function, is named."""
    monkeypatch.setattr(empty, "ROOT", tmp_path)
    file = tmp_path / "grpo.py"
    shutil.copy(ROOT / "grpo.py", file)
    ours = file.read_text()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "ours"]):
        subprocess.run([*git, *words], check=True)
    for _ in range(2):  # of an empty function nothing can be lost
        empty.main("grpo.advantages")
    mine = file.read_text().replace(empty.EMPTY, "return rewards - rewards.mean()")
    for text, words in (
        (mine, "grpo.advantages has code of your own: copy it"),
        (ours.replace("def advantages", "def mine"), "grpo.py is no Python, or has no grpo.advant"),
        (ours + "\ndef", "grpo.py is no Python, or has no .*copy your code, then git checkout"),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit, match=words):
            empty.main("grpo.advantages")
        assert file.read_text() == text
    file.write_text(mine.replace("def kl_k3", "def other"))  # another function may be anything
    empty.main("grpo.dapo")


@pytest.mark.slow
def test_the_real_functions_pass_their_tests(clone):
    for _, arguments in EXERCISES:
        code, said = outcome(clone, arguments)
        assert code == 0, said  # it is 5 if no test has such a name


def outcome_with(clone, name, arguments, body):
    """→ outcome() while the function of this name has another body."""
    module, *names = name.split(".")
    path = clone / f"{module}.py"
    code = path.read_text()
    path.write_text(empty.with_body(code, names, body))
    try:
        return outcome(clone, arguments)
    finally:
        path.write_text(code)


each_exercise = pytest.mark.parametrize(
    "name, arguments",
    [
        pytest.param(*exercise, id=exercise[0], marks=() if number == 0 else pytest.mark.slow)
        for number, exercise in enumerate(EXERCISES)
    ],
)


@each_exercise
def test_an_emptied_function_turns_its_test_red(clone, name, arguments):
    code, said = outcome_with(clone, name, arguments, empty.EMPTY)
    assert code == 1 and "NotImplementedError" in said, said


@pytest.mark.slow
@each_exercise
def test_a_right_version_is_green_and_each_wrong_one_red(clone, name, arguments):
    right, changes = ATTEMPTS[name]
    code, said = outcome_with(clone, name, arguments, right)
    assert code == 0, said
    for old, new in changes:
        assert right.count(old) == 1, old
        code, said = outcome_with(clone, name, arguments, right.replace(old, new))
        assert code == 1, (old, new, said)
