"""vLLM and our sampler, in turns on one card: python results/peers.py --out FILE.jsonl --vllm ENV/bin/python

    ours → each mode of vLLM → ours again, so that a drift of the card's clock shows

Both have random weights of one shape, the same LoRA of rank 32 on all seven projections and temperature 1,
and both return the log-probability of each sampled token. Each part runs in a process of its own.

decode: --batch rows, of which 16 share a prompt of 936 tokens; 128 tokens are timed, without prefill; the
    median of 3. Ours is the sampler's decode_s. vLLM's is the time of 8 + 128 tokens less that of 8, both
    with cached prompts.
whole: the rollout of `bench.py rollout --whole`, prefill included, the second of two. Chance decides where
    random weights end an answer, so vLLM is told to make the lengths that ours drew (max_tokens, ignore_eos).

A mode of vLLM is WEIGHTS/COMPILE/PROCESSES. COMPILE none: full CUDA graphs of decode steps, no torch.compile;
default: vLLM's own. PROCESSES 2 is vLLM's default; 1 puts its engine into the caller's process.

Each measurement is written to FILE.jsonl before the next one starts, and so is each part that fails or hangs.
FILE.jsonl.log has what the parts print. `tables.py peers` makes its table of results/peers_bench.jsonl.
"""
import argparse
import json
import math
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# vLLM's Python runs this file too: modules of ours are imported only inside the functions that use them.
MODES = "nvfp4/none/1,nvfp4/none/2,nvfp4/default/1,nvfp4/default/2,bf16/none/1"
GROUP, PROMPT, NEW, REPEATS = 16, 936, 128, 3
WARM = 8                       # vLLM's tokens before the clock starts
CONFIG = ("model_type architectures hidden_size intermediate_size num_hidden_layers num_attention_heads "
          "num_key_value_heads vocab_size max_position_embeddings rms_norm_eps tie_word_embeddings").split()
NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
         "quantization_status": "compressed", "config_groups": {"group_0": {
             "targets": ["Linear"], "input_activations": None, "output_activations": None,
             "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                         "symmetric": True, "dynamic": False}}}}


def main(arguments):
    import bench
    import tables
    python, slots = shlex.quote(sys.executable), bench.memory.SLOTS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="append one JSON record per measurement to this file")
    parser.add_argument("--vllm", default=python, help="command that starts a Python which can import vllm")
    parser.add_argument("--modes", default=MODES, help="of vLLM; ours takes the weights that they name")
    parser.add_argument("--batch", default="8,64,256,whole", help="rows, or whole, separated by commas")
    parser.add_argument("--model-shape", choices=bench.memory.MODELS, default="7b")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a part is stopped")
    args = parser.parse_args(arguments)
    modes, batches = args.modes.split(","), args.batch.split(",")
    for mode in modes:
        if not re.fullmatch("(nvfp4|bf16)/(none|default)/[12]", mode):
            sys.exit(f"--modes {mode}: must be WEIGHTS/COMPILE/PROCESSES, of nvfp4 bf16, none default, 1 2")
    for batch in batches:
        rows = int(batch) if batch.isdecimal() else 0
        if batch != "whole" and not (0 < rows <= slots and rows % min(rows, GROUP) == 0):
            sys.exit(f"--batch {batch}: must be whole, 1 to {GROUP}, or a multiple of {GROUP} up to {slots}")
    probe = "import importlib.util as u, sys; sys.exit(not u.find_spec('vllm'))"
    if subprocess.run(f"{args.vllm} -c {shlex.quote(probe)}", shell=True).returncode:
        sys.exit(f"--vllm {args.vllm}: must start a Python that can import vllm. `pip install vllm` in an "
                 "environment of its own, then --vllm ENV/bin/python")
    info = bench.conditions() | {"run": time.strftime("%F %T"), "shape": args.model_shape,
                                 "card": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    records, out = bench.Records(args.out, info), Path(args.out).resolve()
    print(info, flush=True)
    ours = [f"ours/{weights}" for weights in dict.fromkeys(mode.split("/")[0] for mode in modes)]
    with tempfile.TemporaryDirectory() as folder, open(out) as written, open(f"{out}.log", "ab") as log:
        write_configs(Path(folder), bench.memory.config(args.model_shape))
        for part in [*ours, *(f"vllm/{mode}" for mode in modes), *ours]:
            written.seek(0, os.SEEK_END)
            job = {"part": part, "info": info | {"part": part}, "batch": batches, "slots": slots,
                   "folder": folder, "out": str(out), "skip": log.seek(0, os.SEEK_END)}
            began = time.perf_counter()
            failed = run(args.vllm if part.startswith("vllm") else python, job, log, args.timeout)
            said = [f"{r['batch']}: {r['tok_s']:,.0f} tokens/s" for r in map(json.loads, written)]
            if failed:
                records.append({"part": part, "failed": failed})
                said.append(f"FAILED, {failed}")
            print(f"{part}: {', '.join(said)} ({time.perf_counter() - began:.0f} s)", flush=True)
    tables.peers(out)


def write_configs(folder, c):
    """What vLLM reads of a model of random weights: config.json."""
    config = {key: getattr(c, key) for key in CONFIG} | {"hidden_act": "silu", "rope_theta": 1e6,
              "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    for weights, more in ("bf16", {}), ("nvfp4", {"quantization_config": NVFP4}):
        (folder / weights).mkdir()
        (folder / weights / "config.json").write_text(json.dumps(config | more))


def run(python, job, log, timeout):
    """Run one part in a child → why it failed, or None. None of the child's processes outlives it."""
    command = shlex.join([str(Path(__file__).resolve()), "--child", json.dumps(job)])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("peers.py: stopped by SIGTERM"))    # by way of finally
    child = subprocess.Popen(f"exec {python} {command}", shell=True, stdin=subprocess.DEVNULL, stdout=log,
                             stderr=log, start_new_session=True)
    try:
        code = child.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"still running after {timeout:g} s"
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)          # vLLM's second process holds memory of the card
        except ProcessLookupError:
            pass
        child.wait()
    lines = printed(job["out"], job["skip"]).splitlines() or ["no output"]
    errors = [line.strip() for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return f"exit code {code}: {(errors or lines)[-1][:200]}" if code else None


def printed(out, skip):
    """What the running part has printed: the log without its first `skip` bytes."""
    return Path(f"{out}.log").read_bytes()[skip:].decode(errors="replace")


# --- in the children

def save(job, batch, tokens, times, lengths=()):
    """Write one record. times: seconds for so many tokens, of each repetition. lengths: of whole answers."""
    rate = {"batch": batch, "tok_s": tokens / statistics.median(times), "times_s": times}
    drawn = {"mean_length": statistics.mean(lengths), "longest": max(lengths)} if lengths else {}
    with open(job.out, "a") as file:
        file.write(json.dumps(job.info | rate | drawn) + "\n")


def run_ours(job):
    import bench
    import torch
    weights = job.part.split("/")[1]
    torch.manual_seed(0)                       # the second turn repeats the first: weights, prompts, lengths
    model, adapter = bench.random_model(job.info["shape"], weights), Path(job.folder, "adapter")
    if not adapter.exists():
        bench.lora.save_adapter(model, adapter)           # vLLM loads the same one
    V, drawn = model.config.vocab_size, Path(job.folder, f"{weights}.json")
    for batch in job.batch:
        if batch == "whole":
            asked, *_ = work = bench.whole_work(V)
            done, seconds = bench.second_of_two(bench.Sampler(model), work)
            lengths = done.lengths.tolist()
            save(job, batch, sum(lengths), [seconds], lengths)
            drawn.write_text(json.dumps({"prompts": [len(prompt) for prompt in asked], "lengths": lengths}))
            continue
        rows, sampler, times = int(batch), bench.Sampler(model), []
        group = min(rows, GROUP)
        prompts = torch.randint(V, (rows // group, PROMPT)).tolist()
        for _ in range(1 + REPEATS):                      # the first call compiles the kernels
            sampler.generate(prompts, group, NEW, 1.0, [], 0, 0)
            times.append(sampler.stats["decode_s"])
        save(job, rows, rows * NEW, times[1:])


def run_vllm(job):
    _, weights, compiled, processes = job.part.split("/")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes == "2" else "0",
                   "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    import vllm
    from vllm.lora.request import LoRARequest
    use_random_weights()
    # vLLM's own sizes of CUDA graphs, less dense above 64 rows: it starts sooner and pads at most 15 rows
    rows = [int(batch) for batch in job.batch if batch != "whole"]
    sizes = sorted({1, 2, 4, *range(8, 64, 8), *range(64, (1 + (compiled == "default")) * job.slots + 1, 16),
                    *rows})        # default: prompts too run in graphs
    compilation = {"cudagraph_capture_sizes": sizes, "cudagraph_specialize_lora": False}
    if compiled == "none":
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    folder = Path(job.folder)
    llm = vllm.LLM(model=str(folder / weights), load_format="dummy", skip_tokenizer_init=True,
                   dtype="bfloat16", generation_config="vllm", max_model_len=4096, max_num_seqs=job.slots,
                   gpu_memory_utilization=0.85, enable_prefix_caching=True, enable_lora=True,
                   max_lora_rank=32, max_loras=1, compilation_config=compilation)
    adapter, chance = LoRARequest("adapter", 1, str(folder / "adapter")), random.Random(0)
    V = json.loads((folder / weights / "config.json").read_text())["vocab_size"]

    def prompts(lengths, samples):
        """`samples` rows of each of several random prompts."""
        ids = [[chance.randrange(V) for _ in range(n)] for n in lengths]
        return [{"prompt_token_ids": prompt} for prompt in ids for _ in range(samples)]

    def generate(rows, lengths):
        """→ seconds that vLLM takes for so many tokens in each row."""
        asked = [vllm.SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=n, detokenize=False,
                                     logprobs=0, flat_logprobs=True) for n in lengths]
        began = time.perf_counter()
        done = llm.generate(rows, asked, use_tqdm=False, lora_request=adapter)
        seconds, answers = time.perf_counter() - began, [one.outputs[0] for one in done]
        assert [len(a.token_ids) for a in answers] == lengths, "vLLM returned other lengths than it was asked"
        assert all(math.isfinite(a.cumulative_logprob) for a in answers), "vLLM's log-probs are not finite"
        return seconds

    generate(prompts([64] * 4, GROUP), [WARM] * 4 * GROUP)
    kernel, attention = (re.findall(pattern, printed(job.out, job.skip)) or ["not named in vLLM's log"]
                         for pattern in (r"Using (\w+) for NVFP4 GEMM", r"Using (\S+) attention backend"))
    job.info |= {"vllm": vllm.__version__, "attention": attention[-1],
                 "kernel": kernel[-1] if weights == "nvfp4" else None, "start_s": time.perf_counter() - began}
    for batch in job.batch:
        if batch == "whole":
            drawn = json.loads((folder / f"{weights}.json").read_text())
            lengths, samples = drawn["lengths"], len(drawn["lengths"]) // len(drawn["prompts"])
            for _ in range(2):                            # other prompts, so no prefix is cached
                seconds = generate(prompts(drawn["prompts"], samples), lengths)
            save(job, batch, sum(lengths), [seconds], lengths)
            continue
        n, times = int(batch), []
        rows = prompts([PROMPT] * (n // min(n, GROUP)), min(n, GROUP))
        for _ in range(2):                                # fill the prefix cache, then compile what reads it
            generate(rows, [WARM] * n)
        for _ in range(REPEATS):
            short, long = (generate(rows, [count] * n) for count in (WARM, WARM + NEW))
            times.append(long - short)
        save(job, n, n * NEW, times)


def use_random_weights():
    """vLLM's own dummy weights, ±0.001, break NVFP4, whose scales must be positive."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    @torch.no_grad()
    def load_weights(self, model, model_config):
        for name, p in model.state_dict().items():
            p = p.data
            if ".attn." in name or p.device.type == "meta":       # scales of the KV cache keep their values
                continue
            if name.endswith("global_scale"):
                p.fill_(40000)                            # a divisor; the weights' standard deviation is 0.02
            elif p.dtype == torch.uint8:
                p.random_(0, 256)                         # two codes a byte
            elif p.dtype == torch.float8_e4m3fn:
                p.copy_(torch.empty(p.shape, dtype=torch.float32, device=p.device).uniform_(64, 448))
            elif p.is_floating_point():
                p.fill_(1) if "norm" in name else p.normal_(0, 0.02)
    dummy_loader.DummyModelLoader.load_weights = load_weights


if __name__ == "__mp_main__":                             # vLLM's second process, where vLLM does not fork it
    use_random_weights()
elif __name__ == "__main__" and sys.argv[1:2] == ["--child"]:
    child = argparse.Namespace(**json.loads(sys.argv[2]))
    run_ours(child) if child.part.startswith("ours") else run_vllm(child)
elif __name__ == "__main__":
    main(sys.argv[1:])
