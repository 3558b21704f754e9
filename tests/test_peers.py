"""python -m pytest tests/test_peers.py -q"""
import json
import os
import shlex
import shutil
import subprocess
import sys
import time

import peers
import pytest
import tables
from command import ROOT

# A stand-in for vLLM. Its clock moves only in generate: half a second, and two milliseconds a step.
FAKE = {"__init__.py": '''
import json, multiprocessing, os, sys, time
from pathlib import Path
from types import SimpleNamespace
import torch
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

__version__, now = "0.24.0", [0.0]

def load():
    """What the engine's process does: fill a quantised layer, and refuse scales that break it."""
    names = {"proj.weight_packed": torch.uint8, "proj.weight_scale": torch.float8_e4m3fn,
             "norm.weight": None, "proj.weight_global_scale": None, "lm_head.weight": torch.bfloat16,
             "self_attn.attn.k_scale": None}
    state = {name: torch.full((40, 8), -7).to(dtype or torch.float32) for name, dtype in names.items()}
    DummyModelLoader().load_weights(SimpleNamespace(state_dict=lambda: state), None)
    packed, scale, norm, divisor, head, kept = (t.float() for t in state.values())
    assert (scale > 0).all() and (divisor > 1).all() and (norm == 1).all() and (kept == -7).all()
    assert head.std() < 0.1 and packed.unique().numel() > 100

class LLM:
    def __init__(self, model, compilation_config, **kwargs):
        self.config = json.loads((Path(model) / "config.json").read_text())
        self.mode, two = compilation_config.get("mode"), os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
        kwargs |= dict(config=self.config, two=two, compilation=compilation_config)
        Path(os.environ["SEEN"]).open("a").write(json.dumps(kwargs) + "\\n")
        if two:
            engine = multiprocessing.get_context("spawn").Process(target=load)
            engine.start()
            engine.join()
            assert engine.exitcode == 0
        else:
            load()
        self.broken = self.mode is None and not two
        print("Using MarlinNvFp4LinearKernel for NVFP4 GEMM", flush=True)
        print("Using FLASH_ATTN attention backend out of", flush=True)
        time.perf_counter = lambda: now[0]

    def generate(self, prompts, params, use_tqdm, lora_request):
        assert (Path(lora_request) / "adapter_config.json").exists() and len(prompts) == len(params)
        assert all(p.temperature == 1 and p.logprobs == 0 and p.ignore_eos for p in params)
        if self.broken and len({len(p["prompt_token_ids"]) for p in prompts}) > 1:
            raise RuntimeError("no kernel image is available")
        now[0] += 0.5 + 0.002 * max(p.max_tokens for p in params)
        assert all(0 <= id < self.config["vocab_size"] for p in prompts for id in p["prompt_token_ids"])
        answers = [SimpleNamespace(token_ids=[3] * p.max_tokens, cumulative_logprob=-1.0) for p in params]
        return [SimpleNamespace(outputs=[answer]) for answer in answers]

class SamplingParams(SimpleNamespace):
    pass
''', "lora/request.py": "def LoRARequest(name, number, path):\n    return path\n",
        "model_executor/model_loader/dummy_loader.py": "class DummyModelLoader:\n    pass\n"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A copy of the project with a tiny shape and little work, measured against the stand-in → what it
    printed, its records, what vLLM was given. One of vLLM's modes breaks in the whole rollout."""
    folder = tmp_path_factory.mktemp("peers")
    (folder / "results").mkdir()
    for path in (*ROOT.glob("*.py"), *ROOT.glob("results/*.py")):
        shutil.copy(path, folder / path.relative_to(ROOT))
    with open(folder / "memory.py", "a") as file:
        file.write("MODELS['tiny'] = (64, 2, 4, 2, 96, 97, False)\n")
    for name, old, new in (("peers", "936, 128, 3", "12, 6, 3"),
                           ("bench", "prompts=32, samples=16, mean=600, limit=2048",
                            "prompts=4, samples=3, mean=12, limit=40")):
        text = (folder / f"results/{name}.py").read_text()
        assert old in text
        (folder / f"results/{name}.py").write_text(text.replace(old, new))
    for name, text in FAKE.items():
        (folder / "site/vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "site/vllm" / name).write_text(text)
    (folder / "site.env").write_text(f"export PYTHONPATH='{folder}/site' SEEN='{folder}/seen'\n")
    python = f"bash -c '. {folder}/site.env; exec {sys.executable} \"$@\"' -"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "results/peers.py", "--out", "log.jsonl", "--vllm", python,
                           "--model-shape", "tiny", "--batch", "2,32,whole", "--modes",
                           "nvfp4/none/1,nvfp4/default/1,nvfp4/default/2"],
                          cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + (folder / "log.jsonl.log").read_text()
    return done.stdout, *([json.loads(line) for line in (folder / name).read_text().splitlines()]
                          for name in ("log.jsonl", "seen"))


def test_a_run_measures_ours_each_mode_of_vllm_and_ours_again(run):
    """The same work: batches, and in a whole rollout the lengths that ours drew."""
    _, records, _ = run
    parts = "ours/nvfp4 vllm/nvfp4/none/1 vllm/nvfp4/default/1 vllm/nvfp4/default/2 ours/nvfp4".split()
    assert [r["part"] for r in records] == [part for part in parts for _ in range(3)]
    for r, batch in zip(records, [2, 32, "whole"] * 5, strict=True):
        assert "failed" in r or r["batch"] == batch and r["tok_s"] > 0
        assert r["gpu"] and r["torch"] and r["commit"] and (r["run"], r["card"]) == (records[0]["run"], "0")
        if r["part"].startswith("vllm") and "failed" not in r:
            assert (r["vllm"], r["attention"]) == ("0.24.0", "FLASH_ATTN")
            assert r["kernel"] == "MarlinNvFp4LinearKernel"
            assert batch == "whole" or r["tok_s"] == pytest.approx(batch / 0.002)    # prefill cancels out
    before, *others = [r for r in records if r.get("batch") == "whole"]
    assert 1 <= before["mean_length"] < before["longest"] <= 40
    assert before["tok_s"] == pytest.approx(4 * 3 * before["mean_length"] / before["times_s"][0])
    for r in others:
        assert (r["mean_length"], r["longest"]) == (before["mean_length"], before["longest"])
    assert others[0]["times_s"] == pytest.approx([0.5 + 0.002 * before["longest"]])


def test_a_mode_that_breaks_is_in_the_log_and_in_the_table_and_the_run_goes_on(run):
    """What it measured before stays."""
    printed, records, _ = run
    broken, = [r for r in records if "failed" in r]
    assert broken["part"] == "vllm/nvfp4/default/1"
    assert broken["failed"] == "exit code 1: RuntimeError: no kernel image is available"
    rates = "2: 1,000 tokens/s, 32: 16,000 tokens/s"
    assert f"\nvllm/nvfp4/default/1: {rates}, FAILED, exit code 1: RuntimeError: no kernel" in printed
    assert "\n| vLLM, NVFP4, torch.compile, one process | 1,000 | 16,000 | failed |\n" in printed
    assert f"\nFailed: vllm/nvfp4/default/1: {broken['failed']}.\n" in printed


def test_vllm_runs_as_it_was_asked(run):
    """Graphs alone or its own compilation, one process or two, the format of the weights, the adapter."""
    *_, seen = run
    modes = [(s["two"], s["compilation"].get("mode")) for s in seen]
    assert modes == [(False, 0), (False, None), (True, None)]
    for s in seen:
        assert (s["enable_lora"], s["max_lora_rank"], s["max_num_seqs"]) == (True, 32, 256)
        assert {1, 2, 8, 32, 256} <= set(s["compilation"]["cudagraph_capture_sizes"])
        assert s["config"]["quantization_config"]["format"] == "nvfp4-pack-quantized"
        assert s["config"]["hidden_size"] == 64 and s["config"]["architectures"] == ["Qwen2ForCausalLM"]


def write(path, *runs):
    """A log with the rates of several runs: {part: [(batch, tokens a second), …]}."""
    with open(path, "w") as file:
        for number, parts in enumerate(runs):
            for part, rates in parts:
                for batch, rate in rates.items():
                    kind = {"batch": batch, "tok_s": rate} if rate else {"failed": "exit code 1"}
                    if "vllm" in part:
                        kind |= {"vllm": "0.24.0", "kernel": "Marlin", "attention": "FA"}
                    file.write(json.dumps({
                        "gpu": "NVIDIA H100, 5", "torch": "2", "triton": "3", "commit": "c", "run": "now",
                        "card": str(number), "shape": "7b", "part": part, "mean_length": 9, "longest": 10,
                        **kind}) + "\n")


def test_the_table_compares_a_card_with_itself_and_takes_vllms_best(tmp_path, capsys):
    """Ours is the mean of before and after; of two cards the less favourable ratio counts."""
    ours, log = "ours/nvfp4", tmp_path / "log"
    write(log, [(ours, {8: 300, "whole": 90}), ("vllm/nvfp4/none/1", {8: 100, "whole": 30}),
                ("vllm/nvfp4/none/2", {8: 125, "whole": 0}), ("ours/bf16", {8: 120}),
                ("vllm/bf16/none/1", {8: 100}), (ours, {8: 200, "whole": 110})],
          [(ours, {8: 1000, "whole": 400}), ("vllm/nvfp4/default/1", {8: 625, "whole": 100})])
    rows = tables.peer_rows(log)[1]
    assert tables.over_vllm(rows, "nvfp4") == {8: 1.6, "whole": 100 / 30}
    assert tables.over_vllm(rows, "bf16") == {8: 1.2}
    tables.peers(log)
    table = capsys.readouterr().out
    assert "| ours, NVFP4, card 1 | 300 and 200 | 90 and 110 |\n" in table
    assert "| vLLM, NVFP4, CUDA graphs alone, two processes, card 1 | 125 | failed |\n" in table
    assert "| **ours over vLLM's best, NVFP4** | **×1.60** | **×3.33** |\n" in table
    assert "| **ours over vLLM's best, bf16** | **×1.20** |  |\n" in table
    assert "vLLM 0.24.0, Marlin, FA; random weights of Qwen2.5-7B" in table.replace("\n", " ")


def test_the_readmes_row_is_made_from_the_same_log(tmp_path, capsys, monkeypatch):
    for path in tables.LOGS.iterdir():
        os.symlink(path, tmp_path / path.name)
    monkeypatch.setattr(tables, "LOGS", tmp_path)
    tables.results()
    without = capsys.readouterr().out
    (tmp_path / "peers_bench.jsonl").unlink(missing_ok=True)
    write(tmp_path / "peers_bench.jsonl", [
        ("ours/nvfp4", {8: 200, 64: 300, "whole": 500}), ("ours/bf16", {8: 110, 64: 120}),
        ("vllm/nvfp4/none/1", {8: 100, 64: 100, "whole": 200}), ("vllm/bf16/none/1", {8: 100, 64: 100})])
    tables.results()
    row, = set(capsys.readouterr().out.splitlines()) - set(without.splitlines())
    assert row == ("| decodes beside vLLM 0.24.0: Qwen2.5-7B + LoRA, H100 (answers at once) | ours over "
                   "vLLM, tokens/s: NVFP4 ×2.00 (8), ×3.00 (64), ×2.50 (whole); bf16 ×1.10 (8), ×1.20 (64) "
                   "|  |  |")


@pytest.mark.parametrize("code, timeout, why", [
    ("import time; print(1); time.sleep(60)", 1, "still running after 1 s"),
    ("print('a\\nValueError: no scale\\n  at exit')\nraise SystemExit(3)", 60,
     "exit code 3: ValueError: no scale"),
    ("raise SystemExit('asked for nothing')", 60, "exit code 1: asked for nothing"),
    ("import os; os._exit(7)", 60, "exit code 7: no output"), ("pass", 60, None)])
def test_why_a_part_failed(tmp_path, code, timeout, why):
    """The log's last error or line; what earlier parts printed does not count."""
    with open(tmp_path / "out.log", "ab") as log:
        log.write(b"OldError: long gone\n")
        log.flush()
        job = {"out": str(tmp_path / "out"), "skip": log.tell()}
        assert peers.run(f"{sys.executable} -c {shlex.quote(code)}", job, log, timeout) == why


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_that_a_part_started_outlives_it(tmp_path, stopped):
    """vLLM's second process holds the card's memory: it ends with the first, or with peers.py itself."""
    part = ("import os, subprocess, time\nchild = subprocess.Popen(['sleep', '60'])\n"
            f"print(child.pid, flush=True)\ntime.sleep({60 * stopped})\nos._exit(0)")
    job, python = {"out": f"{tmp_path}/out", "skip": 0}, f"{sys.executable} -c {shlex.quote(part)}"
    log, results = tmp_path / "out.log", ROOT / "results"
    code = f"import peers\nwith open({str(log)!r}, 'ab') as log: peers.run({python!r}, {job}, log, 60)"
    run = subprocess.Popen([sys.executable, "-c", code], cwd=results, stderr=subprocess.PIPE, text=True)
    while run.poll() is None and not (log.exists() and log.read_text().endswith("\n")):
        time.sleep(0.01)
    if stopped:
        run.terminate()
    assert run.communicate()[1] == ("peers.py: stopped by SIGTERM\n" if stopped else "")
    ps = ["ps", "-o", "stat=", "-p", log.read_text().strip()]
    assert subprocess.run(ps, capture_output=True, text=True).stdout.strip() in ("", "Z")


@pytest.mark.parametrize("flags, said", [
    (["--modes", "nvfp4/none"], "--modes nvfp4/none: must be WEIGHTS/COMPILE/PROCESSES, of nvfp4 bf16"),
    (["--batch", "8,40"], "--batch 40: must be whole, 1 to 16, or a multiple of 16 up to 256"),
    (["--batch", "512"], "--batch 512: must be whole, "), (["--batch", "all"], "--batch all: must be "),
    (["--vllm", "false"], "--vllm false: must start a Python that can import vllm. `pip install vllm` in"),
    (["--vllm", "nowhere/python"], "--vllm nowhere/python: must start a Python that can import vllm.")])
def test_wrong_flags_are_named_before_anything_is_measured(tmp_path, flags, said):
    with pytest.raises(SystemExit) as stop:
        peers.main(["--out", str(tmp_path / "log"), *flags])
    assert stop.value.code.startswith(said) and not any(tmp_path.iterdir())
