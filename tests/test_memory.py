"""python -m pytest tests/test_memory.py -q"""
import json
import shutil
from pathlib import Path

import bench
import pytest
import torch
import transformers
from conftest import tiny_checkpoint

import lora
import memory
import model
import train

# commits in the log whose embeddings, if not tied to lm_head, were in the GPU's memory
EARLY = {"1eb07c3", "5fae82c", "dc3b966", "f0c3297", "ab4a418", "7098454-dirty"}


@pytest.mark.parametrize("shape, parameters", [
    ("135m", 134_515_008), ("0.5b", 494_032_768), ("1.5b", 1_543_714_304), ("3b", 3_085_938_688),
    ("7b", 7_615_616_512), ("14b", 14_770_033_664), ("32b", 32_763_876_352), ("72b", 72_706_203_648)])
def test_a_shape_has_as_many_parameters_as_the_released_model(shape, parameters):
    """The models are SmolLM2-135M and Qwen2.5 on the hub."""
    with torch.device("meta"):
        released = transformers.AutoModelForCausalLM.from_config(memory.config(shape))
    assert sum(p.numel() for p in released.parameters()) == parameters


@pytest.mark.parametrize("family, changes", [("llama", {}), ("qwen3", dict(head_dim=24)),
                                             ("qwen2", dict(tie_word_embeddings=True, hidden_size=80))])
def test_weights_and_adapters_are_counted_as_they_are_stored(tmp_path, family, changes):
    """Packed words and scales, embeddings and head in bf16, 12 bytes a trained parameter and its copy: to the
    byte. The plan leaves out norms, biases, the scale per row and the kernel's counters."""
    tiny_checkpoint(tmp_path, family, **changes)
    m = model.load(str(tmp_path), rank=4)
    packed = [x.base.W for x in lora.lora_layers(m).values()]
    stored = sum(p.words.nbytes + p.scales.nbytes for p in packed)
    head = 2 * m.lm_head.numel()                       # embeddings that are not tied to it are not on the GPU
    plan = memory.plan(m.config, rank=4)
    assert plan.weights == stored + head
    copies = sum(x.copy_A.numel() + x.copy_B.numel() for x in lora.lora_layers(m).values())
    assert plan.adapter == 12 * sum(p.numel() for p in m.parameters()) + 2 * copies
    plain, plan = model.load(str(tmp_path), "bf16", rank=4), memory.plan(m.config, "bf16", rank=4)
    wide = sum(2 * x.base.W.wide.numel() for x in lora.lora_layers(plain).values())
    assert plan.weights + plan.adapter == wide + head + 2 * copies + 12 * sum(
        p.numel() for p in m.parameters())


def test_what_grows_with_what():
    """KV cache: with slots and length. Update: with tokens, and less so with gradient checkpointing."""
    c = memory.config("7b")
    one, two = memory.plan(c, slots=64), memory.plan(c, slots=128)
    # Qwen2.5-7B caches 4 · layers · Hkv · Dh bytes = 56 KiB a token, and holds two fp32 logits a slot
    assert two.rollout - one.rollout == 64 * (1152 * 56 * 1024 + 8 * 152064)
    assert memory.plan(c, length=2304).rollout - one.rollout == 64 * 1152 * 56 * 1024
    assert memory.plan(c, micro_tokens=8192).update > 1.5 * one.update
    assert memory.plan(c, slots=99).update == one.update
    assert memory.plan(c, checkpointing=False).update > 4 * one.update
    c.architectures, c.attention_bias = ["Qwen3ForCausalLM"], True
    # Qwen3's head norms save q and k in fp32: (28 + 4) · 128 · 4 bytes
    assert memory.plan(c, checkpointing=False, micro_tokens=1).update - memory.plan(
        memory.config("7b"), checkpointing=False, micro_tokens=1).update == 28 * 32 * 128 * 4
    assert one.peak == one.weights + one.adapter + max(one.rollout, one.update)


def test_the_headline_fits():
    """With few answers at a time a 7B fits 24 GB, a 32B 40 GB, a 72B 80 GB; in bf16 these two do not."""
    for shape, room in (("7b", 24e9), ("32b", 40e9), ("72b", 80e9)):
        c = memory.config(shape)
        assert memory.plan(c, slots=8, micro_tokens=1152).peak < room
        assert shape == "7b" or memory.plan(c, "bf16", slots=8, micro_tokens=1152).peak > room


def test_the_plan_is_within_a_tenth_of_the_measured_peaks():
    """Steps of 7B, 32B and 72B shapes on an H200, whole and update alone, some under a cap. Only the last
    record of each group counts, because AdamW has no moments yet in the first."""
    log, peaks = Path(__file__).parent.parent / "results/step_bench.jsonl", {}
    for r in map(json.loads, log.read_text().splitlines()):
        if r["weights"] != "hf-nf4":
            peaks[r["shape"], r["weights"], r["prompts"], r["new"], r["cap_gb"], r["ranks"]] = r
    assert len(peaks) >= 11
    for r in peaks.values():
        c = memory.config(r["shape"])
        planned = memory.plan(c, r["weights"], r.get("rank", 32), r["slots"], r["prompt_length"] + r["new"],
                              r["micro_tokens"], prefill=r["prompts"] * r["prompt_length"]).peak / 1e9
        if r["commit"] in EARLY:                       # their embeddings were in the GPU's memory
            planned += 2e-9 * c.vocab_size * c.hidden_size
        assert abs(planned / r["peak_gb"] - 1) < 0.1, (r, planned)
        assert r["peak_gb"] < planned + 1, "the command leaves 1 GB for the context and gaps"


