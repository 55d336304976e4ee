"""labkit as pip installs it, without a checkout: the wheel holds all that its commands read."""

import subprocess
import sys
import zipfile

import pytest

from labkit.lab.project import checkout
from tests.commands import carry_out

BUILD = "from setuptools import build_meta; build_meta.build_wheel({!r})"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    copy = tmp_path_factory.mktemp("checkout")
    for name in (
        "labkit",
        "notebooks",
        "data/reference",
        "data/recorded",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    ):
        (copy / name).parent.mkdir(exist_ok=True)
        # links stay links
        subprocess.run(["cp", "-R", str(checkout() / name), str(copy / name)], check=True)
    subprocess.run(
        [sys.executable, "-c", BUILD.format(str(folder))], cwd=copy, check=True, capture_output=True
    )
    (found,) = folder.glob("*.whl")
    return zipfile.ZipFile(found)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Environment variables under which Python finds the contents of the wheel first."""
    folder = tmp_path_factory.mktemp("installed")
    wheel.extractall(folder)
    return {"PYTHONPATH": str(folder), "LABKIT_HOME": ""}


def test_a_wheel_holds_every_notebook_and_all_data(wheel):
    top = checkout()
    reference = [path for path in top.glob("data/reference/**/*") if path.is_file()]
    shipped = [*top.glob("notebooks/*.ipynb"), *reference, *top.glob("data/recorded/*/*.jsonl")]
    expected = {f"labkit/shipped/{path.relative_to(top)}" for path in shipped}
    assert {name for name in wheel.namelist() if name.startswith("labkit/shipped/")} == expected
    for name in expected:
        assert wheel.read(name) == (top / name.removeprefix("labkit/shipped/")).read_bytes()
    # what a machine with a compiler builds
    assert "labkit/parallel/transport/shared_memory.cpp" in wheel.namelist()


@pytest.mark.slow
def test_a_recorded_run_is_drawn_in_an_empty_folder(installed, tmp_path):
    (run,) = (checkout() / "data" / "recorded" / "attention").glob("*.jsonl")
    command = [sys.executable, "-m", "labkit", "report", "attention", "--run", run.stem]
    outcome = carry_out(command, tmp_path, installed)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert (
        f"data/recorded/attention/{run.name}"
        in (tmp_path / "reports" / "attention.html").read_text()
    )
    assert list((tmp_path / "figures" / "attention" / run.stem).glob("*.svg"))
