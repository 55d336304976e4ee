"""The Makefile's environment: made again where it was moved, and left alone everywhere else."""

import shutil
import subprocess

import pytest

from labkit.lab.project import project_root


@pytest.fixture
def checkout(tmp_path):
    """The Makefile, and an environment that counts as whole and newer than everything."""
    folder = tmp_path / "a checkout"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").write_text(f'VIRTUAL_ENV="{folder / ".venv"}"\n')
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(project_root() / name, folder)
    for name in ("bin/python", "installed"):
        (folder / ".venv" / name).touch()
    return folder


def _planned(folder, *goals):
    """What make would do."""
    command = ["make", "--dry-run", "CONSTRAINTS=", *goals]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_an_environment_is_made_once(checkout):
    planned = _planned(checkout, "report")
    assert "-m venv" not in planned
    assert "labkit report" in planned


def test_an_environment_that_was_moved_is_made_again(checkout):
    moved = checkout.rename(checkout.parent / "moved")
    assert "rm -rf" not in _planned(moved, "help")
    planned = _planned(moved, "report")
    assert planned.index("rm -rf .venv") < planned.index("-m venv") < planned.index("pip install")
    assert (moved / ".venv" / "installed").exists()  # a dry run takes nothing away


def test_an_environment_that_make_did_not_make_is_left_alone(checkout):
    moved = checkout.rename(checkout.parent / "moved")
    (moved / ".venv" / "installed").unlink()
    assert "rm -rf .venv\n" not in _planned(moved, "report")
