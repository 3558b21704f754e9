"""python -m pytest tests/test_ablation.py"""
import json
import statistics
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.text import Text

import aqn
import checkpoint
import launch
import lora
import model as decoder
import train
from tasks import Task

sys.path.insert(0, str(Path(__file__).parent.parent / "results"))
import ablation  # noqa: E402
import experiment  # noqa: E402
import plot  # noqa: E402

TINY = dict(steps=2, prompts=4, group_size=4, max_new_tokens=4, problems=(4, 8), rank=4, alpha=4,
            device="cpu", sigma_start=.05, sigma_end=.05)


# --- formats
def test_nf4s_levels_are_bitsandbytes_quantiles():
    """create_normal_map: normal quantiles, 8 above 0 and 7 below, p even from .9677083 to ½, over the max."""
    ppf = statistics.NormalDist().inv_cdf
    above, below = ([ppf(q) for q in np.linspace(.9677083, .5, n)[:-1]] for n in (9, 8))
    want = np.sort([*above, 0, *(-v for v in below)])
    assert np.abs(want / want.max() - experiment.NF4).max() < 1e-6 and len(experiment.NF4) == 16


def test_nf4_by_hand_and_against_the_nearest_level():
    """Blocks of 64 in memory order, across rows; each its own absmax; a block of zeros stays zero."""
    w = torch.zeros(4, 48)
    w[0, :5] = torch.tensor([2., -2, .1, .07, -1.3])
    w[1, 20] = 1e-3                                                    # element 68: the second block, alone
    got = experiment.nf4(w)
    assert got[0, :5].tolist() == pytest.approx([2, -2, 2 * .07958030, 0, 2 * -.69619280], rel=1e-6)
    assert got[1, 20] == w[1, 20] and got.count_nonzero() == 5
    w = torch.randn(6, 96)
    blocks, levels = w.view(-1, 64), torch.tensor(experiment.NF4)
    scaled = blocks / blocks.abs().amax(1, keepdim=True)
    nearest = levels[(scaled[..., None] - levels).abs().argmin(-1)] * blocks.abs().amax(1, keepdim=True)
    assert torch.equal(experiment.nf4(w), nearest.view(w.shape))


def test_mxfp4_by_hand_and_against_the_nearest_value():
    """The scale is 2^(⌊log2 amax⌋ − 2): 7 saturates at 6; 5, a tie of 4 and 6, rounds to even."""
    w = torch.zeros(2, 96)
    w[0, :3], w[0, 32:35], w[0, 64:66] = (torch.tensor(v) for v in ([7., 5, -.2], [.75, -.3, .1], [8., 7]))
    want = torch.zeros(2, 96)
    want[0, :3], want[0, 32:35], want[0, 64:66] = (
        torch.tensor(v) for v in ([6., 4, 0], [.75, -.25, .125], [8., 8]))
    assert torch.equal(ablation.mxfp4(w), want)
    w = torch.randn(3, 64)
    scale = torch.exp2(torch.floor(torch.log2(w.view(3, 2, 32).abs().amax(-1, keepdim=True))) - 2)
    grid = torch.tensor([s * v for v in (0, .5, 1, 1.5, 2, 3, 4, 6) for s in (1, -1)])
    nearest = grid[((w.view(3, 2, 32) / scale)[..., None] - grid).abs().argmin(-1)] * scale
    assert torch.equal(ablation.mxfp4(w), nearest.view(3, 64))


def test_a_rounded_checkpoint_rounds_projections_and_nothing_else(tiny_chat):
    plain = decoder.load(str(tiny_chat), "bf16")
    source = experiment.Rounded(checkpoint.open(str(tiny_chat)), experiment.nf4)
    rounded = decoder.load(source, "bf16")
    pairs = list(zip(*(lora.lora_layers(m).values() for m in (plain, rounded)), strict=True))
    assert len(pairs) == 8
    for a, b in ((a.base.W.weight, b.base.W.weight) for a, b in pairs):
        assert torch.equal(experiment.nf4(a), b) and not torch.equal(a, b)
    others = rounded.state_dict()
    assert others and all(torch.equal(t, others[name]) for name, t in plain.state_dict().items())


