"""The usual QLoRA stack, to compare with `bench.py step`: transformers, bitsandbytes, PEFT; random weights.

    python results/qlora_step.py --model-shape 7b --prompts 1 --samples 8 --prompt-length 128 --new 2048

One GRPO step of QLoRA: model.generate with the adapter in it, then forward and backward of −Σ A·log π with
gradient checkpointing, as many rows at a time as --micro-tokens hold, and AdamW. Its sampling takes minutes:
--sampled tokens are timed in the middle of the answers, at a context of --prompt-length + --new / 2, and the
seconds multiplied. bench.py times our own step.

Needs: bitsandbytes, peft; bench.py, memory.py, runs.py.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import bench  # noqa: E402
import bitsandbytes  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import memory  # noqa: E402
import runs  # noqa: E402


def qlora(c):
    """A random model of the config's shape: bf16, its projections in NF4, LoRA of rank 32 on all of them."""
    model = bench.hf_model(c)
    for name, linear in list(model.named_modules()):
        if name.endswith("_proj"):
            four = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, False, torch.bfloat16,
                                              quant_type="nf4", device="meta")
            weight = bitsandbytes.nn.Params4bit(linear.weight.data, False, quant_type="nf4")
            four.weight = weight.to(bench.DEVICE)
            four.bias = linear.bias
            model.set_submodule(name, four)
    model.is_loaded_in_4bit = True                         # from_pretrained would set it; PEFT reads it
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return peft.get_peft_model(model, peft.LoraConfig(r=32, lora_alpha=32, target_modules=[
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]))


def sample(model, prompt_length, batch, new, sampled):
    """Seconds of `new` steps of generate, from those of `sampled` steps in the middle of the answers."""
    middle = torch.randint(model.config.vocab_size, (prompt_length + new // 2,)).tolist()
    model.eval()                           # in training, gradient checkpointing would switch the cache off
    return bench.hf_decode(model, [middle], batch, sampled, sampled)[1] / sampled * new


def update(model, optimizer, tokens, prompt_length, micro_tokens):
    """Seconds of one policy-gradient step on (B, T) tokens."""
    model.train()
    advantages, rows = torch.randn(len(tokens), device=bench.DEVICE), max(1, micro_tokens // tokens.shape[1])
    began = bench.clock()
    for part, A in zip(tokens.split(rows), advantages.split(rows), strict=True):
        logits = model(input_ids=part, use_cache=False).logits[:, prompt_length - 1:-1]
        chosen = logits.float().log_softmax(-1).gather(2, part[:, prompt_length:, None])[..., 0]
        (-(chosen * A[:, None]).sum() / tokens.numel()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return bench.clock() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-shape", choices=memory.MODELS, default="7b")
    for name, default in (("prompts", 1), ("samples", 8), ("prompt-length", 128), ("new", 2048),
                          ("micro-tokens", 2560), ("sampled", 48)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out")
    args = parser.parse_args()
    log = bench.Records(args.out, {})
    info = bench.conditions() | {"bitsandbytes": bitsandbytes.__version__, "peft": peft.__version__,
                                 "transformers": transformers.__version__}
    c = memory.config(args.model_shape)
    model = qlora(c)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    B, length = args.prompts * args.samples, args.prompt_length + args.new
    tokens = torch.randint(c.vocab_size, (B, length), device=bench.DEVICE)
    seconds = [update(model, optimizer, tokens, args.prompt_length, args.micro_tokens) for _ in range(2)]
    update_gb = runs.peak_memory_gb()
    rollout_s = sample(model, args.prompt_length, B, args.new, args.sampled)
    record = info | vars(args) | {
        "shape": args.model_shape, "weights": "hf-nf4", "rollout_s": rollout_s, "update_s": seconds[1],
        "step_s": rollout_s + seconds[1], "rollout_tok_s": B * args.new / rollout_s,
        "update_tok_s": B * length / seconds[1], "update_gb": update_gb,
        "peak_gb": runs.peak_memory_gb()}
    log.append(record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
