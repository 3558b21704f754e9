"""What every test shares: seeds, memory that shows when it is read unwritten, and the tiny checkpoints."""

import os
import signal

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "2")
signal.signal(signal.SIGINT, signal.default_int_handler)      # a shell ignores it for what runs behind it


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty is full of NaN, so that whoever reads what nothing wrote fails."""
    torch.use_deterministic_algorithms(True, warn_only=True)       # this fills what empty() returns
    yield
    torch.use_deterministic_algorithms(False)


TINY = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, eos_token_id=2,
            pad_token_id=2, bos_token_id=1)


def tiny_checkpoint(folder, family="llama", **changes):
    """Save a random transformers model of a family into `folder` → that model, in fp32, as the oracle."""
    import transformers
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config = getattr(transformers, f"{name}Config")(**(TINY | changes))
    torch.manual_seed(1)
    oracle = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, p in oracle.named_parameters():        # norms and biases start at 1 and 0
            p.normal_(1.0 if "norm" in parameter_name else 0.0, 0.2)
    oracle.save_pretrained(folder)
    return oracle


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a tiny random Llama."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory):
    """The folder of a tiny random Llama that can be trained: with a tokenizer of one token per character, a
    chat template (start, message, "=") and an end token that is the padding too."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    folder = tmp_path_factory.mktemp("tiny_chat")
    tiny_checkpoint(folder, vocab_size=32, num_hidden_layers=2)
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *"0123456789 *+-=?.,Whatis"])}
    characters = Tokenizer(models.WordLevel(vocab | {f"<{i}>": i for i in range(len(vocab), 32)}, "<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, unk_token="<unk>", bos_token="<s>",
                                        eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = ("{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
                               "{% if add_generation_prompt %}={% endif %}")
    tokenizer.save_pretrained(folder)
    return folder