# --- runs
@pytest.fixture
def toy(tiny_chat, monkeypatch):
    """A task that a random model sometimes solves → (a function that runs a job, the problems it asked)."""
    asked = []
    task = Task([{"i": i} for i in range(40)], [{"i": i} for i in range(40, 48)],
                lambda p: asked.append(p["i"]) or f"{p['i']} + 7",
                lambda p, text, finished: float(text[:1] in set("01234")))
    monkeypatch.setitem(ablation.TASKS, "addition", lambda data, operands, held_out: task)
    return lambda arm, seed=0, rate=4e-3, phase="main", **changes: ablation.measure(
        (phase, arm, rate, seed), **TINY | dict(model=str(tiny_chat)) | changes), asked


def test_a_run_of_each_kind_records_what_the_figures_need_and_replays_to_the_same_record(toy):
    """AQN on NVFP4, NF4, full fine-tuning. At one seed, every arm trains on the same problems."""
    measure, asked = toy
    records, prompts = {}, {}
    for arm in ("sweep+aqn", "nf4", "full", "sweep+aqn"):
        asked.clear()
        again = records.get(arm)
        records[arm], prompts[arm] = measure(arm), list(asked)
        if again:
            assert again | dict(seconds=0) == records[arm] | dict(seconds=0)
    assert prompts["sweep+aqn"] == prompts["nf4"] == prompts["full"]
    asked.clear()
    assert measure("nf4", seed=1)["length"] != records["nf4"]["length"] and prompts["nf4"] != asked
    for arm, r in records.items():
        assert r["reward"][0] > 0 and r["eval"]["step"] == [0, 2] and r["skipped"] == 0
        assert {len(r[k]) for k in ("reward", "surprise", "entropy", "kl_noise", "sigma", "length",
                                    "finished", "signal")} == {2}
        sigma = [0, aqn.sigma(1, 2, .05, .05) * ("aqn" in arm)]
        assert r["sigma"] == pytest.approx(sigma, rel=1e-3) and r["lr"] == 4e-3
        assert (r["kl_noise"][1] > 1e-4) == ("aqn" in arm)
        assert .5 < r["surprise"][0] < 3.5 and abs(r["surprise"][0] - r["entropy"][0]) < .5
        assert set(r["final"]) == {"greedy", "greedy_loose", "sampled"}
        assert len(json.dumps(r)) / 2 * 100 * 145 < 5e6                # 145 runs log < 5 MB


def test_every_arm_is_a_valid_config_and_differs_from_main_only_in_what_it_names():
    common = train.Config(**ablation.COMMON)
    for flags in ablation.ARMS.values():
        flags = dict(flags)
        assert flags.pop("base") in ablation.BASES
        config = launch.check(train.Config(**ablation.COMMON | flags))
        assert {k for k in vars(config) if getattr(config, k) != getattr(common, k)} <= set(flags)
    assert (common.aqn, common.sigma_schedule, common.rank, common.loss, common.correction) == (
        True, "exponential", 32, "dapo", "none")                     # each variant changes one


def test_full_fine_tuning_trains_every_projection_and_the_sampler_reads_it(tiny_chat, toy, monkeypatch):
    plain, models, build = decoder.load(str(tiny_chat), "bf16"), [], ablation.build
    monkeypatch.setattr(ablation, "build", lambda *a: models.append(build(*a)) or models[-1])
    toy[0]("full")
    model = models[0]
    bases = {name: layer.base.W.weight for name, layer in lora.lora_layers(plain).items()}
    weights = {name.removesuffix(".weight"): p for name, p in model.named_parameters()}
    assert weights.keys() == bases.keys() and len(bases) == 8
    for name, p in weights.items():
        assert p.dtype == torch.float32 and 0 < (p - bases[name]).abs().max() < .02   # AdamW: ±lr per step
        assert torch.equal(p, model.get_submodule(name).base.W.weight)
    x, layer = torch.randn(3, 64), model.get_submodule("layers.0.self_attn.qkv_proj")
    with torch.no_grad():
        sampled = layer(x)
    assert torch.equal(layer(x), sampled)
    layer.weight.data += 1                                             # not yet refreshed
    assert (layer(x) - sampled).abs().max() > .1 and torch.equal(layer.base(x), sampled)


