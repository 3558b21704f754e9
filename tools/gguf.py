"""One .gguf file of a Llama or Qwen model: its config, and its tensors in fp32.

    file = GGUFFile(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))
    file.config                                       transformers' config
    file.read("model.layers.0.mlp.down_proj.weight")  (N, K) fp32, whatever type the file stores

llama.cpp's RoPE rotates row 2i of a head together with row 2i + 1, transformers' rotates row i
together with row i + Dh/2. So llama.cpp's converter interleaves the two halves of each head of q
and k of a Llama model, and read() undoes that. With Dh = 8, a head of transformers' rows

    0 1 2 3 4 5 6 7  is stored as  0 4 1 5 2 6 3 7

Qwen models are stored in transformers' order. Without the step a Llama still loads, and writes
nonsense.

tools/weights.py also takes `readable` and `tensor_names` from this file. All of it runs on the CPU.

Needs: torch, transformers, numpy, gguf (llama.cpp's library); nvfp4.py. The library is imported in
functions, because safetensors load without it.
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
    """A parsed .gguf file. Its tensors stay in the mapped file until read() dequantises them.

    path: the file. reader: the library's GGUFReader. config: transformers' config. names:
    {transformers' name: the library's ReaderTensor}, of the tensors that a model can ask for.
    unread: the keys of names, and llama.cpp's names of all other tensors in the file. The caller
    discards what it reads; what remains has no place in the model.
    """

    def __init__(self, path):
        """path: a pathlib.Path. ValueError: the file is damaged, of an architecture that
        transformers does not read, one part of several, or scales RoPE in a way that we do not.
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
        with self.shared_with_transformers(), readable(path):
            self.config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        # a config from a GGUF names no architecture: LlamaConfig → LlamaForCausalLM
        self.config.architectures = [type(self.config).__name__.replace("Config", "ForCausalLM")]
        architecture = self.field("general.architecture", None)  # "llama", "qwen2", "qwen3"
        stored = {tensor.name: tensor for tensor in self.reader.tensors}
        self._scale_rope(stored.pop("rope_freqs.weight", None), f"{architecture}.rope.")
        # model.layers.0.mlp.down_proj.weight → blk.0.ffn_down.weight
        number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
        short = get_tensor_name_map(number, self.config.num_hidden_layers)
        self.names = {}
        for name in tensor_names(self.config):
            found = short.get_name(name, (".weight", ".bias"))
            if found in stored:
                self.names[name] = stored.pop(found)
        self.unread = set(self.names) | set(stored)

    def field(self, key, default):
        """→ the value of a key in the file's header, or the default if the header lacks the key."""
        return self.reader.fields[key].contents() if key in self.reader.fields else default

    @contextmanager
    def shared_with_transformers(self):
        """Inside the block transformers gets our reader instead of parsing the file again.

        transformers parses the file once for the config and once for the tokenizer, and each time
        takes seconds. It offers no way to pass a reader, but it looks up gguf.GGUFReader at each
        call. So the block replaces this class by a function that returns our reader for any path.
        Hence inside the block nothing else may open a .gguf file, in another thread neither.
        """
        import gguf

        theirs = gguf.GGUFReader
        gguf.GGUFReader = lambda path: self.reader
        try:
            yield
        finally:
            gguf.GGUFReader = theirs

    def _scale_rope(self, divisors, prefix):
        """Put Llama 3's RoPE scaling into the config, because transformers ignores a GGUF's.

        divisors: the file's tensor of one divisor per frequency, (Dh/2,) f32, or None. prefix: of
        the header's keys, such as "llama.rope.". ValueError: any other scaling, because the model
        would load and compute wrong positions.
        """
        kind = self.field(f"{prefix}scaling.type", "none")
        # An old file may have a factor without a type, and llama.cpp then scales linearly. A factor
        # of 0 means none.
        scales = {self.field(f"{prefix}scaling.factor", 1), self.field(f"{prefix}scale_linear", 1)}
        if kind == "none" and scales - {0, 1}:
            kind = "a factor"
        if divisors is not None and not self._use_llama3_rope(
            torch.from_numpy(divisors.data.copy())
        ):
            kind = "factors that are not Llama 3's"
        if kind != "none":
            raise ValueError(
                f"{self.path} scales RoPE by {kind}, which is not read from a GGUF: take this "
                "model's safetensors"
            )

    def _use_llama3_rope(self, divisors):
        """Set the config's RoPE to Llama 3's → True if its divisors are those of the file.

        Llama 3 divides low frequencies by `factor`, high ones by 1, and those between by something
        between. So the largest divisor is `factor`. It alone differs between Llama 3.1 and 3.2; the
        other three numbers are in every config.json of the two.
        """
        rope = self.config.rope_parameters
        rope |= dict(
            rope_type="llama3",
            factor=divisors.max().item(),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](self.config, "cpu")  # (Dh/2,) f32
        plain = rope["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))  # θ^(−2i/Dh)
        # compare lengths first: one divisor would broadcast
        return len(divisors) == len(scaled) and torch.allclose(plain / scaled, divisors, rtol=1e-3)

    def read(self, name):
        """→ the tensor in fp32, with transformers' shape and order of rows.

        name: a key of names. ValueError: the library cannot dequantise the type.
        """
        from gguf.quants import dequantize

        stored = self.names[name]  # its data: fp32 or fp16 values, or u8 (N, bytes of a row)
        tensor = torch.empty(stored.shape[::-1].tolist())  # GGUF names the fastest dimension first

        def fill(place, rows):
            # The library loops over 16 rows at a time, so pass all rows as one long row. That is
            # the same, because no quantisation block spans two rows.
            place[:] = dequantize(rows.ravel(), stored.tensor_type).reshape(place.shape)

        # Work in pieces of about nvfp4.CHUNK values: dequantize makes several temporaries of its
        # input's size, and numpy releases the GIL, so that threads share the work. Both splits cut
        # the first dimension, at the same rows.
        pieces = (tensor.numel() + nvfp4.CHUNK - 1) // nvfp4.CHUNK
        places = np.array_split(tensor.numpy(), pieces)  # views: filling them fills the tensor
        rows = np.array_split(stored.data, pieces)
        with (
            readable(self.path, f"holds {name}, which gguf cannot dequantise"),
            ThreadPoolExecutor() as pool,
        ):
            list(pool.map(fill, places, rows))  # list: raises what a thread raised
        if self.config.architectures == ["LlamaForCausalLM"] and re.search(r"\.[qk]_proj\.", name):
            # row 2i of a head → row i, row 2i + 1 → row i + Dh/2; the header has an example
            half = self.config.head_dim // 2
            pairs = tensor.view(-1, half, 2, *tensor.shape[1:])  # (heads, Dh/2, 2, K), no K: a bias
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor


def parse(path):
    """→ the library's reader of a file. It raises errors of many types if the file is damaged."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """Parses faster than GGUFReader, because its `data` is an array instead of a memmap.

        GGUFReader assigns np.memmap(path) to self.data and then slices it hundreds of thousands of
        times, mostly for the vocabulary. Each slice of a memmap is a memmap, which is slow to
        construct. The array has the same mapped pages, so that the file is still read from disk
        only where it is used.
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
    """Inside the block any error becomes a ValueError of one sentence: "PATH WHAT: reason".

    path: the file, or any subject of the sentence. The reason is the error's first line. If that
    ends in a colon, the next line is appended, because only that line tells something.
    """
    try:
        yield
    except Exception as error:  # each library raises its own types
        reason = re.sub(r":\s*\n\s*", ": ", str(error).strip()) or type(error).__name__
        raise ValueError(f"{path} {what}: {reason.splitlines()[0]}") from error


def tensor_names(config):
    """Yield transformers' name of every tensor that a dense Llama or Qwen of this depth can have.

    config: transformers', of which num_hidden_layers is read. A model has some of them only: a
    tied one has no lm_head, a Llama no q_norm, and few have biases.
    """
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
