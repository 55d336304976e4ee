"""The Makefile's environment: made again where it was moved, and left alone everywhere else."""

import re
import shutil
import subprocess
import tomllib

import pytest

from labkit.lab import project


@pytest.fixture
def checkout(tmp_path):
    """The Makefile, and an environment that counts as whole and newer than everything."""
    folder = tmp_path / "a checkout"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").write_text(f'VIRTUAL_ENV="{folder / ".venv"}"\n')
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(project.checkout() / name, folder)
    for name in ("bin/python", "installed"):
        (folder / ".venv" / name).touch()
    return folder


def _planned(folder, *goals):
    """What make would do."""
    command = ["make", "--dry-run", "CONSTRAINTS=", *goals]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_an_environment_is_made_once_and_again_where_it_was_moved(checkout):
    planned = _planned(checkout, "report")
    assert "-m venv" not in planned
    assert "labkit report" in planned
    moved = checkout.rename(checkout.parent / "moved")
    assert "rm -rf" not in _planned(moved, "help")
    planned = _planned(moved, "report")
    assert planned.index("rm -rf .venv") < planned.index("-m venv") < planned.index("pip install")
    # torch alone takes a minute: whoever waits sees what for
    assert not re.search(r"pip install.* (-q|--quiet)", planned)
    assert (moved / ".venv" / "installed").exists()  # a dry run takes nothing away


def test_the_oldest_versions_are_the_least_that_are_allowed():
    required = tomllib.loads((project.checkout() / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    least = {
        name: bounds.partition(",")[0]
        for line in required
        for name, _, bounds in [line.partition(";")[0].partition(">=")]
    }
    tested = re.findall(
        r"^(\w+)==(.*)\.\*$", (project.checkout() / ".ci" / "oldest.txt").read_text(), flags=re.M
    )
    assert dict(tested) == {name: least[name] for name in ("torch", "triton")}
