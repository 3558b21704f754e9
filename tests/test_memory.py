"""The planner of memory, against what is allocated and stored.

python -m pytest tests/test_memory.py
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import tiny_checkpoint
from test_weights import LISTED, foreign

import fp4_gemm
import lora
import model
from bench import step
from tools import memory, weights

# SmolLM2-135M and Qwen2.5 on the hub
RELEASED = {
    "135m": 134_515_008,
    "0.5b": 494_032_768,
    "1.5b": 1_543_714_304,
    "3b": 3_085_938_688,
    "7b": 7_615_616_512,
    "14b": 14_770_033_664,
    "32b": 32_763_876_352,
    "72b": 72_706_203_648,
}


@pytest.mark.parametrize("shape", memory.MODELS)
def test_a_shape_has_as_many_parameters_as_the_released_model(shape):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(memory.config(shape))
    assert model.num_parameters() == RELEASED[shape]


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {}),
        ("qwen3", dict(head_dim=24)),
        ("qwen2", dict(tie_word_embeddings=True, hidden_size=80)),
    ],
)
@pytest.mark.parametrize("quant", ["nvfp4", "bf16"])
def test_weights_and_adapters_are_counted_as_they_are_stored(tmp_path, family, changes, quant):
    """Packed words and scales, or bf16 weights beside their block-diagonal lora_B; the head in
    bf16; 12 bytes a trained parameter, and its copy: to the byte. The plan leaves out norms,
    biases, the scale per row, the kernel's counters, and embeddings that are not on the GPU."""
    tiny_checkpoint(tmp_path, family, **changes)
    m = model.load(str(tmp_path), quant, rank=4)
    plan = memory.plan(m.config, quant, rank=4)
    assert plan.weights + plan.adapter == bytes_of(m)


def bytes_of(m):
    """→ the bytes of weights, adapters and the optimizer, were m on a GPU."""
    stored = 2 * m.lm_head.numel() + 12 * sum(p.numel() for p in m.parameters())
    for layer in lora.lora_layers(m).values():
        stored += 2 * (layer.copy_A.numel() + layer.copy_B.numel())
        weight = layer.base.W
        if isinstance(weight, fp4_gemm.Dense):
            stored += 2 * weight.weight_and_B.numel()
        else:
            stored += weight.words.nbytes + weight.scales.nbytes
    return stored


@pytest.mark.parametrize("layout, left, ignore", [row for row in LISTED if row[2]])
def test_layers_that_a_4_bit_checkpoint_leaves_in_16_bits_are_counted_so(
    tmp_path, capsys, layout, left, ignore
):
    """By the config alone; the command's table too, which a GPTQ model's config does not reach."""
    foreign(tmp_path, layout, "qwen2", left, ignore)
    m = model.load(str(tmp_path), "nvfp4", rank=4)
    (tmp_path / "model.safetensors").unlink()
    for quant, dense in (("nvfp4", m), ("bf16", None)):
        plan = memory.plan(weights.config_of(tmp_path), quant, rank=4)
        assert dense is None or plan.weights + plan.adapter == bytes_of(dense)
    flags = "--model", tmp_path, "--prompt-length", 20, "--max-new-tokens", 30, "--memory-gb", 4
    printed(capsys, *flags)
    file = tmp_path / "config.json"
    said = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    with pytest.raises(ValueError, match="quant_method=gptq: .* only NVFP4"):
        printed(capsys, *flags)


def test_a_weight_in_4_bits_is_decoded_for_cublas_and_one_in_16_is_not(tmp_path):
    """The largest of a layer's is gate_up: of three layers one, two or all leave it in 16 bits."""
    rollouts = []
    for i, ignore in enumerate([["never"], ["*.0.mlp.*"], ["*.[01].mlp.*"], ["*.mlp.*"]]):
        foreign(tmp_path / str(i), "modelopt", "qwen2", "x^", ignore)
        rollouts.append(memory.plan(weights.config_of(tmp_path / str(i))).rollout)
    gate_up, qkv = 2 * 2 * 96 * 64, 2 * (64 + 32 + 32) * 64
    assert rollouts[0] == rollouts[1] == rollouts[2] == rollouts[3] + gate_up - qkv


