"""tools/own_task.py: which Python files are tasks, and what is said of those that are none."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tools import ends, own_task
from tools.own_task import load_task_file

ROOT = Path(__file__).parent.parent
# its example
OWN = re.search("```python\n(.*?)```", (ROOT / "docs/tasks.md").read_text(), re.S)[1]
MINE = """import functools, re, sys, time
def problems():
    return [{"prompt": f"What is {n} - 1?", "answer": n - 1} for n in range(10, 100)]
def reward(problem, text):
    return float(int(text) == problem["answer"])
def decorated(function):
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner
def kept(function):
    return functools.wraps(function)(decorated(function))
class Judge:
    def __call__(self, text, problem): return 5
    def judge(self, text): return 6
"""


@pytest.fixture
def own(tmp_path):
    """own(text) → the task of a file of that text."""

    def make(text):
        (tmp_path / "mine.py").write_text(text)
        return load_task_file(str(tmp_path / "mine.py"))

    return make


def test_the_example_of_a_task_of_ones_own(own):
    """In docs/tasks.md. A model that shows its work is judged by its last number."""
    task, problem = own(OWN), {"prompt": "What is 8 - 1?", "answer": 7}
    assert len(task.train) == 68 and len(task.held_out) == 22
    assert task.prompt(problem) == "What is 8 - 1?"
    rewards = {"7": 1, "8 - 1 = 7.": 1, "7 or 8": 0.1, "8": 0.1, "-7": 0.1, "x": 0}
    assert {text: task.reward(problem, text, True) for text in rewards} == rewards
    assert task.reward(problem, "7", False) == 0, "an answer that the model did not end"


REWARDS = {  # reward() → its values for n 7 and "ab", which the model ended, and did not end
    "def reward(text, problem): return len(text) + problem['n']": (9, 0),
    "def reward(*, text, problem): return problem['n']": (7, 0),
    "def reward(problem, **more): return len(more['text'])": (2, 0),
    "def reward(*rest, **more): return len(rest) + len(more)": (2, 0),
    "reward = Judge()": (5, 0),
    "reward = Judge().judge": (6, 0),
    "reward = functools.partial(lambda k, text: k, 4)": (4, 0),
    "@decorated\ndef reward(text, problem): return len(text)": (2, 0),
    "@functools.cache\ndef reward(text): return len(text)": (2, 0),
    "@kept\ndef reward(text, finished): return finished": (1, 0),
    "def reward(text, finished=.5): return 1 + finished": (2, 1),
    "def reward(text, tolerance=.5): return tolerance": (0.5, 0),
}


@pytest.mark.parametrize("reward, values", REWARDS.items())
def test_arguments_are_passed_by_name_in_any_order(own, reward, values):
    """**kwargs gets problem and text. Another parameter with a default keeps it."""
    task = own(MINE + reward)
    assert tuple(task.reward({"n": 7}, "ab", finished) for finished in (True, False)) == values


def test_a_reward_of_named_parts_keeps_them_and_checks_their_sum(own):
    """Every reward has the same parts, or a mean would be of some answers only."""
    task = own(MINE + "def reward(problem): return problem['parts']")

    def reward(parts, finished=True):
        return task.reward({"parts": parts}, "", finished)

    first = reward({"a": 1, "b": -0.5})
    assert first == 0.5 and first.parts == {"reward/a": 1, "reward/b": -0.5}
    assert reward({"b": 3, "a": 2}) == 5 and reward({"a": 1}, finished=False) == 0
    for nan in (float("nan"), float("inf"), 1e7, "x", [1]):
        with pytest.raises(ValueError, match="mine.py: .* in reward"):
            reward({"a": 1, "b": nan})
    for other in ({"a": 1, "c": 2}, {"a": 1}, {}, {"a": 1, "b": 2, 3: 4}, 7):
        with pytest.raises(ValueError, match="mine.py: .* in reward"):
            reward(other)


@pytest.mark.parametrize(
    "problems",
    [
        "({'prompt': str(n)} for n in range(9))",
        "pandas.DataFrame({'prompt': list('abcdefghi')}).to_dict('records')",
    ],
)
def test_problems_may_be_whatever_yields_dicts(own, problems):
    task = own(f"{MINE}import pandas\nproblems = lambda: {problems}")
    assert len(task.train) == 7 and len(task.held_out) == 2


CHAT = """
def problems(): return [{'prompt': [{'role': 'user', 'content': c}]} for c in 'abcda']
"""


def test_a_chat_that_prompt_fills_anew_each_time_is_that_of_its_problem(own):
    code = "chat = [dict(role='user')]\n"
    code += "def prompt(problem):\n    chat[0]['content'] = problem['prompt']\n    return chat"
    task = own(MINE + code)
    for problem in task.train:
        assert task.prompt(problem)[0]["content"] == problem["prompt"]


def test_a_prompt_of_ones_own_is_text_or_a_chat(own):
    """Problems with the same prompt are one."""
    task = own(MINE + "def prompt(problem): return problem['prompt'][:9]")
    assert task.prompt({"prompt": "What is 12"}) == "What is 1"
    assert len(task.train) == 7 and len(task.held_out) == 2  # "What is 1" to "What is 9"
    task = own(MINE + CHAT)
    assert len(task.train) == 3 and len(task.held_out) == 1
    assert task.prompt(task.train[0]) is task.train[0]["prompt"]


BAD = {  # text of mine.py, behind MINE → what its refusal says next
    "x =": ": SyntaxError: .*line 15",
    "\n1 / 0": ", line 16: ZeroDivisionError",
    "del reward, problems": r" defines no reward\(\)",
    "del problems": r" defines no problems\(\)",
    "sys.exit(0)": ", line 15: SystemExit: 0",
    "prompt = lambda problem: 7": ": the prompt .*'answer': 9} is 7, ",
    "prompt = lambda problem: []": r": the prompt .* is \[\], ",
    "prompt = lambda problem: ['user']": r": the prompt .* is \['user'\], ",
    "prompt = lambda problem: problem['x']": r", line 15: KeyError: 'x' in prompt\({'prompt'",
    "prompt = lambda problem: 'a\\ud83d'": r": the prompt .* is 'a.ud83d', no text in UTF-8",
    "prompt = lambda problem: [{'role': '\\udc00', 'content': 'a'}]": r": .*\\udc00.*UTF-8",
    "problems = lambda: [{'prompt': '1\\ud83d'}]": ": the prompt of {'prompt': '1.ud83d'} is",
    "problems = lambda: [{'prompt': str(n)} for n in range(3)]": " has 3 problems",
    "problems = lambda: [{}][1]": r", line 15: IndexError: .* in problems\(\)$",
    "problems = lambda: (1 / 0 for _ in range(9))": ", line 15: ZeroDivisionError",
    "problems = lambda: {'prompt': ['a', 'b']}": ": problems.* no dict: .*records",
    "import pandas\nproblems = lambda: [pandas.Series(list('ab'))]": ": problems.* no dict",
    # by position, an argument would be something else than the author meant
    "def reward(data_source, text): pass": r": reward\(\) .*data_source.*: rename",
    "def reward(problem, text, *, weight): pass": r": reward\(\) .*weight",
    "def reward(problem, text, /): pass": r": reward\(\) .*'problem'",
    "def reward(problem, *text): pass": r": reward\(\) .*'text'",
    "def reward(): return 1": r": reward\(\) .*none",
    "async def reward(problem, text): return 1": r": reward\(\) .*async",
    "reward = max": r": reward\(\) .*max",
    "def prompt(p): return 'a'": r": prompt\(\) .*'p'.*: rename",
    "import random\ndef prompt(problem): return str(random.random())": ".* two different prompts",
    "calls = []\ndef prompt(problem): return calls.append(1) or 'a' * len(calls)": ".* two diff",
    "prompt = lambda problem: [dict(role='user', content='', n=float('nan'))]": ": the .*nan",
    "prompt = lambda problem: [dict(role='user', content='a', n={1})]": r": the prompt of .*\{1\}",
}


@pytest.mark.parametrize("text, says", BAD.items())
def test_a_file_that_is_no_task_is_named_with_its_line_and_the_reason(own, tmp_path, text, says):
    """In one line, because train.py prints a ValueError without its traceback."""
    with pytest.raises(ValueError, match=f"^{tmp_path}/mine.py{says}") as error:
        own(MINE + text)
    assert "\n" not in str(error.value) and "codec" not in str(error.value)


def test_a_file_that_is_absent_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"^{tmp_path}/absent.py: there is no such file"):
        load_task_file(f"{tmp_path}/absent.py")


FAILS = {  # what reward() returns → what is said
    "int(text)": r", line 15: ValueError: .* reward\({'answer': 7}, 'a\\nb'\)$",
    "None": ": TypeError: ",
    "exit(1)": ", line 15: SystemExit: 1",
    "float('nan')": ": .* nan .*'a.*b'",
    "'5'": ": TypeError: '5' is text",
    "{'a': 1, 'b': b'2'}": ": TypeError: .* is text",
    "(_ for _ in ()).throw(BaseException('odd'))": ", line 15: BaseException: odd",
    "__import__('asyncio').run(__import__('asyncio').sleep(0, 1 / 0))": ", line 15: ZeroDivision",
}


@pytest.mark.parametrize("value, says", FAILS.items())
def test_a_reward_that_fails_is_named_with_its_line_and_the_answer(own, value, says):
    task = own(f"{MINE}def reward(problem, text): return {value}")
    with pytest.raises(ValueError, match=f"mine.py{says}") as error:
        task.reward({"answer": 7}, "a\nb", True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(143), SystemExit(129)])
def test_a_signal_in_a_reward_is_no_error_of_the_reward(own, stop):
    """tools/ends.py turns SIGTERM into SystemExit(143), whatever function runs just then."""
    task = own(MINE + "def reward(problem): raise problem['stop']")
    with pytest.raises(type(stop)) as passed:
        task.reward({"stop": stop}, "7", True)
    assert passed.value is stop


@pytest.mark.parametrize("then", ["pass", "raise RuntimeError('odd')", "exit(7)", "raise"])
@pytest.mark.parametrize("number, stop", [(signal.SIGTERM, 143), (signal.SIGINT, "Keyboard")])
def test_a_signal_that_a_reward_swallows_ends_the_program_all_the_same(own, number, stop, then):
    """After the call, whose verdict is not used. One that came before it is over."""
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    task = own(f"""{MINE}
import os
def reward(problem, text):
    try:
        os.kill(os.getpid(), problem["number"])
        time.sleep(9)
    except:
        {then}
    return 1.0""")
    ends.exit_on_signals()
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)) as stopped:
            task.reward({"number": number}, "7", True)
        assert task.reward({"number": 0}, "7", True) == 1
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    assert str(stop) in repr(stopped.value)


def test_what_a_reward_does_to_torch_ends_with_it(own):
    code = "import torch\ntorch.set_grad_enabled(False)\n"
    code += "def reward(text):\n    torch.set_default_dtype(torch.float16)\n    return int(text)"
    task = own(MINE + code)
    for text in "12":
        assert task.reward({}, text, True) == int(text)
        assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32


def test_a_task_of_ones_own_imports_what_lies_beside_it(own, tmp_path):
    """Also when reward() imports it. The helper's own line is named."""
    (tmp_path / "own_first.py").write_text("NONE = 0")
    (tmp_path / "own_second.py").write_text("def half(text):\n    return int(text) / 2\n")
    reward = own(
        MINE + "import own_first\ndef reward(problem, text):\n    import own_second\n"
        "    return own_second.half(text) + own_first.NONE\n"
    ).reward
    assert reward({}, "3", True) == 1.5
    with pytest.raises(ValueError, match="own_second.py, line 2: ValueError: .* in reward"):
        reward({}, "three", True)


