"""A model in NVFP4 by GPTQ, as a folder that train.py, transformers and vLLM load.

    python -m tools.calibrate MODEL DST --task gsm8k --data train.jsonl
    python train.py --model DST --task gsm8k --data train.jsonl

GPTQ (nvfp4.py) rounds a matrix by what its inputs are. Here they come from prompts of the task and
the answers that the model itself, quantised by the sweep, samples to them. So nobody needs a
corpus, and the texts are like those of the training to come. Problems that are held out are never
used.

One layer is in memory at a time, in 16 bits:

    for each layer:
        run the texts through it, and sum x xᵀ over the inputs x of each matrix     its Hessian
        quantise its matrices
        run the texts through it again                                the next layer's inputs

So a layer is calibrated on what the quantised layers before it return, as in GPTQ's paper (arXiv
2210.17323). Embeddings, lm_head, norms and biases are copied. DST appears when it is complete.

Needs: torch, tqdm, huggingface_hub; nvfp4.py, fp4_gemm.py, lora.py, model.py, rollout.py,
ops/{attention,elementwise}.py, tools/{adapter,environment,export,flags,run,weights}.py.
"""

import sys
from functools import partial
from pathlib import Path

import huggingface_hub
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from tqdm import tqdm

import nvfp4
from fp4_gemm import Dense, dequantize
from lora import LoRALinear, disabled, lora_layers
from model import Block, Builder, Decoder, load
from ops.attention import Packed
from ops.elementwise import embed
from rollout import Sampler
from tools import weights
from tools.adapter import FUSED
from tools.environment import draw_problems, load_environment, load_task
from tools.export import copy_tokenizer, new_folder, write_config
from tools.flags import Config, parse
from tools.run import one_sentence


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
        decoder = load(source, device=device)
        rollout = Sampler(decoder).generate(prompts, 1, environment.params, 0, progress="answers")
        texts = [prompt + ids for prompt, ids in zip(prompts, rollout.answers(), strict=True)]
        tensors = quantise(decoder, source, texts)
        with weights.readable(place, "cannot be written"):
            copy_tokenizer(source, folder)
            write_config(source, folder, "nvfp4")
            huggingface_hub.save_torch_state_dict(tensors, folder)


@torch.no_grad()
def quantise(
    decoder: Decoder,
    source: weights.Source,
    texts: list[list[int]],
    damping: float = 0.01,
    quantised_inputs: bool = True,
) -> dict[str, torch.Tensor]:
    """→ {name: tensor on the CPU}, what model.safetensors will hold.

    decoder: the source's model in any quantisation, on the device to use. It loses its layers, so
    that their memory is free. texts: token ids. quantised_inputs: False calibrates each layer on
    what the layers before it return in 16 bits.

    ValueError: the texts have fewer tokens than a matrix has columns, or its inputs have NaN.
    """
    tokens = sum(map(len, texts))
    K = max(layer.base.in_features for layer in lora_layers(decoder).values())
    if tokens < K:
        raise ValueError(
            f"{len(texts)} texts have {tokens} tokens; rows of {K} weights need at least {K} "
            f"tokens: give --prompts {len(texts) * K // tokens + 1}"
        )
    del decoder.layers
    build = Builder(source, "bf16", 1, 1, decoder.device, 0)
    attend = Packed([(len(text), []) for text in texts], decoder.device)
    cos, sin = decoder.rotary(attend.positions)
    attend = partial(attend, cos=cos, sin=sin)
    ids = torch.tensor(sum(texts, []), device=decoder.device)
    residual = embed(ids, decoder.embed_tokens)  # (n, D) f32, of all texts at once
    tensors = {
        name: source.read(name) for name in source.names if not name.endswith("_proj.weight")
    }
    for i in tqdm(range(source.config.num_hidden_layers), "calibrate", unit="layer", disable=None):
        block = Block(build, i)
        with disabled(block):  # there is no adapter yet
            hessians, unquantised = observe(block, residual, attend)
            for name, layer in lora_layers(block).items():
                name = f"model.layers.{i}.{name}"
                tensors |= quantise_layer(layer, name, hessians.pop(layer), damping)
            residual = block.summed(residual, attend) if quantised_inputs else unquantised
    return tensors


def observe(
    block: Block, residual: torch.Tensor, attend: partial
) -> tuple[dict[LoRALinear, torch.Tensor], torch.Tensor]:
    """→ the Hessian of each matrix's inputs, (K, K) f32, and the residual after the block."""
    hessians = {}

    def sum_products(layer, inputs):
        if isinstance(layer, LoRALinear):
            x = inputs[0].float()  # (n, K)
            hessians[layer] = x.T @ x

    with register_module_forward_pre_hook(sum_products):
        residual = block.summed(residual, attend)
    return hessians, residual


def quantise_layer(
    layer: LoRALinear, name: str, hessian: torch.Tensor, damping: float
) -> dict[str, torch.Tensor]:
    """Quantise the weight of a layer in place → the tensors of its projections, by their names.

    Projections that run as one matrix, such as q, k and v, are quantised as one, so they share
    their global scale.
    """
    dead = int((hessian.diagonal() == 0).sum())
    if dead:
        tqdm.write(f"note: {name}: {dead} inputs are always 0, so GPTQ rounds them as the sweep")
    W = dequantize(layer.base.weight)
    with weights.readable(name, "cannot be calibrated"):
        q = nvfp4.quantize(W, "gptq", hessian=hessian, damping=damping)
    layer.base.weight = Dense(nvfp4.dequantize(q, W.dtype))
    parent, _, module = name.rpartition(".")
    codes, scales = q.packed.split(layer.splits), q.block_scale.split(layer.splits)
    tensors = {}
    for projection, code, scale in zip(FUSED.get(module, (module,)), codes, scales, strict=True):
        weight = f"{parent}.{projection}.weight"
        # copy: safetensors refuses parts of one storage
        tensors[f"{weight}_packed"] = code.to("cpu", copy=True)
        tensors[f"{weight}_scale"] = scale.to("cpu", copy=True)
        tensors[f"{weight}_global_scale"] = 1 / q.global_scale.cpu().view(1)
    return tensors


def main(arguments: list[str]) -> None:
    """python -m tools.calibrate with these arguments. ValueError: a sentence for the user."""
    if len(arguments) < 2:
        raise ValueError("usage: python -m tools.calibrate MODEL DST [flags of train.py]")
    name, place, *flags = arguments
    calibrate(parse(["--model", name, "--prompts", "128", *flags]), Path(place))


if __name__ == "__main__":
    with one_sentence("calibrate.py"):
        main(sys.argv[1:])
