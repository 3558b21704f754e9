"""docs/evening.md as a notebook, docs/evening.ipynb: text in cells of Markdown, commands in cells
of bash with what they print.

python -m docs.notebook

tests/test_evening.py compares the two, so run this after each change of the page.
"""

import json
import re
from pathlib import Path

PAGE = Path(__file__).parent / "evening.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
BLOCK = re.compile(r"```bash\n(.*?)```\n```text\n(.*?)```\n", re.S)
# Jupyter starts in docs/; the commands are the page's, from the root.
ROOT_CELL = "import os\n\nos.chdir(os.popen('git rev-parse --show-toplevel').read().strip())"


def cell(kind, number, source, **more):
    lines = source.strip("\n").splitlines(keepends=True)
    return dict(cell_type=kind, id=f"cell-{number}", metadata={}, source=lines, **more)


def code(number, source, printed=""):
    outputs = []
    if printed:
        text = printed.splitlines(keepends=True)
        outputs.append(dict(output_type="stream", name="stdout", text=text))
    return cell("code", number, source, execution_count=None, outputs=outputs)


def notebook(page):
    """The page's text → the notebook's."""
    # With two groups in BLOCK the pieces take turns: text, command, printed, text, …
    pieces = BLOCK.split(page)
    cells = [code(0, ROOT_CELL)]
    for i in range(0, len(pieces), 3):
        cells.append(cell("markdown", len(cells), pieces[i]))
        if i + 2 < len(pieces):
            cells.append(code(len(cells), f"%%bash\n{pieces[i + 1]}", pieces[i + 2]))
    kernel = dict(display_name="Python 3", language="python", name="python3")
    made = dict(cells=cells, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text()))