POOLED = """
import dataclasses, multiprocessing, pickle
from concurrent.futures import ProcessPoolExecutor
@dataclasses.dataclass
class Box:
    value: int
def half(box):
    return box.value / 2
def problems(): return [{"prompt": str(n)} for n in range(9)]
def reward(text):
    box = pickle.loads(pickle.dumps(Box(int(text))))
    with ProcessPoolExecutor(1, multiprocessing.get_context(HOW)) as pool:
        return pool.submit(half, box).result()
"""
RUN = """
import sys
from tools.own_task import load_task_file
if __name__ == "__main__":
    print(load_task_file(sys.argv[1]).reward({}, "3", True))
"""


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_reward_may_use_a_process_pool(tmp_path, how):
    """And so pickle, which finds what the file defines by the name of its module. A process that is
    not forked imports that module.
    """
    (tmp_path / "pooled.py").write_text(f"HOW = {how!r}{POOLED}")
    (tmp_path / "run.py").write_text(RUN)
    script = [sys.executable, tmp_path / "run.py", tmp_path / "pooled.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, env=env, capture_output=True, text=True, cwd="/")
    assert done.stdout == "1.5\n", done.stderr


@pytest.mark.parametrize("name", ["random", "tasks", "my-task.v2", "twice", "twice"])
def test_a_file_may_have_any_name_and_replaces_no_module(tmp_path, name):
    """Neither one of ours nor one of Python's, which others import later."""
    before = sys.modules.copy()
    (tmp_path / f"{name}.py").write_text(f"HOW = 'fork'{POOLED}\nassert __file__.endswith('.py')")
    assert load_task_file(f"{tmp_path}/{name}.py").reward({}, "3", True) == 1.5
    assert sys.modules.items() >= before.items()
    assert not list(tmp_path.glob("__pycache__")), "the file is read anew by each run"


def test_the_folder_of_a_task_hides_none_of_our_modules(tmp_path):
    """model.py beside mine.py is not the decoder of train.py, whatever imports that next."""
    (tmp_path / "model.py").write_text("raise AssertionError('the user has one, too')")
    (tmp_path / "hidden.py").write_text(MINE + "from helper import N")
    (tmp_path / "helper.py").write_text("N = 1")
    script = "import sys; from tools.own_task import load_task_file; load_task_file(sys.argv[1])"
    script += "; import model; print(model.Decoder.__name__)"
    command = [sys.executable, "-c", script, tmp_path / "hidden.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "Decoder\n", done.stderr


HANGS = {  # code behind MINE → the function that is named
    "time.sleep(1)": "<module>",
    "def problems(): yield time.sleep(1) or {'prompt': 'a'}": "problems",
    "def prompt(problem): return time.sleep(1) or 'a'": "prompt",
    # Python's lock is kept, so that no other thread runs
    "def reward(text): return len(re.findall('(a+)+b', 'a' * 24))": "reward",
}
SCRIPT = """
from tools import own_task
own_task.SLOW = 0.2
task = own_task.load_task_file({path!r}, 0)
print(task.reward({{}}, "", True), flush=True)
"""


@pytest.mark.parametrize("code, name", HANGS.items())
def test_a_slow_call_is_named_and_goes_on(code, name, tmp_path):
    path = tmp_path / "mine.py"
    default = "problems = lambda: [{'prompt': 'a'}]\nreward = lambda text: 0"
    path.write_text(f"{MINE}{default}\n{code}\n")
    script = SCRIPT.format(path=str(path))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "0.0\n" and f'mine.py", line 17 in {name}\n' in done.stderr


def test_a_call_that_returned_is_not_named(own, monkeypatch, capfd):
    """Nor does a sys.stderr without a file descriptor break it, as a notebook may have."""
    monkeypatch.setattr(own_task, "SLOW", 0.2)
    monkeypatch.setattr(sys, "stderr", None)
    task = own(MINE + "def reward(text): return time.sleep(.01) or 1")
    assert [task.reward({}, "", True) for _ in range(30)] == [1] * 30
    time.sleep(0.5)
    assert not capfd.readouterr().err
