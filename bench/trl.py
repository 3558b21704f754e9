"""GRPO steps of TRL with vLLM in its process, to compare with train.py's: GSM8K, one GPU.

    python -m tools.export MODEL.gguf FOLDER --format bf16 --quant bf16
    python -m bench.trl --model FOLDER --data train.jsonl --out FILE.jsonl
    python train.py --model MODEL.gguf --task gsm8k --data train.jsonl --prompts 32 \\
        --max-new-tokens 400

Both take the same problems in the same order, with the same prompts and rewards. Both sample at
temperature 1, and make one AdamW step of DAPO's loss on LoRA of rank 32. TRL's base is bf16, and
vLLM has a copy of it. A record a step, in seconds; the first step compiles:
    rollout_s      merge the adapter into the trainer's weights and copy all of them to vLLM, sample
                   (without a GPU: transformers' generate), rewards: what train.py calls rollout_s
    update_s       log-probs for TRL's importance weights, forward, backward, AdamW: what train.py
                   calls update_s
TRL pads all answers of a step to the longest, and runs those of advantage 0, which train.py skips.

Needs: trl, peft, datasets, vllm; common.py; tools/weights.py, tools/run.py, tasks.py, train.py.
"""

import tempfile
from importlib.metadata import version
from statistics import fmean

import datasets
import peft
import transformers
import trl

import tasks
import train
from bench import common
from tools import weights
from tools.flags import Config
from tools.run import peak_memory_gb


class Meter(transformers.TrainerCallback):
    """The reward function; at the end of each step a record of its answers and its seconds."""

    def __init__(self, log, task, stop_ids):
        self.log, self.task, self.stop_ids = log, task, stop_ids
        self.rollout_s = 0.0

    def time(self, owner, name):
        """From now on, add the seconds of each call of this method to self.rollout_s."""
        method = getattr(owner, name)

        def timed(*args, **kwargs):
            began = common.clock()
            result = method(*args, **kwargs)
            self.rollout_s += common.clock() - began
            return result

        setattr(owner, name, timed)

    def reward(self, completions, completion_ids, problem, **_):
        texts = [chat[0]["content"] for chat in completions]
        finished = [ids[-1] in self.stop_ids for ids in completion_ids]
        rewards = list(map(self.task.reward, problem, texts, finished))
        self.answers = {
            "reward": fmean(rewards),
            "finished": fmean(finished),
            "length": fmean(map(len, completion_ids)),
        }
        return rewards

    def on_step_end(self, args, state, control, **_):
        now = common.clock()
        measured = {
            "step": state.global_step - 1,
            "rollout_s": self.rollout_s,
            "update_s": now - self.began - self.rollout_s,
            "peak_gb": peak_memory_gb(),
        }
        self.log.append(measured | self.answers)
        self.began = now
        self.rollout_s = 0.0


def main(arguments=None):
    sizes = dict(steps=4, prompts=32, group_size=8, max_new_tokens=400, micro_batch=16)
    parser = common.flags(__doc__, **sizes)
    parser.add_argument("--model", required=True, help="folder of tools.export or save_pretrained")
    parser.add_argument("--data", required=True, help="train.jsonl of GSM8K")
    args = parser.parse_args(arguments)
    rows, gpu = args.prompts * args.group_size, common.DEVICE == "cuda"
    if args.micro_batch < 1 or rows % args.micro_batch:
        parser.error(f"--micro-batch {args.micro_batch} must divide the {rows} answers of a step")
    task = tasks.gsm8k(args.data)
    stop_ids = weights.open(args.model).stop_ids()
    names = ["trl", "peft", "transformers"]
    if gpu:
        names.append("vllm")
    info = common.conditions() | {name: version(name) for name in names}
    log = common.Records(args.out, info | {name: getattr(args, name) for name in sizes})
    meter = Meter(log, task, stop_ids)
    trainer = trl.GRPOTrainer(
        args.model,
        meter.reward,
        callbacks=[meter],
        train_dataset=datasets.Dataset.from_list(problems(args, task)),
        peft_config=peft.LoraConfig(r=32, lora_alpha=32, target_modules="all-linear"),
        args=trl.GRPOConfig(
            tempfile.mkdtemp(),
            model_init_kwargs={"dtype": "bfloat16"},
            max_steps=args.steps,
            use_cpu=not gpu,
            per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=rows // args.micro_batch,
            num_generations=args.group_size,
            max_completion_length=args.max_new_tokens,
            learning_rate=1e-5,
            loss_type="dapo",
            epsilon_high=0.28,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            use_vllm=gpu,
            vllm_mode="colocate",
            vllm_max_model_length=2048,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
    )
    meter.time(trainer, "_generate")
    meter.time(trainer, "_calculate_rewards")
    meter.began = common.clock()
    trainer.train()


def problems(args, task):
    """The rows of TRL's data set: the problems that train.py draws for each step, in its order."""
    seed = Config().seed
    rows = []
    for step in range(args.steps):
        for problem in train.draw_problems(task.train, seed, step * args.prompts, args.prompts):
            prompt = [{"role": "user", "content": task.prompt(problem)}]
            rows.append({"prompt": prompt, "problem": problem})
    return rows


if __name__ == "__main__":
    main()
