"""The usual QLoRA stack on random weights, to compare with bench.step.

    python -m bench.qlora --model-shape 7b --prompts 1 --samples 8 --prompt-length 128 --new 2048

One GRPO step of transformers, bitsandbytes and PEFT: model.generate with the adapter in it, then
forward and backward of −Σ A·log π with gradient checkpointing, as many rows at a time as
--micro-tokens hold, and AdamW. Its sampling takes minutes: --sampled tokens are timed in the
middle of the answers, at a context of --prompt-length + --new / 2, and the seconds multiplied.

Needs: bitsandbytes, peft; common.py; tools/run.py, tools/memory.py.
"""

from importlib.metadata import version

import bitsandbytes
import peft
import torch
import transformers

from bench import common
from tools import memory
from tools.run import peak_memory_gb


def main(arguments=None):
    sizes = dict(prompts=1, samples=8, prompt_length=128, new=2048, micro_tokens=2560, sampled=48)
    args = common.flags(__doc__, model_shape="7b", **sizes).parse_args(arguments)
    versions = {name: version(name) for name in ("bitsandbytes", "peft", "transformers")}
    records = common.Records(args.out, common.conditions() | versions)
    model = qlora(memory.config(args.model_shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)  # those without gradient stay
    rows = args.prompts * args.samples
    length = args.prompt_length + args.new
    tokens = torch.randint(model.config.vocab_size, (rows, length), device=common.DEVICE)
    for _ in range(2):  # the first update makes AdamW's moments
        update_s = update(model, optimizer, tokens, args.prompt_length, args.micro_tokens)
    rollout_s = sample(model, args.prompt_length, rows, args.new, args.sampled)
    records.append(
        vars(args)
        | {
            "shape": args.model_shape,
            "weights": "hf-nf4",
            "rollout_s": rollout_s,
            "update_s": update_s,
            "step_s": rollout_s + update_s,
            "rollout_tok_s": rows * args.new / rollout_s,
            "update_tok_s": rows * length / update_s,
            "peak_gb": peak_memory_gb(),
        }
    )


def qlora(c):
    """A random model in bf16, its projections in NF4, LoRA of rank 32 on all of them."""
    with torch.device(common.DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(c, dtype=torch.bfloat16)
    for name, linear in list(model.named_modules()):
        if name.endswith("_proj"):
            sizes = linear.in_features, linear.out_features
            four = bitsandbytes.nn.Linear4bit(
                *sizes, False, torch.bfloat16, quant_type="nf4", device="meta"
            )
            weight = bitsandbytes.nn.Params4bit(linear.weight.data, False, quant_type="nf4")
            four.weight = weight.to(common.DEVICE)
            four.bias = linear.bias
            model.set_submodule(name, four)
    model.is_loaded_in_4bit = True  # from_pretrained would set it; PEFT reads it
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    seven = [f"{name}_proj" for name in "q k v o gate up down".split()]
    return peft.get_peft_model(model, peft.LoraConfig(r=32, lora_alpha=32, target_modules=seven))


def sample(model, prompt_length, rows, new, sampled):
    """Seconds of `new` steps, from those of `sampled` steps in the middle of the answers."""
    model.eval()  # in training, gradient checkpointing would switch the cache off
    middle = (1, prompt_length + new // 2)
    ids = torch.randint(model.config.vocab_size, middle, device=common.DEVICE).repeat(rows, 1)
    times = []
    for count in (2, 2, 2 + sampled):  # the warm-up decodes too, to load its kernels
        began = common.clock()
        exactly = dict(max_new_tokens=count, min_new_tokens=count)
        model.generate(input_ids=ids, **exactly, do_sample=True, pad_token_id=0)
        times.append(common.clock() - began)
    _, short, long = times
    return (long - short) / sampled * new


def update(model, optimizer, tokens, prompt_length, micro_tokens):
    """Seconds of one policy-gradient step on (B, T) tokens."""
    model.train()
    advantages = torch.randn(len(tokens), device=common.DEVICE)
    rows = max(1, micro_tokens // tokens.shape[1])
    began = common.clock()
    for part, A in zip(tokens.split(rows), advantages.split(rows), strict=True):
        logits = model(input_ids=part, use_cache=False).logits[:, prompt_length - 1 : -1]
        answers = part[:, prompt_length:, None]
        chosen = logits.float().log_softmax(-1).gather(2, answers)[..., 0]
        loss = -(chosen * A[:, None]).sum() / tokens.numel()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return common.clock() - began


if __name__ == "__main__":
    main()
