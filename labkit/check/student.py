"""A lab's notebook for a class: the task instead of implementations, answers and solutions."""

import copy
import re
from collections.abc import Iterator
from typing import Any

from nbformat.v4 import new_code_cell, new_markdown_cell
from nbformat.validator import normalize

from labkit.lab.answers import Check
from labkit.lab.declaration import Lab

# A suggestion with a solution's code, and what is to be done with it: up to the end of a cell.
TRY = re.compile(r"^\*Try\b[^*]*:\*.*\Z", re.DOTALL | re.MULTILINE)
CODE_BLOCK = re.compile(r"```python\n.*?```\n*", re.DOTALL)
SOLUTION = re.compile(r"<details><summary>(.*?)</summary>.*?</details>", re.DOTALL)
# A last paragraph that ends with a colon and announces the cell below.
LEAD_IN = re.compile(r"(?:\A|\n\n)[^\n]+(?:\n[^\n]+)*:\s*\Z")
# The other notebooks are not in the folder of a student's.
LINK = re.compile(r"\[([^\]]*)\]\(\d\d_\w+\.ipynb\)")
SHOWS_SOURCE = re.compile(r"^lab\.source\(", re.MULTILINE)
ANSWERS = re.compile(r'^lab\.answer\("(\w+)"\)', re.MULTILINE)

YOUR_ANSWER = "*Your answer, with the numbers it rests on:*"
OWN_FIGURE = "frame = lab.run.frame()  # your figure and numbers"
CHECK = """# right, wrong (and where), fails, hangs (and which rank waits), or not allowed
lab.check(mine)
"""
TASK = """## Your task: {name}

{text}

* **Write** `mine`, in the cell below; keep its signature.
* **Allowed:** {may_call}
* **Checked** by `lab.check(mine)`, within seconds; then `lab.measure({{"mine": mine}})` times it.
* **Hand in** the verdict, the newest run and this notebook:
  `labkit hand-in "YOUR NAME" {lab} --notebook {lab}.ipynb`
"""
QUESTIONS = """## Your task: {title}

Measure this machine, and answer each question below with its numbers. Hand in the newest run and
this notebook: `labkit hand-in "YOUR NAME" {lab} --notebook {lab}.ipynb`
"""


def student_notebook(notebook: Any, lab: Lab) -> Any:
    """Return a copy of the lab's notebook with the task instead of what the student writes."""
    result = copy.deepcopy(notebook)
    cells = list[Any]()
    for cell in result.cells:
        cells += _student_cells(cell, lab, cells)
    # Right behind the cell that opens the lab, which the task's code uses.
    setup = next(index for index, cell in enumerate(cells) if "open_lab(" in cell.source)
    cells[setup + 1 : setup + 1] = _task_cells(lab)
    result.cells = _without_empty_sections(cells)
    return normalize(result)[1]


def _student_cells(cell: Any, lab: Lab, before: list[Any]) -> list[Any]:
    """Return what stands in the place of a cell; `before` are the cells above it."""
    if cell.cell_type == "markdown":
        text = cell.source
        if CODE_BLOCK.search(text):
            text = CODE_BLOCK.sub("", TRY.sub("", text))
        text = LINK.sub(r"\1", text)
        cell.source = SOLUTION.sub(rf"**\1**\n\n{YOUR_ANSWER}", text).strip()
        return [cell] if cell.source else []
    cell.outputs = []
    if SHOWS_SOURCE.search(cell.source):
        # The text that announces the source of an implementation goes with it.
        if before and before[-1].cell_type == "markdown":
            before[-1].source = LEAD_IN.sub("", before[-1].source)
            if not before[-1].source:
                before.pop()
        return []
    questions = ANSWERS.findall(cell.source)
    if questions:
        return list(_answer_cells(lab, questions))
    return [cell]


def _answer_cells(lab: Lab, ids: list[str]) -> Iterator[Any]:
    """Yield a cell for a figure, the guesses if the question is on predictions, and the answer."""
    yield new_code_cell(OWN_FIGURE)
    for name in ids:
        if isinstance(lab.question(name), Check):
            yield new_code_cell(f'lab.guesses("{name}")')
    yield new_markdown_cell(YOUR_ANSWER)


def _task_cells(lab: Lab) -> list[Any]:
    if lab.task is None:
        return [new_markdown_cell(QUESTIONS.format(title=lab.title, lab=lab.name))]
    task = lab.task
    text = TASK.format(name=task.name, text=task.text, may_call=task.may_call, lab=lab.name)
    return [new_markdown_cell(text), new_code_cell(task.stub), new_code_cell(CHECK)]


def _without_empty_sections(cells: list[Any]) -> list[Any]:
    """Leave out headings that nothing follows but another heading or the end."""
    result = list[Any]()
    for cell in reversed(cells):
        is_bare = cell.cell_type == "markdown" and re.fullmatch(r"#+ [^\n]*", cell.source.strip())
        # The next cell that is left, as they are read from the end.
        following = result[0] if result else None
        ends_here = following is None or (
            following.cell_type == "markdown" and following.source.startswith("#")
        )
        if not (is_bare and ends_here):
            result.insert(0, cell)
    return result
