"""The planner of memory, against what is allocated and stored.

python -m pytest tests/test_memory.py
"""

import json
import re
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
from rollout import Limits, ModelRunner, Rollout, Sampler, SamplingParams, cached_bytes
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
    m = model.load(weights.open(tmp_path), quant, rank=4)
    plan = memory.plan(m.config, quant, rank=4)
    assert plan.weights + plan.adapter == bytes_of(m)


def bytes_of(m):
    """→ the bytes of weights, adapters and the optimizer, were m on a GPU."""
    stored = 2 * m.lm_head.numel() + 12 * sum(p.numel() for p in m.parameters())
    for layer in lora.lora_layers(m).values():
        stored += 2 * (layer.copy_A.numel() + layer.copy_B.numel())
        weight = layer.base.weight
        if isinstance(weight, fp4_gemm.Dense):
            stored += 2 * weight.weight_and_B.numel()
        else:
            stored += weight.words.nbytes + weight.scales.nbytes
    return stored


@pytest.mark.parametrize("layout, left, ignore", [row for row in LISTED if row[2]])
def test_layers_that_a_4_bit_checkpoint_leaves_in_16_bits_are_counted_so(
    tmp_path, capsys, layout, left, ignore
):
    """By the config alone; the command's table too."""
    foreign(tmp_path, layout, "qwen2", left, ignore)
    m = model.load(weights.open(tmp_path), "nvfp4", rank=4)
    (tmp_path / "model.safetensors").unlink()
    plan = memory.plan(weights.config_of(tmp_path), rank=4)
    assert plan.weights + plan.adapter == bytes_of(m)
    flags = "--prompt-length", 20, "--max-new-tokens", 30, "--memory-gb", 4, "--rank", 4
    assert printed(capsys, "--model", tmp_path, *flags)


def test_a_weight_in_4_bits_is_decoded_for_cublas_and_one_in_16_is_not(tmp_path):
    """The largest of a layer's is gate_up: of three layers one, two or all leave it in 16 bits."""
    rollouts = []
    for i, ignore in enumerate([["never"], ["*.0.mlp.*"], ["*.[01].mlp.*"], ["*.mlp.*"]]):
        foreign(tmp_path / str(i), "modelopt", "qwen2", "x^", ignore)
        rollouts.append(memory.plan(weights.config_of(tmp_path / str(i))).rollout)
    gate_up, qkv = 2 * 2 * 96 * 64, 2 * (64 + 32 + 32) * 64
    assert rollouts[0] == rollouts[1] == rollouts[2] == rollouts[3] + gate_up - qkv


PLANS = [  # what is asked, and the bytes of weights, adapter, rollout and update
    (dict(shape="7b"), [4760469504, 1130364928, 5430820864, 3285975040]),
    (
        dict(
            shape="7b",
            qwen3=True,
            rank=16,
            slots=128,
            length=2000,
            micro_tokens=16384,
            recomputed=9,
            prefill=5000,
            shared_keys=1000,
        ),
        [4760469504, 565182464, 16144449536, 64090652672],
    ),
    (
        dict(shape="1.5b", quant="bf16", micro_tokens=300, recomputed=2, pages=700),
        [3087138816, 597753856, 3049406464, 1186083328],
    ),
    (
        dict(shape="0.5b", micro_tokens=3000, recomputed=20),
        [473546752, 246349824, 1238917120, 1257166848],
    ),
]


@pytest.mark.parametrize("asked, planned", PLANS)
def test_a_plan_is_what_it_was_when_it_was_measured(asked, planned):
    """To the byte; the next test compares such plans with measured peaks. Each shape here has
    another maximum: the logits, a layer whose input is kept, or one that keeps all.
    """
    asked = dict(asked)
    c = memory.config(asked.pop("shape"))
    if asked.pop("qwen3", False):
        c.architectures, c.attention_bias = ["Qwen3ForCausalLM"], True
    assert [*memory.plan(c, **asked)] == planned


def test_a_plan_counts_the_gradients_of_keys_that_no_heads_share():
    """Llama-2-7B, 16 answers of 64 tokens to a prompt of 3,000: 52,000 keys and values, each of
    4,096 numbers, whose gradients wait in bf16 and in fp32.
    """
    c = memory.config("7b")
    c.num_attention_heads = c.num_key_value_heads = 32
    c.hidden_size, c.intermediate_size = 4096, 11008
    few, many = (memory.plan(c, micro_tokens=4024, shared_keys=n).update for n in (4000, 48000))
    saved, gradients = 44000 * 4 * 4096, 44000 * 8 * 4096
    assert many - few == saved + gradients


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
    title, *lines = map(str.split, capsys.readouterr().out.splitlines())
    return {(line[-1], int(line[0])): dict(zip(title, line, strict=True)) for line in lines}


def test_the_command_reads_a_config_alone_and_refuses_what_makes_no_sense(tiny, tmp_path, capsys):
    """A refusal names the value."""
    shutil.copy(tiny / "config.json", tmp_path)  # and no weights
    flags = "--model", tmp_path, "--prompt-length", 20, "--max-new-tokens", 30, "--memory-gb", 4
    (line,) = printed(capsys, *flags).values()
    # the context; 16 × 8 answers in one micro-batch
    assert line["longest"] == "128" and line["at-once"] == str(16 * (20 + 8 * 29))
    for wrong in ("--max-new-tokens 0", "--rank 0", "--memory-gb nan", "--max-new-tokens 109"):
        with pytest.raises(ValueError, match=wrong):
            printed(capsys, *flags, *wrong.split())
    (tmp_path / "config.json").write_text(
        '{"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}'
    )
    with pytest.raises(ValueError, match="Gemma2ForCausalLM is not supported"):
        printed(capsys, *flags)


