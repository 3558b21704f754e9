"""A model in NVFP4 by GPTQ, as a folder that train.py, transformers and vLLM load.

    python -m tools.calibrate MODEL DST --task gsm8k --data train.jsonl
    python train.py --model DST --task gsm8k --data train.jsonl

GPTQ (nvfp4.py) rounds a matrix by what its inputs are. Here they come from prompts of the task and
the answers that the model itself samples to them. So nobody needs a corpus, and the texts are like
those of the training to come. Problems that are held out are never used.

Flags of train.py that are about the task and sampling mean the same here. --prompts (default 128)
is how many texts to calibrate on. --quant (default nvfp4, the sweep) is how the model that samples
the answers is quantised.

One layer is in memory at a time, in 16 bits:

    for each layer:
        run the texts through it, and sum x xᵀ over the inputs x of each matrix     its Hessian
        quantise its matrices
        run the texts through it again                                the next layer's inputs

So a layer is calibrated on what the quantised layers before it return, as in GPTQ's paper (arXiv
2210.17323). Embeddings, lm_head, norms and biases are copied. DST appears when it is complete.

Needs: torch, tqdm; nvfp4.py, fp4_gemm.py, lora.py, model.py, rollout.py,
ops/attention.py, tools/{adapter,ends,environment,export,flags,weights}.py.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from tqdm import tqdm

import nvfp4
from fp4_gemm import Dense
from lora import LoRALinear, disabled, lora_layers
from model import Block, Builder, Decoder, load
from ops.attention import Packed
from rollout import Sampler
from tools import weights
from tools.adapter import FUSED
from tools.ends import exit_on_signals, one_sentence
from tools.environment import draw_problems, load_environment, load_task
from tools.export import copy_tokenizer, new_folder, packed, write_config, write_tensors
from tools.flags import Config, parse


def calibrate(config: Config, place: Path) -> None:
    """Write the folder `place`. config: of the model, the task and sampling.

    ValueError: the model or the task is refused, `place` exists and is not an empty folder, or it
    cannot be written. After an error `place` is as it was before the call.
    """
    with new_folder(place) as folder:
        source = weights.open(config.model)
        if source.packed:
            raise ValueError(f"{config.model} is in NVFP4: calibrate what it was made from")
        environment = load_environment(config, load_task(config), source)
        problems = draw_problems(environment.task.train, config.seed, 0, config.prompts)
        prompts = environment.encode_prompts(problems)
        device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
        decoder = load(source, config.quant, device=device)
        sampler = Sampler(decoder, kv=config.kv)
        rollout = sampler.generate(prompts, 1, environment.params, 0, progress="answers")
        texts = [prompt + ids for prompt, ids in zip(prompts, rollout.answers(), strict=True)]
        cut = len(texts) - int(rollout.finished.sum())
        if cut:
            tqdm.write(f"note: --max-new-tokens cut {cut} of {len(texts)} answers")
        tensors = quantise(decoder, source, texts)
        with weights.readable(place, "cannot be written"):
            copy_tokenizer(source, folder)
            write_config(source, folder, "nvfp4")
            write_tensors(tensors.items(), folder)
    print(f"done: {place}; train with --model {place}")


@torch.no_grad()
def quantise(
    decoder: Decoder, source: weights.Source, texts: list[list[int]], damping: float = 0.01
) -> dict[str, torch.Tensor]:
    """→ {name: tensor on the CPU}, what model.safetensors will hold.

    decoder: the source's model in any quantisation, on the device to use. It loses its layers, so
    that their memory is free. texts: token ids. damping: as nvfp4.quantize's.

    ValueError: the texts have fewer tokens than a matrix has columns, or its inputs have NaN.
    """
    attend = Packed([(len(text), []) for text in texts], decoder.device)
    tokens = len(attend.positions)
    K = source.config.intermediate_size  # of down_proj, whose rows are the longest
    if tokens < K:
        raise ValueError(
            f"{len(texts)} texts have {tokens} tokens, and rows of {K} weights need as many: "
            f"give --prompts {len(texts) * K // tokens + 1}"
        )
    build = Builder(source, "bf16", 1, 1, decoder.device, 0)
    hessians = {}
    tensors = {
        name: source.read(name) for name in source.names if not name.endswith("_proj.weight")
    }

    def observe(layer, inputs):
        if isinstance(layer, LoRALinear):
            x = inputs[0].float()  # (tokens, K)
            hessians[layer] = x.T @ x

    def calibrated(i, *inputs):
        """What layer i returns for the texts, once it is quantised."""
        block = Block(build, i)
        with disabled(block):  # there is no adapter yet
            with register_module_forward_pre_hook(observe):
                block(*inputs)
            for name, layer in lora_layers(block).items():
                tensors.update(
                    quantise_layer(layer, f"model.layers.{i}.{name}", hessians.pop(layer), damping)
                )
            return block(*inputs)

    layers = [partial(calibrated, i) for i in range(len(decoder.layers))]
    del decoder.layers
    decoder.layers = tqdm(layers, "calibrate", disable=None)
    decoder(torch.tensor(sum(texts, []), device=decoder.device), attend.positions, attend)
    return tensors


def quantise_layer(
    layer: LoRALinear, name: str, hessian: torch.Tensor, damping: float
) -> dict[str, torch.Tensor]:
    """Quantise the weight of a layer in place → the tensors of its projections, by their names.

    Projections that run as one matrix, such as q, k and v, are quantised as one, so they share
    their global scale.
    """
    dead = (hessian.diagonal() == 0).sum()
    if dead:
        tqdm.write(f"note: {name}: {dead} inputs are always 0, so GPTQ is the sweep there")
    W = layer.base.weight.weight
    with weights.readable(name, "cannot be calibrated"):
        q = nvfp4.quantize(W, "gptq", hessian=hessian, damping=damping)
    layer.base.weight = Dense(nvfp4.dequantize(q, W.dtype))
    parent, _, module = name.rpartition(".")
    codes, scales = q.packed.cpu().split(layer.splits), q.block_scale.cpu().split(layer.splits)
    tensors = {}
    for projection, *part in zip(FUSED.get(module, (module,)), codes, scales, strict=True):
        weight = nvfp4.NVFP4Tensor(*part, q.global_scale.cpu())
        tensors.update(packed(f"{parent}.{projection}", weight, "nvfp4"))
    return tensors


def main(arguments: list[str]) -> None:
    """python -m tools.calibrate with these arguments. ValueError: a sentence for the user."""
    if {"--help", "-h"} & set(arguments):
        return print(__doc__)
    if len(arguments) < 2:
        raise ValueError("usage: python -m tools.calibrate MODEL DST [flags of train.py]")
    name, place, *flags = arguments
    for flag in flags:
        if flag.split("=")[0] in ("--adapter", "--resume"):
            raise ValueError(f"{flag} has no use here: a model is calibrated without an adapter")
    # --steps 1: load_task is to read the problems to train on
    config = parse(["--model", name, "--prompts", "128", *flags, "--steps", "1"])
    calibrate(config, Path(place))


if __name__ == "__main__":
    exit_on_signals()
    with one_sentence("calibrate.py"):
        main(sys.argv[1:])
