"""vLLM and our sampler in turns: python -m bench.vllm --out FILE.jsonl --vllm ENV/bin/python

    ours → each mode of vLLM → ours again, so that a drift of the card's clock shows

Both have random weights of one shape, the same LoRA of rank 32 on all seven projections and
temperature 1, and both return the log-probability of each sampled token. Each part runs in a
process of its own.

decode: 8, 64 and 256 rows, of which 16 (or all 8) share a prompt of 936 tokens; 128 tokens are
    timed, without prefill; the median of 3. Ours is the sampler's decode_s. vLLM's is the time of
    8 + 128 tokens less that of 8, both with cached prompts.
whole: the rollout of `bench.rollout --whole`, prefill included, after one of short answers. Chance
    decides where random weights end an answer, so vLLM is told to make the lengths that ours drew.
    Long answers: --prompts 16 --prompt-length 128 --mean 1800 --limit 8192.

--memory-gb caps both, in 1e9 bytes: the allocator of ours, gpu_memory_utilization of vLLM.

A mode of vLLM is WEIGHTS/COMPILE/PROCESSES. COMPILE none: full CUDA graphs of decode steps, no
torch.compile; default: vLLM's own. PROCESSES 2 is vLLM's default; 1 puts its engine into the
caller.

Each measurement is written to FILE.jsonl before the next one starts, and so is each part that
fails or hangs. FILE.jsonl.log has what the parts print. `bench.tables vllm` makes its table of
results/.
"""

import argparse
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# vLLM's Python runs this file too: import modules of ours only in functions that it does not call.
ROOT = Path(__file__).resolve().parent.parent
MODES = [f"{w}/{c}/{p}" for w in ("nvfp4", "bf16") for c in ("none", "default") for p in "12"]
SLOTS = 256  # rows at once, as in rollout.py
BATCHES = (8, 64, 256)
GROUP = 16  # rows of a prompt, or all of a smaller batch
PROMPT = 936  # its tokens
NEW = 128  # tokens of a row that are timed
WARM = 8  # vLLM's tokens before the clock starts
REPEATS = 3
TIMEOUT = 600  # seconds after which a part is stopped
CONFIG = (
    "model_type architectures hidden_size intermediate_size num_hidden_layers "
    "num_attention_heads num_key_value_heads vocab_size max_position_embeddings "
    "rms_norm_eps tie_word_embeddings"
)
NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head"],
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
                "dynamic": False,
            },
        }
    },
}


def main(arguments=None):
    from bench import common, rollout, tables
    from rollout import KV
    from tools import memory

    python = shlex.quote(sys.executable)
    sizes = dict(prompts=32, prompt_length=0, mean=600, limit=2048)
    parser = common.flags(__doc__, model_shape="7b", **sizes, memory_gb=0.0)
    parser.set_defaults(out="vllm.jsonl")
    parser.add_argument(
        "--vllm", default=python, help="command that starts a Python which has vllm"
    )
    parser.add_argument("--once", action="store_true", help="ours before vLLM only")
    parser.add_argument("--kv", choices=KV, default="bf16", help="int8: vLLM in fp8")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="rows of decode")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES[:4], "bf16/none/1"])
    args = parser.parse_args(arguments)
    rollout.check_whole(parser, args)
    probe = "import importlib.util as u, sys; sys.exit(not u.find_spec('vllm'))"
    if subprocess.run(f"{args.vllm} -c {shlex.quote(probe)}", shell=True, cwd=ROOT).returncode:
        parser.error(
            f"--vllm {args.vllm}: must start a Python that can import vllm. "
            "`pip install vllm` in an environment of its own, then --vllm ENV/bin/python"
        )
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    info = {"run": time.strftime("%F %T"), "shape": args.model_shape, "card": card}
    info |= {name: getattr(args, name) for name in (*sizes, "memory_gb", "batches", "kv")}
    info |= common.conditions()
    records = common.Records(args.out, info)
    out = Path(args.out).resolve()
    ours = list(dict.fromkeys(f"ours/{mode.split('/')[0]}" for mode in args.modes))
    with tempfile.TemporaryDirectory() as folder, open(f"{out}.log", "ab") as log:
        write_configs(Path(folder), memory.config(args.model_shape))
        parts = [*ours, *(f"vllm/{mode}" for mode in args.modes)]
        for part in parts if args.once else [*parts, *ours]:
            print(part, flush=True)
            job = {"part": part, "info": info | {"part": part}, "folder": folder}
            job |= {"out": str(out), "skip": log.seek(0, os.SEEK_END)}
            failed = run(args.vllm if part.startswith("vllm") else python, job, log, TIMEOUT)
            if failed:
                records.append({"part": part, "failed": failed})
    tables.vllm(out)


