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