def test_entropy_before_training_is_that_of_each_prompts_answers(toy):
    """One number per prompt, below ln V; another weight format gives other numbers."""
    one, other = (toy[0](arm, rate=0.0, phase="entropy")["entropy"] for arm in ("bf16", "mxfp4"))
    assert len(one) == 8 and all(.5 < v < np.log(32) for v in one) and one != other


# --- the list
def fake(phase, arm, lr, seed, sampled=.5, steps=20, shift=0.0):
    """A record with the fields of a real one; its values are drawn from `seed`."""
    noise = np.random.default_rng(seed)
    reward = np.clip(np.linspace(0, sampled, steps) + noise.normal(0, .02, steps), 0, 1).round(3).tolist()
    flags = ablation.ARMS[arm]
    where = [flags.get(f"sigma_{k}", v) for k, v in
             dict(start=1e-2, end=1e-4, stages=10, schedule="exponential").items()]
    sigma = [flags["aqn"] * aqn.sigma(step, steps, *where) for step in range(steps)]
    return dict(phase=phase, arm=arm, lr=lr, seed=seed, steps=steps, reward=reward, sigma=sigma,
                surprise=[round(1.5 - r + shift, 3) for r in reward], seconds=1.0,
                eval=dict(step=[0, 10, 20], greedy=[0, .1, sampled], sampled=[0, sampled / 2, sampled]),
                final=dict(greedy=sampled, greedy_loose=sampled, sampled=sampled))


def grid():
    """Fake grid records: accuracy rises with the learning rate, but falls in arm `bf16`."""
    return [fake("grid", arm, lr, seed, .3 + 100 * lr * (-1 if arm == "bf16" else 1))
            for _, arm, lr, seed in (j for j in ablation.plan([], (), "bypass") if j[0] == "grid")]


def test_the_run_list_is_what_the_issue_asks_for():
    """Grid: 8 + 3 arms × 3 rates × 2 seeds. Main: 5 new seeds. Extras: variants on some of main's seeds.
    Follow-up: noise with a ratio of 1, on the seeds of the same arm without noise."""
    jobs = ablation.plan([], (), "bypass")
    runs = [job for job in jobs if job[0] != "smoke"]
    assert len(set(ablation.plan(grid(), (), "bypass"))) == len(set(jobs)) == len(jobs)
    assert len(jobs) == 5 + 66 + 55 + 19 + 22 + 11
    more = {arm: {job[3] for job in ablation.plan([]) if job[:2] == ("more", arm)} for arm in plot.ARMS}
    assert len(ablation.plan([])) == len(jobs) - 22 + 36 == len(set(ablation.plan(grid()))) and {
        arm for arm, seeds in more.items() if seeds == {7, 8, 9, 10, 11, 12}} == {
            f"{base}{noise}" for base in ("bf16", "rtn", "sweep") for noise in ("", "+aqn")}
    assert Counter(phase for phase, *_ in runs) == {
        "entropy": 5, "grid": 66, "main": 55, "extras": 19, "follow-up": 22}
    arms = {*ablation.main_arms("bypass")}
    assert set(plot.ARMS) == {*arms, *ablation.main_arms("none"), *ablation.FOLLOW_UP}
    assert arms ^ {*ablation.main_arms("none")} == {"sweep+aqn+none", "sweep+aqn+bypass"}
    assert arms == {"sweep+aqn+tis", "sweep+aqn+none", "full"} | {
        f"{base}{noise}" for base in ("bf16", "rtn", "sweep", "nf4") for noise in ("", "+aqn")}
    for arm in arms:
        tried = {job[2:] for job in runs if job[:2] == ("grid", arm)}
        low, middle, high = sorted({rate for rate, _ in tried})
        assert len(tried) == 6 and high / middle == pytest.approx(2) == pytest.approx(middle / low)
        fresh = {seed for phase, name, _, seed in runs if (phase, name) == ("main", arm)}
        assert len(fresh) == 5 and not fresh & {seed for _, seed in tried}
    extras = {name: {job[3] for job in runs if job[1] == name} for name in ablation.VARIANTS}
    assert all(seeds <= set(ablation.MAIN_SEEDS) for seeds in extras.values())         # pairs with sweep+aqn
    assert set(extras) == {name for names in plot.VARIANTS.values() for name in names}
    assert all(len(extras[name]) == 2 for name in (*aqn.SCHEDULES, "sigma-table4", "sigma-text")
               if name != "exponential") and {ablation.ARMS[f"rank{r}"]["rank"] for r in (16, 64, 128)} == {
                   16, 64, 128}
    seeds = {arm: {job[3] for job in runs if job[1] == arm and job[0] in ("main", "follow-up")}
             for arm in plot.ARMS}
    assert all(seeds[f"{base}+aqn+none"] == seeds[base] for base in ("bf16", "rtn", "sweep"))
    assert len(seeds["sweep"]) == 11 and len(seeds["rtn"]) == 5


