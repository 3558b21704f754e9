"""README.md and results/LOG.md: each current table equals what its script makes of its log."""

import re

import pytest
from command import ROOT

from bench import tables
from experiments import gsm8k_plan, gsm8k_tables

TEXT = " ".join(((ROOT / "README.md").read_text() + (ROOT / "results/LOG.md").read_text()).split())


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


def test_each_interval_that_readme_and_the_log_quote_stands_in_a_table():
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
    """Each sentence is made from its log, as README has it."""
    runs = tables.quickstarts()
    before, after = (runs[0][when]["eval_greedy"] for when in ("before", "after"))
    whole = [run["minutes"] for run in runs]
    alone = tables.seconds_of_a_step("1.5b-nvfp4")
    (test,) = tables.read("qwen/1.5b-test.jsonl")
    arm = gsm8k_plan.LOGS, gsm8k_plan.ONE, "nvfp4", gsm8k_plan.ONE.seeds
    shared = max(log.seconds for _, log in gsm8k_tables.pairs_of(*arm)) / 60
    row = gsm8k_tables.arm_row(*arm)
    load = re.search(r"loaded in (\d+) s", (tables.LOGS / "qwen/1.5b-nvfp4.txt").read_text())
    minutes = (100 * alone + 2 * test["rollout_s"] + int(load[1])) / 60
    (seconds,) = re.findall(r"\| 7B \|.*\| (\d+) \|$", (ROOT / "README.md").read_text(), re.M)
    assert round(max(whole)) == round(min(whole)) == 3
    for sentence in (
        "In about 3 minutes this teaches SmolLM2-135M-Instruct the times table",
        f"from {before:.2f} to {after:.2f} of held-out products",
        f"Alone on an H100 we expect {minutes:.0f} minutes: 100 steps of {alone:.1f} s, two "
        f"tests of {test['rollout_s']:.0f} s",
        f"took at most {shared:.0f} minutes, because four or five shared an H100",
        f"{float(row['peak GB']):.0f} GB each",
        f"about {600 * int(seconds) / 3600:.0f} hours on an H200 if answers have 500 tokens (600 "
        f"steps of 128 answers, {seconds} s each)",
    ):
        assert sentence in TEXT, sentence
