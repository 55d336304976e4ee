"""A lab's notebook for a class: without the implementations, answers and solutions that a student is to find."""

import re

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell

from labkit.lab.config import ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.project import notebook_path

ANSWER = re.compile(r"^lab\.answer\(", re.MULTILINE)
SOURCE = re.compile(r"^lab\.source\(", re.MULTILINE)
CODE_BLOCK = re.compile(r"```python\n.*?```\n*", re.DOTALL)
SOLUTION = re.compile(r"<details><summary>(.*?)</summary>.*?</details>", re.DOTALL)
YOUR_ANSWER = "*Your answer, with the numbers it rests on:*"
OWN = """def mine(*arguments):
    raise NotImplementedError("write your own here")


# right, wrong (and where), fails or hangs, within seconds
lab.check(mine)
"""


def student_notebook(lab: Lab) -> nbformat.NotebookNode:
    """The shipped notebook of a lab, in which a student writes the alternative, the figures and the answers.

    ParameterError for a lab without a notebook.
    """
    try:
        notebook = nbformat.read(notebook_path(lab.name), as_version=4)
    except FileNotFoundError as error:
        raise ParameterError(str(error)) from None
    cells: list[nbformat.NotebookNode] = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and SOURCE.search(cell.source):
            if lab.plugin_parameter is not None and not any(one.source == OWN for one in cells):
                cells.append(new_code_cell(OWN))
        elif cell.cell_type == "code" and ANSWER.search(cell.source):
            cells.append(new_code_cell("frame = lab.run.frame()  # your figure and numbers"))
            cells.append(new_markdown_cell(YOUR_ANSWER))
        elif cell.cell_type == "markdown":
            cell.source = SOLUTION.sub(rf"**\1**\n\n{YOUR_ANSWER}", CODE_BLOCK.sub("", cell.source))
            cells.append(cell)
        else:
            cell.outputs = []
            cells.append(cell)
    notebook.cells = cells
    return nbformat.validator.normalize(notebook)[1]