def test_the_grid_chooses_each_arms_rate_when_it_is_complete():
    records = grid()
    assert {job[2] for job in ablation.plan([]) if job[0] in ("main", "extras")} == {None}
    chosen = {job[1]: job[2] for job in ablation.plan(records, (), "bypass") if job[0] in ("main", "extras")}
    assert chosen["bf16"] == 2.5e-4 and chosen["nf4"] == chosen["rank64"] == 1e-3 and chosen["full"] == 1e-4
    short = [r for r in records if ablation.key(r) != ("grid", "nf4", 1e-3, 1)]
    assert ablation.best_rate(short, "nf4") is None != ablation.best_rate(short, "rtn")
    assert ablation.best_rate(short, "nf4", given_up={("grid", "nf4", 1e-3, 1): "failed"}) == 1e-3


def test_many_runs_resume_lose_nothing_and_end_in_time(tiny_chat, tmp_path, capfd):
    """Resuming reruns a job whose log line a crash cut off, repeats no finished job, and reports failures."""
    options = dict(phases=("grid",), arms=("bf16",), workers=2, model=str(tiny_chat)) | TINY
    assert ablation.run_all(tmp_path, minutes=0, **options) == {} and ablation.read(tmp_path) == []
    log = tmp_path / "runs.jsonl"
    whole = [fake("grid", "bf16", rate, seed, steps=2) for rate in ablation.RATES for seed in (0, 1)]
    log.write_text("".join(json.dumps(r) + "\n" for r in whole[:4]) + json.dumps(whole[4])[:99])
    assert ablation.run_all(tmp_path, **options) == {}
    records = ablation.read(tmp_path)
    assert len(records) == 6 == len({ablation.key(r) for r in records}) and records[:4] == whole[:4]
    assert {r["device"] for r in records[4:]} == {"cpu"} and len(log.read_text().splitlines()) == 7
    before = log.read_bytes()
    assert ablation.run_all(tmp_path, **options) == {} and log.read_bytes() == before
    broken = options | dict(phases=("entropy",), arms=("mxfp4",), prompts=0)
    assert "prompts 0" in ablation.run_all(tmp_path, **broken)["entropy", "mxfp4", 0.0, 0]
    assert log.read_bytes() == before and "FAILED" in capfd.readouterr().out


# --- statistics, tables, figures
def test_student_t_holm_and_the_paired_test_against_tables():
    assert experiment.quantile(4) == pytest.approx(2.776445, abs=1e-4)
    assert experiment.quantile(9) == pytest.approx(2.262157, abs=1e-4)
    assert experiment.tail(1, 1) == pytest.approx(.5, abs=1e-6)              # Cauchy
    assert experiment.tail(-2.228139, 10) == pytest.approx(.05, abs=1e-6)
    mean, half, p = experiment.paired([3, 5, 7, 6], [1, 2, 6, 4])    # 2 3 1 2: sd .8165, t = 4.899, df 3
    assert (mean, half, p) == pytest.approx((2, 3.182446 * .408248, .016281), abs=1e-4)
    nan = float("nan")
    assert experiment.holm([.01, .04, nan, .03]) == pytest.approx([.03, .06, nan, .06], nan_ok=True)
    assert np.isnan(experiment.paired([1, 2], [0, 0])[1:]).all()


