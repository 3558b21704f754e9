"""README.md, docs/ and results/LOG.md: each table equals what its script makes of its log."""

import re
import statistics

import pytest
from command import ROOT
from test_structure import tracked

from bench import tables
from experiments import gsm8k_plan, gsm8k_tables

PAGES = "README.md", "docs/differences.md", "docs/commands.md", "docs/planner.md", "results/LOG.md"
TEXT = " ".join("".join((ROOT / page).read_text() for page in PAGES).split())


@pytest.fixture(scope="module")
def git_logs(tmp_path_factory):
    """→ a folder of links to the logs that git knows. results/ may hold a user's own runs."""
    folder = tmp_path_factory.mktemp("logs")
    for name in tracked("results"):
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(ROOT / name)
    return folder / "results" if (folder / "results").is_dir() else ROOT / "results"


@pytest.fixture(autouse=True)
def logs(git_logs, monkeypatch):
    monkeypatch.setattr(tables, "LOGS", git_logs)
    monkeypatch.setattr(gsm8k_plan, "LOGS", git_logs / gsm8k_plan.LOGS.name)


@pytest.mark.parametrize("name", [*tables.TABLES, "gsm8k"])
def test_each_current_table_equals_what_its_script_makes_of_its_log(name, capsys):
    """Paragraph by paragraph, apart from where lines end and how wide a cell is."""
    if name == "gsm8k":
        print(gsm8k_tables.table(gsm8k_plan.LOGS))
    else:
        tables.TABLES[name]()
    printed = capsys.readouterr().out.strip()
    assert printed.count("\n|") >= 4
    for paragraph in printed.split("\n\n"):
        assert " ".join(paragraph.split()) in TEXT, paragraph


def test_each_interval_that_a_page_quotes_stands_in_a_table():
    """−.035 ± .030 in a sentence is -0.035 ± 0.030 in a table of results/, which a script made of a
    log.
    """
    made = (ROOT / "results/LOG.md").read_text() + (ROOT / "results/ablation/table.md").read_text()
    rows = " ".join(line for line in made.splitlines() if line.startswith("|")).replace("0.", ".")
    quoted = re.findall(r"([+−]\.\d+) ± (\.\d+)", TEXT)
    assert len(quoted) >= 5
    for difference, half in quoted:
        assert f"{difference.replace('−', '-')} ± {half}" in rows, (difference, half)


def test_the_numbers_in_readmes_sentences_are_those_of_the_logs():
    """Each sentence is made from its log, as README or a page of docs/ has it."""
    runs = tables.quickstarts()
    before, after = (runs[0][when]["eval_greedy"] for when in ("before", "after"))
    whole = [run["minutes"] for run in runs]
    alone = tables.runs_alone()
    minutes = "{:.1f}, {:.1f} and {:.1f} minutes".format(*(run["minutes"] for run in alone))
    learned = [run["after"]["eval_greedy"] for run in alone]
    peaks = {round(max(r["memory_gb"] for r in run["made"])) for run in alone}
    arm = gsm8k_plan.LOGS, gsm8k_plan.ONE, "nvfp4", gsm8k_plan.ONE.seeds
    shared = max(log.seconds for _, log in gsm8k_tables.pairs_of(*arm)) / 60
    row = gsm8k_tables.arm_row(*arm)
    short, long = tables.whole_steps().values()
    bf16, qlora, bf16_long = (
        group[other]["step_s"] / group["nvfp4"]["step_s"]
        for group, other in ((short, "bf16"), (short, "hf-nf4"), (long, "bf16"))
    )
    capped = tables.long_steps()["7b", 24.2]
    planner = (ROOT / "docs/planner.md").read_text()
    (seconds,) = re.findall(r"\| 7B \|.*\| (\d+) \|$", planner, re.M)
    assert round(max(whole)) == round(min(whole)) == 3
    for sentence in (
        "In about 3 minutes after the download this teaches SmolLM2-135M-Instruct the times table",
        f"from {before:.2f} to {after:.2f} of held-out products",
        f"Alone on an H100 this took {minutes} with `--seed` 0, 1 and 2, and the accuracy rose "
        f"from {alone[0]['before']['eval_greedy']:.2f} to "
        + "{:.2f}, {:.2f} and {:.2f}".format(*learned),
        f"It used {peaks.pop()} GB",
        f"whole step of the 7B {bf16:.2f} times as fast as our bf16, and {qlora:.2f} times as fast",
        f"Here it takes {bf16:.2f} and {qlora:.2f} times as long with answers of about 150 tokens",
        f"of 2,100 tokens {bf16_long:.2f} times in bf16",
        f"a step of {capped['samples']} answers of {capped['new']:,} tokens in "
        f"{capped['step_s']:.0f} s",
        f"took at most {shared:.0f} minutes, because four or five shared an H100",
        f"{float(row['peak GB']):.0f} GB each",
        f"about {600 * int(seconds) / 3600:.0f} hours on an H200 if answers have 500 tokens (600 "
        f"steps of 128 answers, {seconds} s each)",
        f"200 steps to take about {200 * int(seconds) / 3600:.0f} hour",
    ):
        assert sentence in TEXT, sentence
    assert not peaks


def test_the_records_of_the_speedrun_are_those_of_their_logs():
    page = (ROOT / "experiments/SPEEDRUN.md").read_text()
    records = page.split("## Records")[1].split("## Attempts")[0]
    names = re.findall(r"results/speedrun/([\w-]+)\)", records)
    assert "readme" in names
    medians = []
    for name in names:
        runs = tables.read(f"speedrun/{name}/times.jsonl")
        seconds = [round(run["seconds"]) for run in runs]
        row = "| **{}** ({}) | {} |".format(
            statistics.median(seconds),
            ", ".join(map(str, seconds)),
            ", ".join(f"{run['accuracy']:.3f}" for run in runs),
        )
        assert row in records
        medians.append(statistics.median(seconds))
        assert all(run["accuracy"] >= 0.68 and run["problems"] == 1319 for run in runs)
    assert f"[{min(medians)} seconds](experiments/SPEEDRUN.md)" in TEXT


def test_the_rates_of_a_newer_vllm_are_those_of_the_log():
    _, rates = tables.peers("peers25_bench.jsonl")
    runs = {run for run, _ in rates}
    assert len(runs) == 6
    for run in runs:
        theirs = rates[run, "vllm/nvfp4/none/1"]
        for batch, [ours] in rates[run, "ours/nvfp4"].items():
            [rate] = theirs[batch]
            assert f"| {ours:,.0f} | {rate:,.0f} | ×{ours / rate:.2f} |" in TEXT


def test_the_accuracy_of_vllms_8_bit_cache_is_that_of_the_log():
    runs = {run["kv"]: run for run in tables.read("kv8_vllm.jsonl")}
    for kv, name in (("auto", "bf16"), ("fp8", "e4m3")):
        row = f"| {name} | {runs[kv]['accuracy']:.3f} | {runs[kv]['finished']:.3f} |"
        assert row.replace("0.", ".") in TEXT
        assert runs[kv]["problems"] == 1319
