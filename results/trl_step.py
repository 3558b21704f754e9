"""A GRPO step of TRL with vLLM in its process, to compare with train.py's: answers to GSM8K, one GPU.

    python export.py MODEL.gguf FOLDER --format bf16 --quant bf16
    python results/trl_step.py --model FOLDER --data train.jsonl --out FILE.jsonl
    python train.py --model MODEL.gguf --task gsm8k --data train.jsonl --prompts 32 --max-new-tokens 400

Both take the same problems in the same order, prompts, rewards, temperature 1 and LoRA of rank 32, and make one
AdamW step of DAPO's loss on 32 × 8 answers. TRL's base is bf16, once in its trainer and once in vLLM.

A record a step, in seconds; the first step compiles:
    sync_s        merge the adapter into the trainer's weights, and copy all of them to vLLM
    generate_s    vLLM samples
    rollout_s     sync_s, generate_s, tokenizer, rewards: what train.py calls rollout_s
    recompute_s   the trainer's log-probs of the answers, for TRL's importance weights; advantages
    update_s      recompute_s, forward, backward, AdamW: what train.py calls update_s
TRL pads all answers of a step to the longest. It also runs rows of advantage 0, which train.py skips.
Needs: trl, peft, datasets, vllm; bench.py, checkpoint.py, runs.py, tasks.py, train.py.
"""
import argparse
import importlib.metadata
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import bench  # noqa: E402
import datasets  # noqa: E402
import peft  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402

import checkpoint  # noqa: E402
import runs  # noqa: E402
import tasks  # noqa: E402
import train  # noqa: E402


class Meter(transformers.TrainerCallback):
    """The reward function, and at the end of each step a record of its answers and its seconds."""

    def __init__(self, log, stop_ids):
        self.log, self.stop_ids, self.seconds = log, stop_ids, Counter()

    def time(self, owner, name):
        """From now on, add the seconds of each call of this method to self.seconds[name]."""
        method = getattr(owner, name)

        def timed(*args, **kwargs):
            began = bench.clock()
            result = method(*args, **kwargs)
            self.seconds[name] += bench.clock() - began
            return result
        setattr(owner, name, timed)

    def reward(self, completions, completion_ids, answer, **_):
        finished = [ids[-1] in self.stop_ids for ids in completion_ids]
        rewards = [tasks.gsm8k_reward({"answer": gold}, chat[0]["content"], ended)
                   for gold, chat, ended in zip(answer, completions, finished, strict=True)]
        self.answers = {"reward": sum(rewards) / len(rewards), "finished": sum(finished) / len(finished),
                        "length": sum(map(len, completion_ids)) / len(rewards)}
        return rewards

    def on_train_begin(self, args, state, control, **_):
        self.began = bench.clock()

    def on_step_end(self, args, state, control, **_):
        now, s = bench.clock(), self.seconds
        rollout_s = s["_generate"] + s["_calculate_rewards"]
        self.log.append({"step": state.global_step - 1} | self.answers | {
            "sync_s": s["sync_weights"], "generate_s": s["_generate_single_turn"] - s["sync_weights"],
            "rollout_s": rollout_s, "recompute_s": s["_generate_and_score_completions"] - rollout_s,
            "update_s": now - self.began - rollout_s, "peak_gb": runs.peak_memory_gb()})
        print(self.log[-1], flush=True)
        self.began = now
        s.clear()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder written by export.py or save_pretrained")
    parser.add_argument("--data", required=True, help="train.jsonl of GSM8K")
    for name, default in (("steps", 4), ("prompts", 32), ("group-size", 8), ("max-new-tokens", 400),
                          ("micro-batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vllm-memory", type=float, default=0.3, help="vLLM's share of the GPU's memory")
    for name, default, what in (("vllm", True, "without it, transformers' generate samples"),
                                ("correction", True, "TRL's importance weights against vLLM"),
                                ("gradient-checkpointing", False, "keep one activation a layer")):
        parser.add_argument(f"--{name}", default=default, action=argparse.BooleanOptionalAction, help=what)
    parser.add_argument("--out", help="append a record a step to this file")
    args = parser.parse_args(arguments)
    rows = args.prompts * args.group_size
    if args.micro_batch < 1 or rows % args.micro_batch:
        parser.error(f"--micro-batch {args.micro_batch} must divide the {rows} answers of a step")
    task, ours = tasks.gsm8k(args.data), train.Config(prompts=args.prompts)
    problems = [problem for step in range(args.steps) for problem in train.batch(task.train, ours, step)]
    versions = {name: importlib.metadata.version(name)
                for name in ("trl", "peft", "transformers", *["vllm"] * args.vllm)}
    log = bench.Records(args.out, bench.conditions() | versions | vars(args))
    meter = Meter(log, checkpoint.open(args.model).stop_ids())
    trainer = trl.GRPOTrainer(
        args.model, meter.reward, callbacks=[meter], train_dataset=datasets.Dataset.from_list([
            {"prompt": [{"role": "user", "content": task.prompt(p)}], "answer": p["answer"]} for p in problems]),
        peft_config=peft.LoraConfig(r=32, lora_alpha=32, target_modules="all-linear"),
        args=trl.GRPOConfig(
            tempfile.mkdtemp(), max_steps=args.steps, shuffle_dataset=False, learning_rate=1e-5,
            per_device_train_batch_size=args.micro_batch, gradient_accumulation_steps=rows // args.micro_batch,
            num_generations=args.group_size, max_completion_length=args.max_new_tokens,
            loss_type="dapo", epsilon_high=0.28, gradient_checkpointing=args.gradient_checkpointing,
            use_vllm=args.vllm, vllm_mode="colocate", vllm_gpu_memory_utilization=args.vllm_memory,
            vllm_max_model_length=2048, vllm_importance_sampling_correction=args.correction,
            model_init_kwargs={"dtype": "bfloat16"}, use_cpu=bench.DEVICE == "cpu", report_to="none",
            save_strategy="no", logging_strategy="no", disable_tqdm=True))
    for name in ("_generate_single_turn", "_generate", "_calculate_rewards", "_generate_and_score_completions"):
        meter.time(trainer, name)
    if args.vllm:
        meter.time(trainer.vllm_generation, "sync_weights")
    trainer.train()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"trl_step.py: {error}")
