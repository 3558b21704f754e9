"""GRPO steps of TRL with vLLM in its process, to compare with train.py's: GSM8K, one GPU.

    python export.py MODEL.gguf FOLDER --format bf16 --quant bf16
    python results/trl_step.py --model FOLDER --data train.jsonl --out FILE.jsonl
    python train.py --model MODEL.gguf --task gsm8k --data train.jsonl --prompts 32 --max-new-tokens 400

Both take the same problems in the same order, with the same prompts and rewards. Both sample at temperature
1, and make one AdamW step of DAPO's loss on LoRA of rank 32. TRL's base is bf16, and vLLM has a copy of it.
A record a step, in seconds; the first step compiles:
    sync_s         merge the adapter into the trainer's weights, and copy all of them to vLLM
    generate_s     vLLM samples (without a GPU: transformers' generate)
    rollout_s      sync_s, generate_s, tokenizer, rewards: what train.py calls rollout_s
    recompute_s    the trainer's log-probs of the answers, for TRL's importance weights
    update_s       recompute_s, forward, backward, AdamW: what train.py calls update_s
TRL pads all answers of a step to the longest. It also runs rows of advantage 0, which train.py skips.
Needs: trl, peft, datasets, vllm; bench.py, checkpoint.py, runs.py, tasks.py, train.py.
"""
import argparse
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from statistics import fmean

import bench
import datasets
import peft
import transformers
import trl

import checkpoint
import runs
import tasks
import train


class Meter(transformers.TrainerCallback):
    """The reward function; at the end of each step a record of its answers and its seconds."""

    def __init__(self, log, task, stop_ids):
        self.log, self.task, self.stop_ids, self.seconds = log, task, stop_ids, Counter()

    def time(self, owner, name):
        """From now on, add the seconds of each call of this method to self.seconds[name]."""
        method = getattr(owner, name)

        def timed(*args, **kwargs):
            began = bench.clock()
            result = method(*args, **kwargs)
            self.seconds[name] += bench.clock() - began
            return result
        setattr(owner, name, timed)

    def reward(self, completions, completion_ids, problem, **_):
        texts = [chat[0]["content"] for chat in completions]
        finished = [ids[-1] in self.stop_ids for ids in completion_ids]
        rewards = list(map(self.task.reward, problem, texts, finished))
        lengths = map(len, completion_ids)
        self.answers = dict(reward=fmean(rewards), finished=fmean(finished), length=fmean(lengths))
        return rewards

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
    for name, default in dict(steps=4, prompts=32, group_size=8, max_new_tokens=400, micro_batch=16).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--out", help="append a record a step to this file")
    a = parser.parse_args(arguments)
    rows, gpu = a.prompts * a.group_size, bench.DEVICE == "cuda"
    if a.micro_batch < 1 or rows % a.micro_batch:
        parser.error(f"--micro-batch {a.micro_batch} must divide the {rows} answers of a step")
    task, ours = tasks.gsm8k(a.data), train.Config(prompts=a.prompts)
    problems = [{"prompt": [{"role": "user", "content": task.prompt(p)}], "problem": p}
                for step in range(a.steps) for p in train.batch(task.train, ours, step)]
    versions = {name: version(name) for name in ["trl", "peft", "transformers"] + ["vllm"] * gpu}
    log = bench.Records(a.out, bench.conditions() | versions | {
        k: v for k, v in vars(a).items() if isinstance(v, int)})
    meter = Meter(log, task, checkpoint.open(a.model).stop_ids())
    trainer = trl.GRPOTrainer(
        a.model, meter.reward, callbacks=[meter], train_dataset=datasets.Dataset.from_list(problems),
        peft_config=peft.LoraConfig(r=32, lora_alpha=32, target_modules="all-linear"),
        args=trl.GRPOConfig(
            tempfile.mkdtemp(), model_init_kwargs={"dtype": "bfloat16"}, max_steps=a.steps, use_cpu=not gpu,
            per_device_train_batch_size=a.micro_batch, gradient_accumulation_steps=rows // a.micro_batch,
            num_generations=a.group_size, max_completion_length=a.max_new_tokens, learning_rate=1e-5,
            loss_type="dapo", epsilon_high=0.28, gradient_checkpointing=False, shuffle_dataset=False,
            use_vllm=gpu, vllm_mode="colocate", vllm_max_model_length=2048, report_to="none",
            save_strategy="no", logging_strategy="no", disable_tqdm=True))
    for name in "_generate _generate_single_turn _calculate_rewards _generate_and_score_completions".split():
        meter.time(trainer, name)
    if gpu:
        meter.time(trainer.vllm_generation, "sync_weights")
    meter.began = bench.clock()
    trainer.train()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"trl_step.py: {error}")
