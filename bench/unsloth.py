"""GRPO steps of Unsloth with vLLM in its process, to compare with bench.step: one GPU, equal work.

    python -m bench.loading --write FOLDER --tokenizer QWEN --model-shape 1.5b
    python -m bench.unsloth --model FOLDER --out FILE.jsonl
    python -m bench.step --model-shape 1.5b --prompts 32 --samples 8 --new 256 --steps 4

A step samples --prompts × --samples answers of exactly --new tokens, after prompts of
--prompt-length, at temperature 1. Then it makes one AdamW step of DAPO's loss on LoRA of rank 32,
with random rewards. Unsloth's base is bitsandbytes' NF4, or bf16 with --quant bf16, and its vLLM
reads the same weights; gradient checkpointing is its own. The names of a record are those of
bench.step; the first step compiles:
    rollout_s      hand the adapter to vLLM, sample
    update_s       forward, backward, AdamW, and the rewards, which are random
    reserved_gb    the peak of what PyTorch holds, which bench.step's --memory-gb caps
    base_dtype     of the frozen projections: torch.uint8 in NF4

Needs: unsloth, vllm, trl, datasets; common.py; tools/run.py.
"""

import unsloth  # isort: skip: it changes trl and transformers, so it is the first to be imported

import os
import random
import sys
import tempfile
from importlib.metadata import version

import datasets
import torch
import transformers
import trl

from bench import common
from tools.run import peak_memory_gb

SEVEN = [f"{name}_proj" for name in "q k v o gate up down".split()]


class Meter(transformers.TrainerCallback):
    """The reward function; at the end of each step a record of its answers and its seconds."""

    def __init__(self, log, args):
        self.log, self.args = log, args
        self.draw = random.Random(0)

    def watch(self, trainer):
        """Add the seconds of each call of trainer._generate to self.rollout_s."""
        generate = trainer._generate

        def timed(*args, **kwargs):
            began = common.clock()
            result = generate(*args, **kwargs)
            self.rollout_s += common.clock() - began
            return result

        trainer._generate = timed

    def reward(self, completions, completion_ids, **_):
        self.lengths = [len(ids) for ids in completion_ids]
        return [self.draw.random() for _ in completions]

    def on_step_begin(self, args, state, control, **_):
        common.forget_peak()
        self.rollout_s = 0.0
        self.began = common.clock()

    def on_step_end(self, args, state, control, **_):
        step_s = common.clock() - self.began
        update_s = step_s - self.rollout_s
        new = sum(self.lengths)
        prompts = len(self.lengths) * self.args.prompt_length
        self.log.append(
            {
                "step": state.global_step - 1,
                "mean_length": new / len(self.lengths),
                "longest": max(self.lengths),
                "rollout_s": self.rollout_s,
                "rollout_tok_s": new / self.rollout_s,
                "update_s": update_s,
                "update_tok_s": (new + prompts) / update_s,
                "step_s": step_s,
                "peak_gb": peak_memory_gb(),
                "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
            }
        )


def main(arguments=None):
    work = dict(prompts=32, samples=8, prompt_length=128, new=256)
    # Unsloth takes 96 rows at once if nobody says how many, and overwrites exactly 256.
    chosen = dict(steps=4, micro_batch=64, slots=257, share=0.3)
    parser = common.flags(__doc__, model_shape="1.5b", **work, **chosen)
    parser.add_argument("--model", required=True, help="folder of random weights of --model-shape")
    parser.add_argument("--quant", choices=["nf4", "bf16"], default="nf4")
    args = parser.parse_args(arguments)
    rows = args.prompts * args.samples
    if args.micro_batch < 1 or rows % args.micro_batch:
        parser.error(f"--micro-batch {args.micro_batch} must divide the {rows} answers of a step")
    facts = {name: getattr(args, name) for name in (*work, *chosen) if name != "steps"}
    facts |= {"shape": args.model_shape, "weights": f"unsloth-{args.quant}", "mean": 0, "rank": 32}
    facts |= {name: version(name) for name in ("unsloth", "trl", "transformers", "vllm")}
    model, tokenizer = load(args)
    facts["base_dtype"] = base_dtype(model)
    meter = Meter(common.Records(args.out, common.conditions() | facts), args)
    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[meter.reward],
        args=settings(args, rows),
        callbacks=[meter],
        train_dataset=datasets.Dataset.from_list(digits(args, tokenizer)),
    )
    meter.watch(trainer)
    trainer.train()


def load(args):
    """→ Unsloth's model with vLLM beside it and a LoRA on all projections, and its tokenizer."""
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        model_name=args.model,
        max_seq_length=max(512, args.prompt_length + args.new),
        dtype=torch.bfloat16,
        load_in_4bit=args.quant == "nf4",
        load_in_16bit=args.quant == "bf16",
        fast_inference=True,
        max_lora_rank=32,
        max_num_seqs=args.slots,
        gpu_memory_utilization=args.share,
        use_exact_model_name=True,
    )
    model = unsloth.FastLanguageModel.get_peft_model(
        model, r=32, lora_alpha=32, target_modules=SEVEN, use_gradient_checkpointing="unsloth"
    )
    return model, tokenizer


def base_dtype(model):
    """→ the dtype of the frozen projections: uint8 for NF4. If bitsandbytes cannot be loaded,
    Unsloth goes on in bf16.
    """
    found = {str(m.base_layer.weight.dtype) for m in model.modules() if hasattr(m, "base_layer")}
    return ", ".join(sorted(found))


def settings(args, rows):
    return trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=args.steps,
        num_generations=args.samples,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=rows // args.micro_batch,
        max_completion_length=args.new,
        generation_kwargs={"ignore_eos": True},
        temperature=1.0,
        learning_rate=1e-6,
        loss_type="dapo",
        beta=0.0,
        mask_truncated_completions=False,
        optim="adamw_8bit",
        bf16=True,
        use_vllm=True,
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def digits(args, tokenizer):
    """→ the rows of TRL's data set: prompts of --prompt-length digits, each of them a token."""
    draw = random.Random(1)
    texts = [
        "".join(draw.choices("0123456789", k=args.prompt_length))
        for _ in range(args.prompts * args.steps)
    ]
    assert {len(ids) for ids in tokenizer(text=texts)["input_ids"]} == {args.prompt_length}
    return [{"prompt": text} for text in texts]


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of vLLM would keep the process alive
