"""The machine as it describes itself; nothing about an unknown device is made up."""

import os
import shutil
import subprocess

import pytest

from labkit import __version__
from labkit.machine.cgroups import available_memory_bytes
from labkit.machine.description import describe_machine
from labkit.machine.source import describe_source


def test_this_machine_is_described():
    machine = describe_machine()
    assert machine.cores >= 1
    assert machine.memory_bytes >= available_memory_bytes() > 0
    assert machine.versions["torch"]
    assert machine.slug.replace("-", "").isalnum()


SOURCES = ("part/module.py", "part/table.csv", "part/code.cpp")


@pytest.fixture
def package(tmp_path):
    """A package in a checkout: two modules, a table and C++ code."""
    folder = tmp_path / "checkout" / "package"
    (folder / "part").mkdir(parents=True)
    for name in ("__init__.py", *SOURCES):
        (folder / name).write_text("value = 1\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (
        ["init", "--quiet"],
        ["add", "."],
        ["commit", "--quiet", "--message", "first"],
    ):
        subprocess.run(
            ["git", "-C", str(folder.parent), *identity, *arguments],
            check=True,
            capture_output=True,
        )
    return folder


def test_only_what_a_measurement_executes_or_reads_makes_local_changes(package):
    clean = describe_source(package)
    assert (bool(clean.commit), clean.dirty, clean.version) == (True, False, __version__)
    (package.parent / "notebook.ipynb").write_text('{"cells": []}')
    shutil.copytree(package, package.parent / "build" / "lib")
    assert describe_source(package) == clean
    digests = {clean.digest}
    for name in SOURCES:
        (package / name).write_text("value = 2\n")
        changed = describe_source(package)
        assert changed.dirty
        assert changed.digest not in digests
        digests.add(changed.digest)


def test_an_installed_package_is_the_same_source_and_has_no_commit(package, tmp_path):
    """Also if its environment is inside another checkout."""
    (package.parent / ".gitignore").write_text(".venv/")
    for folder in (tmp_path / "package", package.parent / ".venv" / "package"):
        installed = describe_source(shutil.copytree(package, folder))
        assert installed.commit is None
        assert installed.digest == describe_source(package).digest


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_the_checkout_of_another_owner_has_its_commit(package):
    source = describe_source(package)
    for path in (package.parent, *package.parent.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    assert describe_source(package) == source
