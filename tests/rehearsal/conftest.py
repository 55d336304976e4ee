"""Cells are carried out, and leave nothing."""

import matplotlib.pyplot as plt
import pytest

from labkit.lab import notebook, project


@pytest.fixture(autouse=True)
def _nothing_is_shown_or_written(monkeypatch, tmp_path):
    monkeypatch.setattr(notebook, "display", lambda *_, **__: None)
    monkeypatch.setattr(project, "figures_directory", lambda: tmp_path)
    yield
    plt.close("all")