def test_a_runs_plan_has_the_positions_that_were_allocated_and_the_tokens_that_came():
    """Answers may end long before the limit: slots are allocated for it, the update sees the answers."""
    c, config = memory.config("7b"), train.Config(micro_tokens=512)
    plan = memory.plan_of(config, c, 8, 4096, longest=700)
    assert plan.rollout == memory.plan(c, slots=8, length=4096).rollout
    assert plan.update == memory.plan(c, micro_tokens=700, checkpointing=False).update
    assert memory.plan_of(config, c, 8, 4096).update > plan.update


def printed(capsys, *arguments):
    """`python memory.py arguments` → {(model, GB): what it prints of this model on this card}."""
    memory.main([*map(str, arguments)])
    title, *lines = capsys.readouterr().out.splitlines()
    rows = [dict(zip(title.split(), line.split(), strict=True)) for line in lines]
    return {(row["model"], int(row["card"])): row for row in rows}


def test_the_command_reads_a_config_alone_and_refuses_what_makes_no_sense(tiny, tmp_path, capsys):
    """A refusal names the value."""
    flags = "--prompt-length", 20, "--max-new-tokens", 30, "--rank", 4
    row, = printed(capsys, "--model", tiny, *flags, "--memory-gb", 4).values()
    assert row["longest"] == "128" and row["--micro-tokens"] == "6400"            # the context, 128 answers
    shutil.copy(tiny / "config.json", tmp_path)                                   # and nothing else
    again, = printed(capsys, "--model", tmp_path, *flags, "--memory-gb", 4).values()
    assert again == row | {"model": str(tmp_path)}
    for flag, value in (("--max-new-tokens", "0"), ("--rank", "0"), ("--memory-gb", "nan"),
                        ("--max-new-tokens", "109")):
        with pytest.raises(ValueError, match=f"{flag} {value}.*: give 1 or more, within .* of 128 tok"):
            printed(capsys, "--model", tiny, *flags, flag, value)
    (tmp_path / "config.json").write_text('{"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}')
    with pytest.raises(ValueError, match="^Gemma2ForCausalLM is not supported"):
        printed(capsys, "--model", tmp_path, "--rank", 0)


def test_the_table_says_what_the_plan_of_each_card_says(capsys):
    """At the numbers it prints the peak fits beside the reserve; one answer, or one token, more does not."""
    table = printed(capsys, "--rank", 16)
    assert list(table) == [(name, gb) for name in memory.MODELS for gb in (12, 16, 24, 40, 48, 80)]
    assert table["1.5b", 80]["answers"] == "256" and table["1.5b", 80]["longest"] == "32768"
    row = table["72b", 24]
    assert row["answers"] == row["longest"] == row["--micro-tokens"] == "0"
    for name, gb in (("32b", 24), ("7b", 12), ("72b", 80)):
        row, c, room = table[name, gb], memory.config(name), gb * 2**30 - memory.BESIDE

        def planned(slots, length, micro, c=c):
            return memory.plan(c, "nvfp4", 16, slots, length, micro, prefill=min(8192, slots * 256))
        slots, longest, micro = (int(row[key]) for key in ("answers", "longest", "--micro-tokens"))
        assert planned(slots, 1280, 1280).peak <= room < planned(slots + 1, 1280, 1280).peak
        assert planned(1, 1280, micro).peak <= room < planned(1, 1280, micro + 1280).peak
        assert planned(8, longest, longest).peak <= room < planned(8, longest + 1, longest + 1).peak
        one = planned(1, 1280, 1280)
        assert float(row["needs"]) == pytest.approx((one.peak + memory.BESIDE) / 2**30, abs=.06)
        assert [float(row[part]) for part in one._fields] == pytest.approx([x / 1e9 for x in one], abs=.006)


@pytest.mark.gpu
@pytest.mark.parametrize("update_only", [False, True])
def test_gpu_the_plan_is_within_a_tenth_of_the_peak(update_only, tmp_path):
    """On the 3B shape, whole step and update alone; results/step_bench.jsonl has the larger shapes."""
    log = tmp_path / "log"
    bench.main(["step", "--model-shape", "3b", "--quant", "nvfp4", "--prompts", "2", "--prompt-length", "64",
                "--new", "448", "--out", str(log)] + ["--update-only"] * update_only)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(records) == 2 and abs(records[1]["planned_gb"] / records[1]["peak_gb"] - 1) < 0.1