@pytest.mark.parametrize("kind, mean, half, p, says", [
    ("above", .05, .03, .01, "holds"), ("above", .05, .03, .08, "cannot tell"),       # Holm's p decides
    ("above", .03, .06, .3, "cannot tell"), ("above", -.05, .03, .01, "does not"),
    ("above", .00, .01, .9, "does not"), ("above", -.05, .10, .3, "cannot tell"),
    ("above", .05, float("nan"), float("nan"), "cannot tell"), ("not below", .00, .01, .9, "holds"),
    ("not below", -.01, .05, .6, "cannot tell"), ("not below", -.08, .03, .01, "does not")])
def test_the_verdict_follows_its_rule(kind, mean, half, p, says):
    assert experiment.verdict(kind, mean, half, p) == says


def synthetic(folder):
    """Logs in which AQN adds .1 to rtn's accuracy, rtn equals bf16, and nf4 is noise."""
    rng, level = np.random.default_rng(0), dict.fromkeys(ablation.main_arms("bypass"), .6) | {"rtn+aqn": .7}
    records = grid()
    for phase, arm, lr, seed in (j for j in ablation.plan(records, (), "bypass") if j[0] in plot.ALL):
        wide = .15 if arm == "nf4" else .004
        records.append(fake(phase, arm, lr, seed, level.get(arm, .6) + rng.normal(0, wide),
                            shift=.1 * (arm == "rtn")))
    prompts = rng.normal(1.7, .1, 256)
    for name, more in dict(bf16=0, rtn=.1, sweep=.05, nf4=-.1, mxfp4=.0).items():
        records.append(dict(phase="entropy", arm=name, lr=0.0, seed=0, steps=0, seconds=1.0,
                            entropy=(prompts + more + rng.normal(0, .02, 256)).tolist()))
    for r in records:
        ablation.append(folder, r)
    return plot.read(folder)


def test_known_effects_get_the_right_verdicts_and_noise_cannot_tell(tmp_path):
    records = synthetic(tmp_path)
    says = {row[0]: (n, v) for rows in (plot.PAPER, plot.OWN)
            for row, n, *_, v in plot.claims(records, rows)}
    assert says["NVFP4 raises the policy's entropy"] == (256, "holds")
    assert says["so does MXFP4"] == says["so does NF4"] == (256, "does not")
    assert says["NVFP4 LoRA samples with more entropy while it learns"] == (5, "holds")
    assert says["NVFP4 LoRA ends above bf16 LoRA"] == (5, "does not")
    assert says["AQN lifts NVFP4 LoRA"] == says["AQN speeds NVFP4 LoRA up"] == (5, "holds")
    assert says["NVFP4 LoRA ends above NF4 LoRA"] == (5, "cannot tell") == says["AQN lifts NF4 LoRA too"]
    assert says["NVFP4 + AQN is not below full fine-tuning"] == (5, "holds")
    assert says["the ratio is not below tis"] == (5, "holds")
    assert says["the same with AQN"] == (5, "does not")
    pairs = {row[0]: n for row, n, *_ in plot.claims(records, plot.AFTER, plot.ALL)}
    assert sorted(set(pairs.values())) == [5, 11] and all(pairs[row[0]] == 11 for row in plot.SWEEP)
    assert {n for _, n, *_ in plot.claims(records, plot.SWEEP, ("follow-up",))} == {6}
    equal = {row[0]: (n, v) for row, n, *_, v in plot.claims(records, plot.EQUAL, ("grid",))}
    assert set(equal.values()) == {(2, "cannot tell")}                # a seed's 3 rates average to one pair
    few = [r for r in records if r["phase"] != "main" or r["seed"] < 4]
    assert {v for *_, v in plot.claims(few, plot.PAPER[4:])} == {"cannot tell"}        # 2 pairs


