"""The source of what a lab studies, in a notebook and on a page."""

from functools import partial

import pytest
from IPython.core.interactiveshell import InteractiveShell

from labkit.lab.pages.cards import PIECE_MIME
from labkit.lab.pages.source import render_source
from labkit.parallel.collectives import ALGORITHMS, ring_all_reduce


def test_a_functions_source_is_shown_with_its_docstring_folded_on_a_page():
    shown = render_source(ring_all_reduce)
    page = shown._repr_mimebundle_()[PIECE_MIME]["html"]
    for html in (page, shown.data):
        assert "<code>ring_all_reduce</code> (collectives.py, line " in html
        assert '<span class="sd">' in html  # its docstring, highlighted
    assert "<details" in page
    assert " open>" not in page
    assert "<style>" not in page
    assert "prefers-color-scheme: dark" in shown.data
    assert "def ring_all_reduce(" in repr(shown)


def test_what_wraps_a_function_shows_the_function_and_markup_in_it_is_text():
    def mine(tensor):
        return "</code><script>"

    assert "&lt;script&gt;" in render_source(partial(mine, 1)).data
    assert repr(render_source(ALGORITHMS["ring"].run)) == repr(render_source(ring_all_reduce))


def test_a_class_that_a_cell_defines_is_shown():
    shell = InteractiveShell()
    mine = "@dataclass\nclass Mine:\n    def forward(self):\n        return 1"
    shell.run_cell(f"from dataclasses import dataclass\nclass Other:\n    pass\n\n{mine}")
    shown = render_source(shell.user_ns["Mine"])
    assert repr(shown) == mine
    assert "this notebook" in shown.data


def test_what_has_no_source_is_refused():
    with pytest.raises(ValueError, match="expected a function or class written in Python"):
        render_source(len)
