"""One .gguf file of a Llama or Qwen model: its config, its tokenizer, and its tensors in fp32.

    file = GGUFFile(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))
    file.config                                       transformers' config
    file.read_tokenizer()                             transformers' tokenizer, and file.marked
    file.read("model.layers.0.mlp.down_proj.weight")  (N, K) fp32, whatever type the file stores

llama.cpp's RoPE rotates row 2i of a head together with row 2i + 1, transformers' rotates row i
together with row i + Dh/2. So llama.cpp's converter interleaves the two halves of each head of q
and k of a Llama model, and read() undoes that. With Dh = 8, a head of transformers' rows

    0 1 2 3 4 5 6 7  is stored as  0 4 1 5 2 6 3 7

Qwen models are stored in transformers' order. Without the step a Llama still loads, and writes
nonsense.

transformers reads config and tokenizer, and silently ignores some of the header's keys. This module
adds those that llama.cpp reads and that the decoder can compute. It refuses a file whose keys scale
something that the decoder does not scale, or rotate only a part of each head.

tools/weights.py also takes `readable` and `tensor_names` from this file.

Left out: every tokenizer.ggml.pre that SPLITS and SYNONYMS lack; RoPE scaling but Llama 3's.

Needs: torch, transformers, tokenizers, numpy, gguf (llama.cpp's library). The library is imported
in functions, because safetensors load without it.
"""

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

try:  # transformers 5.17 and newer dequantises the commonest types, on a GPU, too
    from transformers.integrations.gguf import dequant
except ImportError:
    dequant = None

PIECE = 1 << 20  # numbers that read() dequantises at a time: few enough for a CPU's cache
ARCHITECTURES = "llama", "qwen2", "qwen3"
MARKED = 3, 4  # of tokenizer.ggml.token_type: control tokens, and those that the makers defined
# Keys of an architecture that are read, or change nothing. Others must have a value of PLAIN, or 0.
KNOWN = (
    "block_count context_length embedding_length feed_forward_length vocab_size rope.freq_base "
    "attention.head_count attention.head_count_kv attention.key_length "
    "attention.layer_norm_rms_epsilon pooling_type tensor_data_layout"
).split()
# Keys of the header that scale something → the value that changes nothing. An old file may have a
# factor without a type, and llama.cpp then scales linearly.
PLAIN = {
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.finetuned": True,
    "rope.scale_linear": 1,
}
# texts of the tokens that end an answer in llama.cpp, whichever the header names
ENDS = (
    "<|im_end|> <|endoftext|> <|eot_id|> <|eom_id|> <|end_of_text|> <|end|> </s> "
    "<end_of_turn> <EOT> <｜end▁of▁sentence｜>"
).split()
# tokenizer.ggml.pre → the expressions by which llama.cpp cuts a text into the pieces within which
# it merges bytes. Each cuts the pieces of the one before; what it does not match is a piece too.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "smollm": [r"\p{N}", WORDS],
    "llama-bpe": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
}
# other names that llama.cpp has for the same rules (src/llama-vocab.cpp)
SYNONYMS = dict.fromkeys("llama3 llama-v3 falcon3 pixtral midm-2.0".split(), "llama-bpe")
SYNONYMS |= dict.fromkeys("deepseek-r1-qwen kormo f2llmv2 megrez".split(), "qwen2")


