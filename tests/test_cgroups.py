"""Limits and kills read from made-up cgroup files, of both versions, at any depth, whole or not."""

import psutil
import pytest

from labkit.machine import cgroups, description
from labkit.machine.cgroups import (
    available_memory_bytes,
    memory_limit_bytes,
    oom_kills,
    quota_cores,
    throttled_periods,
)

MIB = 2**20
UNLIMITED_1 = 9223372036854771712
CFS = "cpu/t/cpu.cfs_"


def tree(root, cgroup, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, content in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return root


def version_1(folder, limit, used, kills, cache=0):
    return {
        f"memory/{folder}memory.limit_in_bytes": limit,
        f"memory/{folder}memory.usage_in_bytes": used,
        f"memory/{folder}memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}",
        f"memory/{folder}memory.stat": (
            f"inactive_file 1\ntotal_active_file 2\ntotal_inactive_file {cache}"
        ),
    }


def version_2(folder, limit, used, kills, cache=0):
    return {
        f"{folder}memory.max": limit,
        f"{folder}memory.current": used,
        f"{folder}memory.events": (
            f"low 0\nhigh 0\nmax 7\noom 5\noom_kill {kills}\noom_group_kill 9"
        ),
        f"{folder}memory.stat": f"anon 3\ninactive_file {cache}\nworkingset 4",
    }


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/job/step\n", version_2("job/step/", 300 * MIB, 200 * MIB, 4, 10 * MIB)),
        (
            "5:memory:/job/step\n4:cpu:/\n0::/\n",
            version_1("job/step/", 300 * MIB, 200 * MIB, 4, 10 * MIB),
        ),
        # a container that knows its host's path, and sees its own cgroup at the top
        ("0::/docker/abc\n", version_2("", 300 * MIB, 200 * MIB, 4, 10 * MIB)),
        ("5:memory:/docker/abc\n", version_1("", 300 * MIB, 200 * MIB, 4, 10 * MIB)),
        # the limit is that of the job, above the step; its own cgroup counts the kills
        (
            "0::/job/step\n",
            version_2("job/", 300 * MIB, 200 * MIB, 8, 10 * MIB)
            | version_2("job/step/", "max", 100 * MIB, 4),
        ),
        (
            "5:memory:/job/step\n",
            version_1("job/", 300 * MIB, 200 * MIB, 0, 10 * MIB)
            | version_1("job/step/", UNLIMITED_1, 100 * MIB, 4),
        ),
    ],
)
def test_memory_limit_kills_and_available_memory_in_either_version(tmp_path, cgroup, files):
    root = tree(tmp_path, cgroup, files)
    assert (memory_limit_bytes(root), available_memory_bytes(root), oom_kills(root)) == (
        300 * MIB,
        110 * MIB,
        4,
    )


@pytest.mark.parametrize(
    ("cgroup", "files", "kills"),
    [
        ("0::/\n", {}, None),
        ("5:memory:/\n", {}, None),
        ("0::/job\n", version_2("job/", "max", 100 * MIB, 0), 0),
        ("5:memory:/job\n", version_1("job/", UNLIMITED_1, 100 * MIB, 0), 0),
        (
            "0::/job\n",
            version_2("job/", "max", 100 * MIB, 0) | {"job/memory.events": "low 0"},
            None,
        ),
        ("5:cpu,memory_of_another:/job\n", version_1("job/", 300 * MIB, 0, 1), None),
    ],
)
def test_without_a_limit_there_is_the_memory_of_the_machine(tmp_path, cgroup, files, kills):
    root = tree(tmp_path, cgroup, files)
    assert memory_limit_bytes(root) is None
    assert 0.5 < available_memory_bytes(root) / psutil.virtual_memory().available < 2
    assert oom_kills(root) == kills


def test_more_used_than_allowed_leaves_nothing_and_without_proc_there_is_no_cgroup(tmp_path):
    assert (
        available_memory_bytes(tree(tmp_path, "0::/job\n", version_2("job/", MIB, 2 * MIB, 0))) == 0
    )
    nowhere = tmp_path / "nowhere"
    assert (memory_limit_bytes(nowhere), oom_kills(nowhere), quota_cores(nowhere)) == (
        None,
        None,
        None,
    )
    assert available_memory_bytes(nowhere) > 0


@pytest.mark.parametrize(
    ("cgroup", "files", "cores", "periods"),
    [
        (
            "0::/job",
            {"job/cpu.max": "50000 100000", "job/cpu.stat": "nr_periods 9\nnr_throttled 4"},
            0.5,
            (4, 9),
        ),
        ("0::/job", {"job/cpu.max": "max 100000", "cpu.max": "300000 100000"}, 3.0, (0, 0)),
        # a container sees itself as the topmost
        ("0::/elsewhere/job", {"cpu.max": "150000 100000"}, 1.5, (0, 0)),
        (
            "4:memory:/m\n1:cpu,cpuacct:/t",
            {CFS + "quota_us": "50000", CFS + "period_us": "100000"},
            0.5,
            (0, 0),
        ),
        ("1:cpu:/t", {CFS + "quota_us": "-1", CFS + "period_us": "100000"}, None, (0, 0)),
        ("0::/", {}, None, (0, 0)),
    ],
)
def test_a_cpu_quota_is_read_in_both_versions(tmp_path, cgroup, files, cores, periods):
    root = tree(tmp_path, cgroup, files)
    assert (quota_cores(root), throttled_periods(root)) == (cores, periods)


@pytest.mark.parametrize(
    ("quota", "cores", "text"),
    [
        (0.5, 1, "1 core available (a CPU quota allows 0.5 cores"),
        (3.5, 3, "3 cores available (a CPU quota allows 3.5 cores"),
        (10.0, 8, "8 cores available (a CPU quota allows 10 cores"),
        (None, 8, "8 cores available"),
    ],
)
def test_a_cpu_quota_limits_the_cores(monkeypatch, quota, cores, text):
    for module in (cgroups, description):
        monkeypatch.setattr(module, "quota_cores", lambda: quota)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    machine = description.describe_machine.__wrapped__()
    assert machine.cores == cgroups.available_cores() == cores
    assert machine.cores_text.startswith(text)
