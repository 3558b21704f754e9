"""What does vLLM's own 8-bit cache cost a real model? Its greedy answers to GSM8K's test.

    python -m tools.export M.gguf FOLDER --format bf16 --quant bf16
    ENV/bin/python -m experiments.kv8_vllm FOLDER --data test.jsonl --kv auto
    ENV/bin/python -m experiments.kv8_vllm FOLDER --data test.jsonl --kv fp8

ENV has vLLM, which runs as bench/vllm.py runs it: CUDA graphs of decode steps, no torch.compile.
auto is bf16. fp8 is e4m3 without a scale, vLLM's default.

Needs: torch, vllm; tasks.py.
"""

import argparse
import json
import os
import time

import torch

from tasks import gsm8k


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="a model that vLLM loads")
    parser.add_argument("--data", required=True, help="problems, as JSON lines")
    parser.add_argument("--kv", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--max-new-tokens", type=int, default=400)
    parser.add_argument("--out", default="kv8_vllm.jsonl")
    args = parser.parse_args()
    task = gsm8k(args.data, held_out=0)
    chats = [[{"role": "user", "content": task.prompt(problem)}] for problem in task.train]

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    try:
        import vllm
    except ImportError as error:
        parser.error(f"start it with a Python that has vLLM ({error})")
    llm = vllm.LLM(
        model=args.folder,
        dtype="bfloat16",
        kv_cache_dtype=args.kv,
        generation_config="vllm",
        max_model_len=2048,
        gpu_memory_utilization=0.5,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    )
    greedy = vllm.SamplingParams(temperature=0, max_tokens=args.max_new_tokens)
    began = time.perf_counter()
    answers = [done.outputs[0] for done in llm.chat(chats, greedy, use_tqdm=False)]
    seconds = time.perf_counter() - began
    finished = [answer.finish_reason == "stop" for answer in answers]
    rewards = [
        task.reward(problem, answer.text, end)
        for problem, answer, end in zip(task.train, answers, finished, strict=True)
    ]
    record = {
        "model": os.path.basename(os.path.normpath(args.folder)),
        "kv": args.kv,
        "problems": len(rewards),
        "accuracy": sum(rewards) / len(rewards),
        "finished": sum(finished) / len(finished),
        "first": answers[0].text[:200],
        "seconds": seconds,
        "gpu": torch.cuda.get_device_name(),
        "vllm": vllm.__version__,
    }
    print(record)
    with open(args.out, "a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