class GGUFFile:
    """A parsed .gguf file. Its tensors stay in the mapped file until read() dequantises them.

    path: the file. reader: the library's GGUFReader. header: {key: value}. config: transformers'
    config, with a list of end tokens. marked: {id: text} of the control tokens and of those that
    the model's makers defined. names: {transformers' name: the library's ReaderTensor}, of the
    tensors that a model can ask for. unread: the keys of names, and llama.cpp's names of all other
    tensors in the file but rope_freqs.weight, which __init__ reads. The caller discards what it
    reads; what remains has no place in the model.
    """

    def __init__(self, path: Path):
        """ValueError: the file is damaged, of an architecture that transformers does not read, one
        part of several, or scales what the decoder does not.
        """
        from gguf import MODEL_ARCH, get_tensor_name_map

        self.path = path
        with path.open("rb") as file:
            if file.read(8)[4:] == bytes([0, 0, 0, 3]):
                raise ValueError(f"{path} is big-endian: take a little-endian file of this model")
        with readable(path):
            self.reader = parse(path)
            self.header = {key: field.contents() for key, field in self.reader.fields.items()}
            self._check_places()
        family = self.header.get("general.architecture")
        if family not in ARCHITECTURES:
            raise ValueError(
                f"{path} is of the architecture {family}: only {', '.join(ARCHITECTURES)} load"
            )
        kind = self.header.get("general.type", "model")
        if kind != "model":
            raise ValueError(f"{path} holds a GGUF of type {kind}: name one of a model")
        parts = self.header.get("split.count", 1)
        if parts not in (0, 1):
            raise ValueError(
                f"{path} is one part of {parts}: join them with llama-gguf-split --merge"
            )
        stored = {tensor.name: tensor for tensor in self.reader.tensors}
        divisors = stored.pop("rope_freqs.weight", None)
        refused = readable(path, "cannot be loaded, take this model's safetensors")
        with self.shared_with_transformers(), refused:
            layers, tensors = self.header[f"{family}.block_count"], len(stored)
            if stored and not 0 < layers <= tensors:  # a vocabulary alone has none
                raise ValueError(f"it has {layers} layers, and {tensors} tensors")
            if f"{family}.attention.layer_norm_rms_epsilon" not in self.header:
                raise ValueError("it lacks attention.layer_norm_rms_epsilon")
            # transformers turns every array into a list; of these a config needs none
            fields = self.reader.fields
            unused = "merges", "token_type", "scores"
            self.reader.fields = {key: fields[key] for key in fields if not key.endswith(unused)}
            self.config = AutoConfig.from_pretrained(
                path.parent, gguf_file=path.name, trust_remote_code=False
            )
            self.reader.fields = fields
            self._mend_config(f"{family}.", "blk.0.attn_q.bias" in stored)
            if divisors is not None:
                self._use_llama3_rope(torch.tensor(divisors.data))
            # model.layers.0.mlp.down_proj.weight → blk.0.ffn_down.weight
            short = get_tensor_name_map(MODEL_ARCH[family.upper()], self.config.num_hidden_layers)
        self.names = {}
        for name in tensor_names(self.config):
            found = short.get_name(name, (".weight", ".bias"))
            if found in stored:
                self.names[name] = stored.pop(found)
        self.unread = set(self.names) | set(stored)

    def _check_places(self):
        """ValueError: the data of two tensors overlap, or begin where none may."""
        end = self.reader.data_offset
        for tensor in sorted(self.reader.tensors, key=lambda tensor: int(tensor.data_offset)):
            if tensor.data_offset < end or tensor.data_offset % self.reader.alignment:
                raise ValueError(f"the data of {tensor.name} have a wrong place")
            end = tensor.data_offset + tensor.n_bytes

    @contextmanager
    def shared_with_transformers(self):
        """Inside the block transformers gets our reader instead of parsing the file again.

        Parsing takes seconds, and transformers offers no way to pass a reader, but it looks up
        gguf.GGUFReader at each call. So the block replaces this class by a function that returns
        our reader for any path. Hence inside the block nothing else may open a .gguf file, in
        another thread neither.
        """
        import gguf

        theirs = gguf.GGUFReader
        gguf.GGUFReader = lambda path: self.reader
        try:
            yield
        finally:
            gguf.GGUFReader = theirs

    def _mend_config(self, prefix, biased):
        """Make `marked`, and put into the config what transformers passes over.

        prefix: of the header's keys, such as "llama.". biased: whether q has a bias. ValueError: a
        key is unknown, or says that something is scaled or that a part of each head is rotated. The
        model would load and compute something else.
        """
        config, header = self.config, self.header
        # a config from a GGUF names no architecture: LlamaConfig → LlamaForCausalLM
        config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
        config.attention_bias = biased
        size = config.hidden_size // config.num_attention_heads
        size = header.get(f"{prefix}rope.dimension_count", size)
        config.head_dim = header.get(f"{prefix}attention.key_length", size)
        sizes = dict.fromkeys(("rope.dimension_count", "attention.value_length"), config.head_dim)
        plain = PLAIN | sizes
        for key, value in header.items():
            name = key.removeprefix(prefix)
            strange = key.startswith(prefix) and name not in KNOWN
            strange = strange or re.search("scal|dimension|value_length", key)
            # a factor or a number of 0 means none
            allowed = [True] if name == "attention.causal" else [0, plain.get(name)]
            if strange and value not in allowed:
                raise ValueError(f"its {key} is {value}")
        ends = {header.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
        self.marked = {}
        for i, kind in enumerate(header.get("tokenizer.ggml.token_type", ())):
            if kind in MARKED:
                text = self.marked[i] = header["tokenizer.ggml.tokens"][i]
                if text in ENDS:
                    ends.add(i)
        config.eos_token_id = sorted(ends - {None})

    def _use_llama3_rope(self, divisors):
        """Set the config's RoPE to Llama 3's. ValueError: its divisors are not those of the file.

        divisors: the file's tensor of one divisor per frequency, (Dh/2,) f32. transformers ignores
        it. Llama 3 divides low frequencies by `factor`, high ones by 1, and those between by
        something between. So the largest divisor is `factor`. It alone differs between Llama 3.1
        and 3.2; the other three numbers are in every config.json of the two.
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
        if len(divisors) != len(scaled) or not torch.allclose(plain / scaled, divisors, rtol=1e-3):
            raise ValueError("it scales RoPE by factors that are not Llama 3's")

    def read_tokenizer(self) -> tuple[PreTrainedTokenizerFast, dict[int, str]]:
        """→ transformers' tokenizer, and `marked`. ValueError: llama.cpp would read a text by rules
        that are not known here.

        The constructor gets the name of the file. from_pretrained would get the folder, and prefer
        the tokenizer files of another model that lie in it.
        """
        header = self.header
        with self.shared_with_transformers():
            tokenizer = PreTrainedTokenizerFast(
                name_or_path=str(self.path.parent), gguf_file=self.path.name
            )
        # transformers 5.17 leaves most of them out, and would cut their texts into pieces
        added = []
        for i, text in self.marked.items():
            special = header["tokenizer.ggml.token_type"][i] == MARKED[0]
            added.append(AddedToken(text, normalized=False, special=special))
        tokenizer.add_tokens(added)
        end = header.get("tokenizer.ggml.eos_token_id")
        if end is not None:  # transformers 5.17 takes another
            tokenizer.eos_token = header["tokenizer.ggml.tokens"][end]
        if header["tokenizer.ggml.model"] == "gpt2":
            pre = header.get("tokenizer.ggml.pre")
            pre = SYNONYMS.get(pre, pre)
            if pre not in SPLITS:
                raise ValueError(f"tokenizer.ggml.pre is {pre}: take this model's safetensors")
            steps = [Split(Regex(expression), "isolated") for expression in SPLITS[pre]]
            steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
            tokenizer.backend_tokenizer.pre_tokenizer = Sequence(steps)
            # llama.cpp begins a Llama 3's text with its BOS token, and leaves a piece whole that is
            # a token
            tokenizer.backend_tokenizer.model.ignore_merges = pre == "llama-bpe"
            begins = header.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
            tokenizer.add_bos_token = begins
        elif not header.get("tokenizer.ggml.add_space_prefix", True):
            raise ValueError("it has no space prefix: take this model's safetensors")
        return tokenizer, self.marked

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """→ the tensor in fp32, with transformers' shape and order of rows.

        name: a key of names. ValueError: neither library can dequantise the type.
        """
        stored = self.names[name]
        # fp32 or fp16 values, or u8 (N, bytes of a row). Read, because touched pages of the mapped
        # file would stay in memory.
        mapped = stored.data
        with readable(self.path):
            data = np.fromfile(self.path, mapped.dtype, mapped.size, offset=stored.data_offset)
            data = data.reshape(mapped.shape)  # an error if the file has become shorter
        # GGUF names the fastest dimension first
        tensor = torch.empty(stored.shape[::-1].tolist(), device=device)
        # Both splits cut the first dimension, at the same rows.
        pieces = max(1, min(len(data), tensor.numel() // PIECE + 1))
        places = tensor.tensor_split(pieces)  # views: filling them fills the tensor
        rows = np.array_split(data, pieces)
        with readable(self.path, f"holds {name}, which gguf cannot dequantise"):
            for place, piece in zip(places, rows, strict=True):
                values = dequantized(piece.ravel(), stored.tensor_type, device)
                place.copy_(values.view(place.shape))
        half = self.config.head_dim // 2
        whole = len(tensor) % (2 * half) == 0  # else the caller refuses the shape
        if self.config.model_type == "llama" and whole and re.search(r"\.[qk]_proj\.", name):
            # row 2i of a head → row i, row 2i + 1 → row i + Dh/2; the header has an example
            pairs = tensor.view(-1, half, 2, *tensor.shape[1:])  # (heads, Dh/2, 2, K), no K: a bias
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor


def parse(path: Path):
    """→ the library's reader of a file. It raises errors of many types if the file is damaged."""
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        """Parses in a tenth of the time, most of which the vocabulary takes: hundreds of thousands
        of strings and numbers. The library makes a dozen objects to read each of them.
        """

        def _get_field_parts(self, orig_offs, raw_type):
            """→ bytes of the value, its parts, which of them are data, types of value and items."""
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            # neither a memmap, whose slices are slow, nor a memoryview, whose slices Python's
            # garbage collector would visit again and again
            whole, parts = np.asarray(self.data), []
            kind, count = struct.unpack_from("<IQ", whole, orig_offs)
            at = orig_offs + 12
            if kind == GGUFValueType.STRING:
                for _ in range(count):
                    (length,) = struct.unpack_from("<Q", whole, at)
                    at += 8 + length
                    parts.append(whole[at - length : at])
            else:
                numbers = np.frombuffer(whole, self.gguf_scalar_to_np[kind], count, at)
                parts += list(numbers.reshape(-1, 1))
                at += numbers.nbytes
            return at - orig_offs, parts, range(count), [raw_type, kind]

    return Reader(path)


def dequantized(data: np.ndarray, kind: int, device: torch.device | str) -> torch.Tensor:
    """→ the numbers that whole blocks of a type hold, in fp32: by transformers on the device, or
    by llama.cpp's library on the CPU. Both give the same bits.
    """
    if dequant and kind in dequant.GGML_BLOCK:
        return dequant.dequantize(torch.from_numpy(data).to(device), kind)
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(data, kind))


