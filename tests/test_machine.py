"""The machine as it describes itself; nothing about an unknown device is made up."""

import os
import shutil
import subprocess

import pytest

from labkit import __version__
from labkit.machine import Source, available_memory_bytes
from labkit.machine import description as machine
from labkit.machine.source import describe_source


def test_this_machine_is_described():
    here = machine.describe_machine()
    assert here.cores >= 1
    assert here.memory_bytes >= available_memory_bytes() > 0
    assert here.versions["torch"]
    assert here.slug.replace("-", "").isalnum()


def test_known_devices_have_their_own_peak_and_unknown_ones_none():
    assert machine.dense_bf16_peak_tflops("NVIDIA H100 PCIe") == 756
    assert machine.dense_bf16_peak_tflops("NVIDIA H100 80GB HBM3") == 989
    assert machine.dense_bf16_peak_tflops("NVIDIA H200") == 989
    assert machine.dense_bf16_peak_tflops("NVIDIA A100-SXM4-80GB") == 312
    assert machine.dense_bf16_peak_tflops("NVIDIA GeForce RTX 4090") == 165
    for near in ("A Graphics Card", "NVIDIA H100 NVL", "NVIDIA GB200", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        assert machine.dense_bf16_peak_tflops(near) is None


def test_a_package_that_is_not_installed_has_no_version():
    assert machine._version("no-such-package-at-all") is None


def _git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def package(tmp_path):
    """A package of two modules in a checkout of its own."""
    folder = tmp_path / "checkout" / "package"
    (folder / "part").mkdir(parents=True)
    for name in ("__init__.py", "part/module.py"):
        (folder / name).write_text("value = 1\n")
    (folder.parent / "notebook.ipynb").write_text("{}")
    _git(folder.parent, "init", "--quiet")
    _git(folder.parent, "add", ".")
    _git(folder.parent, "commit", "--quiet", "--message", "first")
    return folder


def test_only_modules_make_local_changes(package):
    clean = describe_source(package)
    assert clean.commit
    assert (clean.dirty, clean.version) == (False, __version__)
    (package.parent / "notebook.ipynb").write_text('{"cells": []}')
    (package.parent / "out.ipynb").write_text("{}")
    shutil.copytree(package, package.parent / "build" / "lib")
    assert describe_source(package) == clean
    (package / "part" / "new.py").write_text("")
    new = describe_source(package)
    assert new.dirty
    assert not new.is_same_as(clean)
    (package / "part" / "new.py").unlink()
    (package / "part" / "module.py").write_text("value = 2\n")
    changed = describe_source(package)
    assert changed.dirty
    assert changed.digest not in (clean.digest, new.digest)


def test_an_installed_package_is_the_same_source_and_has_no_commit(package, tmp_path):
    """Also where its environment stands in a checkout that is somebody's own."""
    (package.parent / ".gitignore").write_text(".venv/")
    for folder in (tmp_path / "package", package.parent / ".venv" / "package"):
        installed = describe_source(shutil.copytree(package, folder))
        assert installed.commit is None
        assert installed.is_same_as(describe_source(package))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_the_checkout_of_another_owner_has_its_commit(package):
    mine = describe_source(package)
    for path in (package.parent, *package.parent.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    assert describe_source(package) == mine


def test_sources_of_older_runs_are_the_same_if_their_clean_commits_are():
    older = Source(commit="abc")
    assert older.is_same_as(Source(commit="abc", digest="12"))
    assert not older.is_same_as(Source(commit="abc", dirty=True))
    assert not older.is_same_as(Source(commit="def"))
    assert not Source().is_same_as(Source())
