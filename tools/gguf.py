"""One .gguf file of a Llama or Qwen model: its config, and its tensors in fp32.

    file = GGUFFile(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))
    file.config                                       transformers' config
    file.read("model.layers.0.mlp.down_proj.weight")  fp32, whatever type of weights it has

GGUF stores q and k of Llama models with the two halves of each head interleaved, because llama.cpp
rotates neighbors where transformers rotates i with i + Dh/2. Of a head with Dh = 8, its rows
0 4 1 5 2 6 3 7 become 0 1 2 3 4 5 6 7 again.

Here are also two helpers that tools/weights.py shares. Needs: torch, transformers, numpy, gguf (the
library); nvfp4.py.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import nvfp4


class GGUFFile:
    """names: {transformers' name: gguf's tensor}. unread: names, and tensors that no model has a
    place for.
    """

    def __init__(self, path):
        """ValueError: no .gguf that can be read, of another architecture, or with RoPE scaling that
        is not read.
        """
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        self.path = path
        with readable(path, "cannot be read, fetch it again"):
            self.reader = parse(path)
        parts = self.field("split.count", 1)
        if parts > 1:
            raise ValueError(
                f"{path} is one part of {parts}: join them with llama-gguf-split --merge"
            )
        with self.given_to_transformers(), readable(path):
            self.config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        self.config.architectures = [type(self.config).__name__.replace("Config", "ForCausalLM")]
        architecture = self.field("general.architecture", None)
        stored = {tensor.name: tensor for tensor in self.reader.tensors}
        self._scale_rope(stored.pop("rope_freqs.weight", None), f"{architecture}.rope.")
        number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
        short = get_tensor_name_map(number, self.config.num_hidden_layers)
        self.names = {}
        for name in tensor_names(self.config):
            found = short.get_name(name, (".weight", ".bias"))
            if found in stored:
                self.names[name] = stored.pop(found)
        self.unread = set(self.names) | set(stored)

    def field(self, key, default):
        """→ the value of a key of the file's header."""
        return self.reader.fields[key].contents() if key in self.reader.fields else default

    @contextmanager
    def given_to_transformers(self):
        """transformers parses the file again, for a config and for a tokenizer, which takes
        seconds. In this context it gets our reader.
        """
        import gguf

        theirs = gguf.GGUFReader
        gguf.GGUFReader = lambda path: self.reader
        try:
            yield
        finally:
            gguf.GGUFReader = theirs

    def _scale_rope(self, factors, prefix):
        """transformers ignores a GGUF's RoPE scaling. Llama 3's is stored as one divisor per
        frequency, factors; the largest is `factor`, which alone differs between its models.
        ValueError: any other scaling. prefix: of the keys.
        """
        kind = self.field(f"{prefix}scaling.type", "none")
        # llama.cpp scales linearly by a factor without a type; 0 stands for none
        scales = {self.field(f"{prefix}scaling.factor", 1), self.field(f"{prefix}scale_linear", 1)}
        if kind == "none" and scales - {0, 1}:
            kind = "a factor"
        if factors is not None:
            factors = torch.from_numpy(factors.data.copy())
            rope = self.config.rope_parameters
            rope |= dict(
                rope_type="llama3",
                factor=factors.max().item(),
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            )
            scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](self.config, "cpu")  # (Dh/2,)
            plain = rope["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
            if len(factors) != len(scaled) or not torch.allclose(
                plain / scaled, factors, rtol=1e-3
            ):
                kind = "factors that are not Llama 3's"
        if kind != "none":
            raise ValueError(
                f"{self.path} scales RoPE by {kind}, which is not read from a GGUF: take this "
                "model's safetensors"
            )

    def read(self, name):
        """→ the tensor in fp32, with transformers' shape and order of rows. ValueError: a type that
        gguf does not know.
        """
        from gguf.quants import dequantize

        stored = self.names[name]
        tensor = torch.empty(stored.shape[::-1].tolist())  # GGUF names the fastest dimension first

        def fill(place, rows):  # one long row, because gguf dequantises 16 rows at a time
            place[:] = dequantize(rows.ravel(), stored.tensor_type).reshape(place.shape)

        pieces = (tensor.numel() + nvfp4.CHUNK - 1) // nvfp4.CHUNK
        places = np.array_split(tensor.numpy(), pieces)
        rows = np.array_split(stored.data, pieces)
        with (
            readable(self.path, f"holds {name}, which gguf cannot dequantise"),
            ThreadPoolExecutor() as pool,
        ):
            list(pool.map(fill, places, rows))
        if self.config.architectures == ["LlamaForCausalLM"] and re.search(r"\.[qk]_proj\.", name):
            half = self.config.head_dim // 2
            pairs = tensor.view(-1, half, 2, *tensor.shape[1:])  # (heads, Dh/2, 2, …)
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor


def parse(path):
    """→ gguf's reader of a file."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """GGUFReader slices the mapped file 600,000 times. A slice of a memmap is slow, one of an
        array is not, and reads the same mapped pages.
        """

        @property
        def data(self):
            return self.mapped

        @data.setter
        def data(self, memmap):
            self.mapped = np.asarray(memmap)

    return Reader(path)


@contextmanager
def readable(path, what="cannot be read"):
    """Inside the block any error becomes a ValueError of one sentence that begins with `path`."""
    try:
        yield
    except Exception as error:  # each library raises its own types
        reason = re.sub(r":\s*\n\s*", ": ", str(error).strip()) or type(error).__name__
        raise ValueError(f"{path} {what}: {reason.splitlines()[0]}") from error


def tensor_names(config):
    """The name of every tensor that a dense decoder of this depth can have."""
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        for projection in "qkvo":
            yield f"{at}self_attn.{projection}_proj.weight"
            yield f"{at}self_attn.{projection}_proj.bias"
        for part in (
            "self_attn.q_norm",
            "self_attn.k_norm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            "input_layernorm",
            "post_attention_layernorm",
        ):
            yield f"{at}{part}.weight"
