"""experiments/kv8.py: taking the bias out of the keys changes nothing but what rounding costs."""

import pytest
import torch
from conftest import tiny_checkpoint

import model
from experiments import kv8
from experiments.kv8 import Way, same
from tools import weights

TEXTS = [[(7 * i + 3 * t) % 90 + 5 for t in range(n)] for i, n in enumerate((30, 11, 1, 60))]


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """→ a tiny Qwen2 with a key bias of 60 in the pairs that RoPE turns slowest, 7, and fastest."""
    folder = tmp_path_factory.mktemp("biased")
    tiny_checkpoint(folder, "qwen2", num_hidden_layers=2)
    decoder = model.load(weights.open(folder), "bf16")
    for layer in decoder.layers:
        q, k, v = layer.self_attn.qkv_proj.base.bias.view(8, 16).split((4, 2, 2))
        k[:, [0, 7]] += 60
    return decoder


@pytest.mark.parametrize("without", sorted({way.without for way in kv8.WAYS.values()}))
def test_what_is_taken_out_of_the_keys_changes_nothing(biased, without):
    """Softmax ignores it, or it is added back. Each text is scored as the trainer scores it."""
    found = kv8.logprobs(biased, TEXTS, Way(same, same, without))
    expected = []
    for text in TEXTS:
        if len(text) > 1:
            one, P, n = (torch.tensor([x]) for x in (text, 1, len(text) - 1))
            expected.append(biased.logprobs(one, P, n, 1.0)[0][0, 1:].detach())
    # scores of 60 · |q| are rounded in fp32
    torch.testing.assert_close(found, torch.cat(expected), atol=2e-4, rtol=0)


def test_integers_without_the_bias_are_nearest(biased):
    """The bias is over ten times as large as what tells keys apart, and so are a plain int8's
    steps. A constant takes it out of the slow pair, scales make the fast one small.
    """
    reference = kv8.logprobs(biased, TEXTS, Way(same, same))

    def error(without):
        rounded = kv8.logprobs(biased, TEXTS, Way(kv8.int8, same, without))
        return (rounded - reference).abs().mean()

    assert error("bias") < error("") / 8
    assert error("scaled") < error("limit") / 3