def test_the_table_prints_numbers_that_were_put_in_and_names_the_base(tmp_path):
    records = synthetic(tmp_path)
    shown = plot.table(records, "bypass")
    values = [r["final"]["sampled"] for r in records if (r["phase"], r["arm"]) == ("main", "rtn+aqn")]
    assert f"| rtn+aqn | 0.001 | 5 | {np.mean(values):.3f}±{np.std(values, ddof=1):.3f} |" in shown
    assert "SmolLM2-135M-Instruct, dequantised from Q4_1" in shown and "chosen from 66 other runs" in shown
    assert all(f"| {name} |" in shown for name in (*ablation.main_arms("bypass"), *ablation.VARIANTS))
    losses = [line.split(" | ") for line in shown.split("loss (default DAPO)")[1].splitlines()[4:7]]
    assert [row[2] for row in losses] == ["3", "3", "3"]               # the same three seeds in each row
    assert "| bf16 | 0.00025: 0.275 (n=2) | 0.0005: 0.250 (n=2) | 0.001: 0.200 (n=2) |" in shown
    assert "nan" not in shown


def test_figures_are_a_function_of_the_log_alone_with_units_and_the_base(tmp_path, monkeypatch):
    folder, seen, save = tmp_path / "bypass", [], plot.save
    records = synthetic(folder)
    monkeypatch.setattr(plot, "save", lambda figure, path: seen.append(
        " ".join(t.get_text() for t in figure.findobj(Text))) or save(figure, path))
    plot.plot(folder)
    first = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    plot.plot(folder)
    assert first == {path.name: path.read_bytes() for path in folder.glob("*.png")} and len(first) == 4
    assert all("SmolLM2-135M-Instruct, dequantised from Q4_1" in text for text in seen) and len(seen) == 8
    units_of = ("share of answers", "nats a token", "4 samples of each of 256 problems", "σ")
    for text, units in zip(seen, units_of, strict=False):
        assert units in text and ("optimizer step" in text or "256 problems" in text)
    assert all(name in seen[3] for name in (*aqn.SCHEDULES, "1e-2 to 5e-4", "5e-2 to 5e-4"))
    chosen = {"bf16": 2.5e-4, "bf16+aqn+none": 2.5e-4, "full": 1e-4}
    assert all(f"{arm}, {chosen.get(arm, 1e-3):g} "
               f"(n={11 if arm in ('sweep', 'sweep+aqn+none') else 5})" in seen[0]
               for arm in plot.ARMS if arm != "sweep+aqn+bypass")
    assert (folder / "table.md").read_text() == plot.table(records, "bypass") + "\n"
    assert "aqn: noise, ratio to the policy that sampled; none: ratio of 1" in seen[0]


def test_a_log_of_unlike_runs_or_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        plot.read(tmp_path)
    for steps in (10, 20):
        ablation.append(tmp_path, fake("main", "bf16", 1e-3, steps, steps=steps))
    with pytest.raises(ValueError, match="different --steps"):
        plot.read(tmp_path)


@pytest.mark.parametrize("correction, count", [("none", 181), ("bypass", 167)])
def test_the_logs_hold_what_was_planned_and_their_tables(correction, count):
    records = plot.read(plot.LOGS / correction)
    planned, made = {*ablation.plan(records, (), correction)}, {ablation.key(r) for r in records}
    assert {job[0] for job in planned - made} == {"smoke"}
    assert made < planned and len(made) == len(records) == count
    assert (plot.LOGS / correction / "table.md").read_text() == plot.table(records, correction) + "\n"


def test_the_evidence_in_the_log_book_is_what_plot_makes_of_the_log():
    """Every row of a table under "What we found" is also in table.md."""
    table = (plot.LOGS / "none" / "table.md").read_text()
    section = (plot.LOGS.parent / "README.md").read_text().split("## What we found\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 40 and set(rows) <= set(table.splitlines())