@pytest.mark.parametrize("name, gb, answers", [("32b", 24, 1), ("7b", 12, 1), ("1.5b", 80, 256)])
def test_what_a_card_holds_is_what_the_plan_says(name, gb, answers):
    """At these numbers the peak fits beside the reserve; one answer, or one token, more does not,
    unless the number is the most that there are.
    """
    c, room = memory.config(name), gb * 2**30 - memory.BESIDE
    line = memory.line_of(c, "nvfp4", 16, 256, 1024, gb)

    def plan(slots, length):
        prefill, kept = min(8192, slots * 256), c.num_hidden_layers - 1
        return memory.plan(c, "nvfp4", 16, slots, length, length, kept, prefill, None, 256)

    assert line.answers >= answers and plan(line.answers, 1280).peak <= room
    assert line.answers == 256 or room < plan(line.answers + 1, 1280).peak
    assert plan(8, line.longest).peak <= room
    assert line.longest == 32768 or room < plan(8, line.longest + 1).peak
    assert line.plan == plan(1, 1280) and line.needs * 2**30 == line.plan.peak + memory.BESIDE


@pytest.mark.parametrize("kv, wider", [("int8", 1), ("bf16", 2)])  # a CPU keeps bf16 as fp32
def test_keys_and_values_are_counted_as_they_are_stored(tiny, kv, wider):
    """Of each page, in both formats, to the byte."""
    m = model.load(weights.open(tiny), "bf16", rank=4)
    sampler, prompt = Sampler(m, kv=kv), torch.ones(1, 40, dtype=torch.long)
    sampler.limits = Limits(slots=1, pages=7, length=40, prefill=8)
    runner = ModelRunner(sampler, Rollout(prompt, *[None] * 4), SamplingParams(9, [2]), 0, 0)
    stored = sum(x.nbytes for x in runner.page_tensors)
    if kv == "int8":  # no CPU code minds how values lie in memory, but the kernel does
        assert all(pages.integers.mT.is_contiguous() for pages in runner.cache.v)
    assert stored == wider * 7 * runner.page_size * cached_bytes(m.config, kv)
    few, many = (memory.plan(m.config, pages=n, kv=kv).rollout for n in (100, 107))
    assert many - few == stored / wider * memory.PAGE / runner.page_size


def test_the_table_has_a_line_for_each_model_and_card(capsys):
    table = printed(capsys)
    assert len(table) == len(memory.MODELS) * len(memory.CARDS)
    assert table["72b", 24]["answers"] == table["72b", 24]["longest"] == "0"
    row, line = table["7b", 24], memory.line_of(memory.config("7b"), "nvfp4", 32, 256, 1024, 24)
    numbers = [line.answers, line.longest, line.size.tokens, line.size.recomputed]
    assert [int(row[name]) for name in ("answers", "longest", "at-once", "recomputed")] == numbers
    assert float(row["needs"]) == pytest.approx(line.needs, abs=0.06)
    for part, value in line.plan._asdict().items():
        assert float(row[part]) == pytest.approx(value / 1e9, abs=0.006)


def test_the_page_of_the_planner_quotes_what_the_command_prints(capsys):
    page = (Path(memory.__file__).parents[1] / "docs/planner.md").read_text()
    for flags in (["--rank", "16"], []):
        row = printed(capsys, "--model", "7b", "--memory-gb", "24", *flags)["7b", 24]
        assert re.search(rf"\b{row['answers']}\b", page) and f" {row['longest']}" in page, flags


def test_micro_batches_hold_each_row_once_and_cut_no_group_that_fits():
    """Each stays within the budget, or is one row. Its flat tokens count a prompt once, and no last
    token, also if a prompt's rows are apart.
    """
    prompts = torch.arange(32) // 4  # of row b, whose prompt has as many tokens, and one more
    sampled = Rollout(
        tokens=prompts[:, None].expand(32, 40),
        logprobs=None,
        lengths=torch.randint(1, 20, (32,)),
        finished=None,
        prompt_lengths=prompts + 1,
    )
    rows = torch.randperm(32)[:25]
    groups = memory.prompt_groups(sampled, rows)
    assert len(groups) == 8

    def flat_tokens(rows):
        prompts = {row // 4 + 1 for row in rows}
        return sum(prompts) + sum(int(sampled.lengths[row]) - 1 for row in rows)

    for budget in (1, 25, *(group.tokens for group in groups), 120, 10**6):
        batches = memory.micro_batches(groups, budget)
        assert sorted(sum((batch.rows for batch in batches), [])) == sorted(rows.tolist())
        for batch in batches:
            assert batch.tokens == flat_tokens(batch.rows)
            assert batch.tokens <= budget or len(batch.rows) == 1
            assert batch.shared_keys == sum(row // 4 + 1 for row in batch.rows)
        for group in groups:
            cut = sum(not group.answers.keys().isdisjoint(batch.rows) for batch in batches) > 1
            assert not cut or group.tokens > budget
    assert len(batches) == 1 and not memory.micro_batches([], 9)


@pytest.mark.gpu
def test_gpu_the_plan_is_within_a_tenth_of_the_peak(tmp_path):
    """The second step of the 3B shape; the log of the test above has larger shapes."""
    flags = "--model-shape 3b --quant nvfp4 --prompts 2 --prompt-length 64 --new 448 --out"
    step.main([*flags.split(), str(tmp_path / "log")])
    _, last = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert abs(last["planned_gb"] / last["peak_gb"] - 1) < 0.1
