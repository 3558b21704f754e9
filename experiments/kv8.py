"""May a sampler keep keys and values in 8 bits? The mismatch that each way of rounding costs.

    python -m experiments.kv8 gate --model M.gguf --data tests/data/gsm8k_answers.jsonl --tokens 400

The model reads texts of --tokens tokens, answers of --data one after the other, once as it is and
once for each line of the table with rounded keys and values in every layer. mismatch is the mean of
exp|Δ ln π| over all tokens, 1 if nothing changes; worst is the same of one token in 1,000.

Softmax does not change when all keys of a query move by the same vector. Qwen2.5's key bias is up
to 354, far more than what tells its keys apart, and is nearly the same for all: RoPE turns its
large pairs slowly. So integers resolve a key better once the bias is out:

    bias    keys are rounded before RoPE and without their bias, which a kernel would add back
    limit   RoPE's turns of the bias, averaged over the positions of a text, are subtracted. The
            kernel adds nothing back.
    scaled  the same, and a pair that this leaves large, because RoPE turns it fast, is divided by a
            power of two, by which the kernel multiplies the query
    8192    scaled, with the average over 8,192 positions: of a sampler whose longest row is longer
            than these texts

Needs: model.py, ops/attention.py, tools/weights.py, tools/run.py; bench/common.py.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from bench import common
from model import Decoder, load, rotary
from ops import attention
from tools import weights
from tools.run import append, rounded

CHUNK = 512  # tokens whose logits exist at once

# --- how to round


def int8(x: Tensor) -> Tensor:
    """→ x (…, Dh) as 8-bit integers times a bf16 scale for each token and head, in fp32."""
    largest = x.float().abs().amax(-1, keepdim=True)
    scale = (largest / 127).clamp(min=1e-30).bfloat16().float()
    return (x.float() / scale).round().clamp(-127, 127) * scale


def e4m3(x: Tensor) -> Tensor:
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def same(x: Tensor) -> Tensor:
    return x


class Way(NamedTuple):
    """How keys and values are rounded."""

    keys: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]
    without: str = ""  # what is taken out of the keys first: see the file's docstring


WAYS = {
    "bf16": Way(bf16, bf16),
    "e4m3": Way(e4m3, e4m3),
    "int8 plain": Way(int8, int8),
    "int8 without bias before RoPE": Way(int8, int8, "bias"),
    "int8 minus constant": Way(int8, int8, "limit"),
    "int8 minus constant, scaled": Way(int8, int8, "scaled"),
    "int8 minus constant of 8192, scaled": Way(int8, int8, "8192"),
    "int8 values alone": Way(same, int8),
}


class Rounded(attention.Packed):
    """Attention of texts whose keys and values are rounded."""

    def __init__(self, lengths: list[int], decoder: Decoder, way: Way):
        super().__init__([(length, []) for length in lengths], decoder.device)
        self.decoder, self.way = decoder, way
        positions = 8192 if way.without == "8192" else max(lengths)
        positions = torch.arange(positions, device=decoder.device)
        angles = rotary(positions, decoder.inv_freq, decoder.rope_scale)
        # RoPE is linear: the mean of all turns of the bias is one turn, by the mean cos and sin.
        self.mean_cos, self.mean_sin = (x.mean(0, keepdim=True) for x in angles)

    def __call__(self, qkv, heads, cos, sin, layer):
        q, k, v = attention.rotated_heads(qkv, heads, cos, sin)
        bias = self.key_bias(heads, layer)
        if bias is None or not self.way.without:
            k = self.way.keys(k)
        elif self.way.without == "bias":
            unrotated = qkv.unflatten(-1, (heads.query + 2 * heads.key, -1))
            unrotated = unrotated[:, heads.query : heads.query + heads.key].float()
            k = attention.rope(self.way.keys(unrotated - bias) + bias, cos, sin)
        else:
            scale = self.pair_scale(bias)
            k = k.float() - attention.rope(bias, self.mean_cos, self.mean_sin)
            k = self.way.keys(k / scale) * scale
        k, v = (x.to(qkv.dtype) for x in (k, self.way.values(v)))
        if not qkv.is_cuda:
            return torch.cat([self.attend_to_group(q, k, v, *span) for span in self.spans])
        texts = *self.cu_seqlens, *self.max_seqlens
        return varlen_attn(q, k, v, *texts, **attention.CAUSAL).flatten(1)

    def pair_scale(self, bias):
        """→ (1, Hkv, Dh) powers of two, of the bias that the constant leaves in each pair: 1 if it
        is small beside 4, about twice what else is in a key.
        """
        if self.way.without == "limit":
            return 1.0
        first, second = bias.chunk(2, -1)
        moves = (1 - self.mean_cos.square() - self.mean_sin.square()).clamp(min=0)
        left = (first.square() + second.square()) * moves
        return torch.exp2((1 + left / 16).log2().div(2).round()).repeat(1, 1, 2)

    def key_bias(self, heads, layer):
        """→ (1, Hkv, Dh) f32, or None."""
        bias = self.decoder.layers[layer].self_attn.qkv_proj.base.bias
        if bias is None:
            return None
        by_head = bias.float().view(1, heads.query + 2 * heads.key, -1)
        return by_head[:, heads.query : heads.query + heads.key]


# --- the measure


def texts_of(path: str, tokenizer, length: int, total: int) -> list[list[int]]:
    """→ texts of `length` token ids, at least one, and `total` together: the data's answers, one
    after the other. ValueError: the data has too few.
    """
    count = max(1, total // length)
    answers = (json.loads(line)["text"] for line in Path(path).read_text().splitlines())
    ids = []
    for answer in answers:
        ids += tokenizer(answer + "\n\n", add_special_tokens=False)["input_ids"]
        if len(ids) >= count * length:
            return [ids[i * length : (i + 1) * length] for i in range(count)]
    raise ValueError(f"--data {path} has {len(ids)} tokens: {count} x {length} are needed")


@torch.no_grad()
def logprobs(decoder: Decoder, texts: list[list[int]], way: Way) -> Tensor:
    """→ ln π of each token of the texts but their first, on the CPU."""
    attend = Rounded([len(text) for text in texts], decoder, way)
    ids = torch.tensor(sum(texts, []), device=decoder.device)
    states, targets = decoder(ids, attend.positions, attend)[:-1], ids[1:]
    predicted = attend.positions[1:] > 0
    found = []
    pairs = zip(states[predicted].split(CHUNK), targets[predicted].split(CHUNK), strict=True)
    for hidden, tokens in pairs:
        logits = decoder.logits(hidden)
        found.append((logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(1)).cpu())
    return torch.cat(found)


def gate(args: argparse.Namespace):
    """Measure each way of rounding, for each model and each length of text."""
    conditions = common.conditions()
    for path in args.model:
        began = common.clock()
        source = weights.open(path)
        decoder = load(source, "nvfp4", device=args.device)
        tokenizer = source.tokenizer()
        print(f"{Path(path).stem}, loaded in {common.clock() - began:.0f} s", flush=True)
        for length in args.tokens:
            texts = texts_of(args.data, tokenizer, length, max(length, args.total))
            reference = logprobs(decoder, texts, Way(same, same))
            print(f"| {len(texts)} x {length} tokens | mismatch | worst |\n|---|---|---|")
            for name in args.ways:
                factors = (logprobs(decoder, texts, WAYS[name]) - reference).abs().exp()
                mismatch, worst = factors.mean().item(), factors.quantile(0.999).item()
                print(f"| {name} | {mismatch:.4f} | {worst:.3f} |", flush=True)
                record = dict(model=Path(path).stem, length=length, texts=len(texts), way=name)
                record |= dict(mismatch=rounded(mismatch), worst=rounded(worst))
                append(Path(args.out), record | conditions)
            print(f"{common.clock() - began:.0f} s", flush=True)


def main(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("gate",))
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--data", required=True, help="JSONL file with a key text")
    parser.add_argument("--tokens", type=int, action="append", help="of a text; may be repeated")
    parser.add_argument("--total", type=int, default=8000, help="tokens of all texts, about")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--device", default=common.DEVICE)
    parser.add_argument("--out", default="kv8.jsonl")
    args = parser.parse_args(arguments)
    args.tokens = args.tokens or [400, 4000]
    gate(args)


if __name__ == "__main__":
    main(sys.argv[1:])