def test_what_grows_with_what():
    """KV cache: with slots and length. Update: with tokens, less so with gradient checkpointing."""
    c = memory.config("7b")
    one, two = memory.plan(c, slots=64), memory.plan(c, slots=128)
    # Qwen2.5-7B caches 4 · layers · Hkv · Dh bytes = 56 KiB a token, in pages of 128. A row has its
    # logits in fp32, and partial sums of attention: of 8 pieces and 28 heads, 128 numbers and 2.
    row = 9 * 128 * 56 * 1024 + 4 * 152064 + 4 * 8 * 28 * 130
    assert two.rollout - one.rollout == 64 * row
    assert two.update == one.update
    whole = memory.plan(c, recomputed=0)
    assert whole.update > 4 * one.update
    # A layer more that is recomputed keeps its input, 4 D bytes of 4096 tokens, and nothing else.
    less = memory.plan(c, recomputed=9).update - memory.plan(c, recomputed=10).update
    saved = memory.saved_bytes(c, 32) + 4 * 512
    assert less == 4096 * (saved - 4 * 3584)
    D, F, kv = 3584, 18944, 512
    per_rank = 28 * ((3 * D + D + 2 * kv) + (D + D) + (2 * D + 2 * F) + (F + D))  # lora_A, lora_B
    # the gradient, 4 bytes a parameter; x @ lora_A.T of the one layer that saves all
    assert memory.plan(c, rank=256).update - one.update == 224 * (4 * per_rank + 4096 * 14)
    shared = memory.plan(c, recomputed=0, shared_keys=1000)
    assert shared.update - whole.update == 28 * 1000 * 4 * kv
    saved = 8 * D + 4 * D + 2 * (D + kv) + 2 * D + 6 * F + 14 * 32 + 4 * kv
    token = 28 * saved + 12 * D + 8 * D + 4 * F
    larger, smaller = (memory.plan(c, recomputed=0, micro_tokens=n) for n in (16384, 8192))
    assert larger.update - smaller.update == 8192 * token
    c.architectures, c.attention_bias = ["Qwen3ForCausalLM"], True
    # Qwen3's head norms save q and k of 4096 tokens in fp32: (28 + 4) · 128 · 4 bytes a layer
    assert memory.plan(c, recomputed=0).update - whole.update == 4096 * 28 * 32 * 128 * 4


def test_the_plan_is_within_a_twentieth_of_the_measured_peaks():
    """Rollout and update apart, short and long answers, with and without recomputation, on an H100.
    In the first step of a run AdamW has no moments yet."""
    log = Path(__file__).parent.parent / "results/memory_bench.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    later = [r for r in records if r["step"]]
    assert {r["shape"] for r in later} >= {"0.5b", "1.5b", "7b", "32b"} and len(later) >= 18
    for r in later:
        for part, planned in step.planned(r).items():
            peak = r[part.replace("planned", "peak")]
            assert abs(planned / peak - 1) < 0.05, (r, part, planned)


def printed(capsys, *arguments):
    """`python -m tools.memory arguments` → {(model, GB): what it prints of the two}."""
    memory.main(list(map(str, arguments)))
    title, *rows = map(str.split, capsys.readouterr().out.splitlines())
    return {(row[-1], int(row[0])): dict(zip(title, row, strict=True)) for row in rows}


def test_the_command_reads_a_config_alone_and_refuses_what_makes_no_sense(tiny, tmp_path, capsys):
    """A refusal names the value."""
    shutil.copy(tiny / "config.json", tmp_path)  # and no weights
    flags = "--model", tmp_path, "--prompt-length", 20, "--max-new-tokens", 30, "--memory-gb", 4
    (row,) = printed(capsys, *flags).values()
    # the context; 16 × 8 answers in one micro-batch
    assert row["longest"] == "128" and row["at-once"] == str(16 * (20 + 8 * 29))
    for flag, value in (
        ("--max-new-tokens", "0"),
        ("--rank", "0"),
        ("--memory-gb", "nan"),
        ("--max-new-tokens", "109"),
    ):
        with pytest.raises(ValueError, match=f"{flag} {value}.*: give 1 or more, .* of 128 tokens"):
            printed(capsys, *flags, flag, value)
    (tmp_path / "config.json").write_text(
        '{"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}'
    )
    with pytest.raises(ValueError, match="^Gemma2ForCausalLM is not supported"):
        printed(capsys, *flags)


def test_the_table_says_what_the_plan_of_each_card_says(capsys):
    """At the numbers it prints the peak fits beside the reserve; one answer, or one token, more
    does not."""
    table = printed(capsys, "--rank", 16)
    assert len(table) == len(memory.MODELS) * len(memory.CARDS)
    assert table["1.5b", 80]["answers"] == "256" and table["1.5b", 80]["longest"] == "32768"
    assert table["72b", 24]["answers"] == table["72b", 24]["longest"] == "0"
    for name, gb in (("32b", 24), ("7b", 12), ("72b", 80)):
        row, c, room = table[name, gb], memory.config(name), gb * 2**30 - memory.BESIDE

        def plan(slots, length, c=c):
            more = dict(prefill=min(8192, slots * 256), shared_keys=256)
            more["recomputed"] = c.num_hidden_layers - 1
            return memory.plan(c, "nvfp4", 16, slots, length, length, **more)

        slots, longest = int(row["answers"]), int(row["longest"])
        one = plan(1, 1280)
        assert plan(slots, 1280).peak <= room < plan(slots + 1, 1280).peak
        assert plan(8, longest).peak <= room < plan(8, longest + 1).peak
        assert float(row["needs"]) == pytest.approx((one.peak + memory.BESIDE) / 2**30, abs=0.06)
        for part, value in one._asdict().items():
            assert float(row[part]) == pytest.approx(value / 1e9, abs=0.006)


@pytest.mark.gpu
def test_gpu_the_plan_is_within_a_tenth_of_the_peak(tmp_path):
    """The second step of the 3B shape; the log of the test above has larger shapes."""
    flags = "--model-shape 3b --quant nvfp4 --prompts 2 --prompt-length 64 --new 448 --out"
    step.main([*flags.split(), str(tmp_path / "log")])
    _, last = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert abs(last["planned_gb"] / last["peak_gb"] - 1) < 0.1
