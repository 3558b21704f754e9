"""Empty a function of docs/exercises.md, so that its reader does not see it first.

python -m docs.empty NAME         for example grpo.advantages

The `def` line and the docstring stay, and are printed. `git checkout FILE` brings the rest back. A
function with code of your own that is not committed is refused.
Needs: git, to tell your code from ours.
"""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).with_name("exercises.md")
EMPTY = "raise NotImplementedError"


def names() -> list[str]:
    """→ the page's functions, each as module.function or module.Class.method."""
    return re.findall(r"^Empty `([\w.]+)`", PAGE.read_text(), re.M)


def _find(code, path):
    """→ the syntax tree of the function with these names, a class before its method."""
    node = ast.parse(code)
    for name in path:
        node = next(n for n in node.body if getattr(n, "name", None) == name)
    return node


def with_body(code: str, path: list[str], body: str = EMPTY) -> str:
    """→ the code, in which the function of these names has another body. Its docstring stays."""
    function = _find(code, path)
    first = function.body[1 if ast.get_docstring(function) else 0]
    lines = code.splitlines(keepends=True)
    body = textwrap.indent(body.strip("\n") + "\n", " " * first.col_offset)
    return "".join([*lines[: first.lineno - 1], body, *lines[function.end_lineno :]])


def main(name: str = "", *more: str):
    if name not in names() or more:
        sys.exit(f"{' '.join([name, *more]) or 'no name'}: give one of {', '.join(names())}")
    module, *path = name.split(".")
    file = ROOT / f"{module}.py"
    before = file.read_text()
    show = ["git", "-C", str(ROOT), "show", f"HEAD:./{file.name}"]
    try:
        ours = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        ours = before  # without git we cannot tell
    try:
        code = with_body(before, path)
        found, original, empty = (ast.dump(_find(text, path)) for text in (before, ours, code))
    except (StopIteration, SyntaxError):
        sys.exit(
            f"{file.name} is no Python, or has no {name}: mend it, or copy your code, then "
            f"git checkout {file.name}"
        )
    if found not in (original, empty):
        sys.exit(f"{name} has code of your own: copy it, then git checkout {file.name}")
    file.write_text(code)
    print(f"{file.name} now has\n")
    print(ast.get_source_segment(code, _find(code, path), padded=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
