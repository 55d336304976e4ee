"""Labs measured across hosts by torchrun, with the commands of the docs."""

import os
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from labkit.lab.pages.record import provenance_rows
from labkit.lab.project import checkout
from labkit.lab.runs.store import Run
from labkit.studies import load_lab
from tests.commands import labkit
from tests.hosts.network import HOSTS_FILES, Network, why_no_hosts

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))

# The first `python` and `torchrun` are those of this environment, and find this checkout. The docs
# want the interface named, since each host's name stands for a loopback address.
ENVIRONMENT = os.environ | {
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(checkout()),
}


def measured(lab, network, commands, directory, **variables):
    """Run a command on every host at once; return the one run that it wrote below `directory`."""
    # others measure several hosts, too
    environment = ENVIRONMENT | {"LABKIT_HOME": str(directory)} | variables
    ended = network.run_on_all(commands, timeout_s=900, env=environment, cwd=checkout())
    assert [status for status, _ in ended.values()] == [0] * len(commands), ended
    (path,) = directory.glob(f"data/runs/{lab}/*.jsonl")
    return Run.load(path)


def readme_commands():
    """The shell blocks of the README's section on several machines."""
    section = (checkout() / "docs" / "several-machines.md").read_text()
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)


@pytest.mark.faults
def test_the_commands_for_two_machines_as_the_readme_has_them(tmp_path):
    command, _, draw = readme_commands()
    with Network() as network:
        run = measured("all_reduce", network, dict.fromkeys(network.names, command), tmp_path)
    assert run.header.ranks_by_host == {"node-a": [0, 1], "node-b": [2, 3]}
    coverage = run.coverage()
    gloo = coverage[coverage["backend"] == "gloo"]
    assert set(gloo.loc[gloo["world_size"] == 4, "status"]) == {"ok"}
    assert all("this job has 4" in reason for reason in gloo.loc[gloo["world_size"] != 4, "reason"])
    frame = run.frame()
    routes = frame[frame["sweep"] == "transports"].query("status == 'refused'")
    assert set(routes["transport"]) == {"shared"}
    assert all("the ranks are on several hosts" in reason for reason in routes["reason"])
    study = load_lab("all_reduce")
    assert "ranks 0, 1 on node-a; ranks 2, 3 on node-b" in provenance_rows(study, run)["Hosts"]
    drawn = labkit(*shlex.split(draw)[1:-1], str(run.path), "--output", str(tmp_path / "pages"))
    assert drawn.returncode == 0, drawn.stderr
    page = (tmp_path / "pages" / "all_reduce.html").read_text()
    assert "ranks 0, 1 on node-a" in page


@pytest.mark.faults
def test_the_slurm_script_of_the_readme_with_every_node_that_srun_would_start(tmp_path):
    _, script, _ = readme_commands()
    (tmp_path / "job.sh").write_text(script)
    for name, line in {"srun": 'exec "$@"', "scontrol": "printf 'node-a\\nnode-b\\n'"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]"}
    lab = "data_parallel --profile smoke --set warmup=0"
    with Network() as network:
        commands = dict.fromkeys(
            network.names, f"PATH={tmp_path}:$PATH bash {tmp_path}/job.sh {lab}"
        )
        run = measured("data_parallel", network, commands, tmp_path, **variables)
    assert set(run.coverage()["status"]) == {"ok"}
    assert run.header.ranks_by_host == {"node-a": [0], "node-b": [1]}


def test_hosts_are_gone_when_their_test_is_over_however_it_ends():
    network = Network()
    namespaces = [Path("/run/netns") / name for name in network.namespaces.values()]
    with suppress(KeyboardInterrupt), network:
        assert all(path.exists() for path in namespaces)
        raise KeyboardInterrupt
    assert not any(path.exists() or (HOSTS_FILES / path.name).exists() for path in namespaces)