@contextmanager
def readable(path: str | Path, what: str = "cannot be read, fetch it again") -> Iterator[None]:
    """Inside the block any error becomes a ValueError of one sentence: "PATH WHAT: reason".

    path: the file, or any subject of the sentence. The reason is the error's first line. If that
    ends in a colon, the next line is appended, because only that line tells something. A pointer of
    Git LFS in the place of the file, or in the folder, is the reason. What safetensors says of a
    damaged file is no help, so the sentence says that it is damaged.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):  # the file is not to blame
        raise
    except Exception as error:  # each library raises its own types
        reason = re.sub(r":\s*\n\s*", ": ", str(error).strip()) or type(error).__name__
        with suppress(OSError):  # the subject may be no path, or one that nobody may read
            for file in (Path(path), *Path(path).glob("*.*")):
                if file.is_file() and file.open("rb").read(24) == b"version https://git-lfs.":
                    reason = f"{file.name} is a pointer of Git LFS: fetch the file by git lfs pull"
        if "deserializing header" in reason:  # by safetensors
            raise ValueError(f"{path} is damaged or incomplete: fetch it again") from error
        raise ValueError(f"{path} {what}: {reason.splitlines()[0]}") from error


def tensor_names(config: PreTrainedConfig) -> Iterator[str]:
    """Yield transformers' name of every tensor that a dense Llama or Qwen of this depth can have,
    but no biases of the MLP: model.py refuses a model with these.

    config: its num_hidden_layers is read. A model has some of them only: a
    tied one has no lm_head, a Llama no q_norm, a Qwen2 no bias of o_proj.
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