def write_configs(folder, c):
    """What vLLM reads of a model of random weights: config.json."""
    config = {key: getattr(c, key) for key in CONFIG.split()}
    config |= {"hidden_act": "silu", "rope_theta": 1e6, "torch_dtype": "bfloat16"}
    config |= {"bos_token_id": 1, "eos_token_id": 2}
    for weights, more in {"bf16": {}, "nvfp4": {"quantization_config": NVFP4}}.items():
        (folder / weights).mkdir()
        (folder / weights / "config.json").write_text(json.dumps(config | more))


def run(python, job, log, timeout):
    """Run one part in a child → why it failed, or None. It leaves no process behind."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("bench.vllm: stopped by SIGTERM")
    )  # runs `finally`
    command = f"exec {python} -m bench.vllm --child {shlex.quote(json.dumps(job))}"
    quiet = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    child = subprocess.Popen(command, shell=True, cwd=ROOT, start_new_session=True, **quiet)
    try:
        code = child.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"still running after {timeout:g} s"
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)  # vLLM's second process holds memory of the card
        except ProcessLookupError:
            pass
        child.wait()
    lines = printed(job["out"], job["skip"]).splitlines() or ["no output"]
    errors = [line.strip() for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    why = (errors or lines)[-1][:200]
    return f"exit code {code}: {why}" if code else None


def printed(out, skip):
    """What the running part has printed: the log without its first `skip` bytes."""
    return Path(f"{out}.log").read_bytes()[skip:].decode(errors="replace")


# --- in the children
def save(job, batch, tokens, times, lengths=()):
    """Write a record. times: seconds for so many tokens, of each repeat. lengths: of answers."""
    rate = {"batch": batch, "tok_s": tokens / statistics.median(times), "times_s": times}
    if lengths:
        rate |= {"mean_length": statistics.mean(lengths), "longest": max(lengths)}
    with open(job.out, "a") as file:
        file.write(json.dumps(job.info | rate) + "\n")


def run_ours(job):
    import torch

    from bench import common, rollout
    from tools.adapter import save_adapter
    from tools.run import peak_memory_gb

    weights = job.part.split("/")[1]
    folder, asked = Path(job.folder), job.info
    share = 0.85  # of the card's memory: vLLM's, without a cap
    if asked["memory_gb"]:
        _, total = torch.cuda.mem_get_info()
        share = asked["memory_gb"] * 1e9 / total
        torch.cuda.set_per_process_memory_fraction(share)
    torch.manual_seed(0)  # the second turn repeats the first: weights, prompts, lengths
    model = common.random_model(job.info["shape"], weights)
    if not (folder / "adapter").exists():
        save_adapter(model, folder / "adapter")  # vLLM loads the same one
    for batch in asked["batches"]:
        turn = rollout.decoding(model, batch, GROUP, PROMPT + NEW // 2, NEW, asked["kv"])
        turn()  # compiles the kernels
        save(job, batch, batch * NEW, [turn()["decode_s"] for _ in range(REPEATS)])
    sampler = rollout.Sampler(model, kv=asked["kv"])
    sizes = {name: asked[name] for name in ("prompts", "mean", "limit", "prompt_length")}
    prompts, done, seconds = rollout.sample_whole(sampler, samples=GROUP, **sizes)
    lengths = done.lengths.tolist()
    job.info |= {"stats": dict(sampler.stats), "peak_gb": peak_memory_gb()}
    save(job, "whole", sum(lengths), [seconds], lengths)
    drawn = {"prompts": [len(prompt) for prompt in prompts], "lengths": lengths, "share": share}
    (folder / f"{weights}.json").write_text(json.dumps(drawn))


def run_vllm(job):
    _, weights, compiled, processes = job.part.split("/")
    drawn = json.loads(Path(job.folder, f"{weights}.json").read_text())
    engine = Engine(job, weights, compiled, processes, drawn["share"])
    said = printed(job.out, job.skip)
    kernel = re.search(r"Using (\w+) for NVFP4 GEMM", said)
    attention = re.search(r"Using (\S+) attention backend", said)
    job.info |= {
        "vllm": engine.vllm.__version__,
        "kernel": kernel and kernel[1],  # None with bf16
        "attention": attention and attention[1],
    }
    for batch in job.info["batches"]:
        group = min(batch, GROUP)
        rows = engine.prompts([PROMPT] * (batch // group), group)
        for _ in range(2):  # fill the prefix cache, then compile what reads it
            engine.seconds(rows, [WARM] * batch)
        times = []
        for _ in range(REPEATS):
            short = engine.seconds(rows, [WARM] * batch)
            times.append(engine.seconds(rows, [WARM + NEW] * batch) - short)
        save(job, batch, batch * NEW, times)
    lengths = drawn["lengths"]
    for most in (64, max(lengths)):  # other prompts each time, so none is cached yet
        rows = engine.prompts(drawn["prompts"], len(lengths) // len(drawn["prompts"]))
        seconds = engine.seconds(rows, [min(n, most) for n in lengths])
    save(job, "whole", sum(lengths), [seconds], lengths)


class Engine:
    """vLLM with random weights and our adapter."""

    def __init__(self, job, weights, compiled, processes, share):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if processes == "2" else "0"
        os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        import vllm
        from vllm.lora.request import LoRARequest

        use_random_weights()
        # vLLM's own sizes of CUDA graphs, less dense above 64 rows, so that it starts sooner
        most = SLOTS if compiled == "none" else 2 * SLOTS  # default: prompts too run in graphs
        sizes = {1, 2, 4, *range(8, 64, 8), *range(64, most + 1, 16)}
        compilation = {"cudagraph_capture_sizes": sorted(sizes), "cudagraph_specialize_lora": False}
        if compiled == "none":
            compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        folder = Path(job.folder)
        self.llm = vllm.LLM(
            model=str(folder / weights),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            generation_config="vllm",
            max_model_len=job.info["limit"] + 2048,
            max_num_seqs=SLOTS,
            kv_cache_dtype="fp8" if job.info["kv"] == "int8" else "auto",
            gpu_memory_utilization=share,
            enable_prefix_caching=True,
            enable_lora=True,
            max_lora_rank=32,
            max_loras=1,
            compilation_config=compilation,
        )
        self.vllm = vllm
        self.adapter = LoRARequest("adapter", 1, str(folder / "adapter"))
        config = json.loads((folder / weights / "config.json").read_text())
        self.vocab_size = config["vocab_size"]

    def prompts(self, lengths, samples):
        """`samples` rows of each of several random prompts."""
        import torch

        rows = []
        for n in lengths:
            ids = torch.randint(self.vocab_size, (n,), device="cpu").tolist()
            rows += [{"prompt_token_ids": ids}] * samples
        return rows

    def seconds(self, rows, lengths):
        """→ seconds that vLLM takes for so many tokens in each row."""
        fixed = dict(
            temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0, flat_logprobs=True
        )
        asked = [self.vllm.SamplingParams(max_tokens=n, **fixed) for n in lengths]
        began = time.perf_counter()
        done = self.llm.generate(rows, asked, use_tqdm=False, lora_request=self.adapter)
        seconds = time.perf_counter() - began
        answers = [one.outputs[0] for one in done]
        assert [len(a.token_ids) for a in answers] == lengths, (
            "vLLM returned other lengths than asked"
        )
        assert all(math.isfinite(a.cumulative_logprob) for a in answers), "log-probs are not finite"
        return seconds


def use_random_weights():
    """vLLM's own dummy weights, ±0.001, break NVFP4, whose scales must be positive."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    @torch.no_grad()
    def load_weights(self, model, model_config):
        for name, p in model.state_dict().items():
            p = p.data
            if (
                ".attn." in name or p.device.type == "meta"
            ):  # scales of the KV cache keep their values
                continue
            if name.endswith("global_scale"):
                p.fill_(40000)  # a divisor; the weights' standard deviation is 0.02
            elif p.dtype == torch.uint8:
                p.random_(0, 256)  # two codes a byte
            elif p.dtype == torch.float8_e4m3fn:
                random_scales = torch.empty(p.shape, dtype=torch.float32, device=p.device)
                p.copy_(random_scales.uniform_(64, 448))
            elif p.is_floating_point():
                p.fill_(1) if "norm" in name else p.normal_(0, 0.02)

    dummy_loader.DummyModelLoader.load_weights = load_weights


if __name__ == "__mp_main__":  # vLLM's second process, where vLLM does not fork it
    use_random_weights()
elif __name__ == "__main__" and sys.argv[1:2] == ["--child"]:
    child = argparse.Namespace(**json.loads(sys.argv[2]))
    run_ours(child) if child.part.startswith("ours") else run_vllm(child)
elif __name__ == "__main__":
    main()
