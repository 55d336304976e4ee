"""Network namespaces as hosts `node-a` and `node-b`: made, used, and removed again, whatever
happens.

Each has a host name, which for itself stands for a loopback address, as Debian sets it up, and for
the others for the real one: the case in which software that asks for its own name's address finds
nobody.
"""

import os
import shlex
import shutil
import subprocess
from contextlib import ExitStack
from functools import cache
from pathlib import Path

HOSTS_FILES = Path("/etc/netns")  # `ip netns exec` puts what lies here over /etc


@cache
def why_no_hosts():
    """Why this machine cannot have namespaces, or None."""
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    name = f"lk{os.getpid()}-probe"
    made = _try("ip", "netns", "add", name)
    if made is None:
        made = _try("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "p0")
        _try("ip", "netns", "del", name)
    return made and f"network namespaces cannot be made here: {made}"


class Network:
    """A context manager: two namespaces, joined by a switch."""

    def __init__(self):
        self.names = ["node-a", "node-b"]
        self.addresses = {
            name: f"10.77.0.{number}" for number, name in enumerate(self.names, start=1)
        }
        self.namespaces = {name: f"lk{os.getpid()}-{name[-1]}" for name in self.names}
        self._undo = ExitStack()

    def __enter__(self):
        with ExitStack() as undo:
            for name in self.names:
                self._make_host(name, undo)
            self._join(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_):
        self._undo.close()

    def start(self, host, command, **options):
        """A process on a host, with that host's name; `command` is a line for the shell."""
        script = f"hostname {host} && exec sh -c {shlex.quote(command)}"
        inside = [
            "ip",
            "netns",
            "exec",
            self.namespaces[host],
            "unshare",
            "--uts",
            "sh",
            "-c",
            script,
        ]
        return subprocess.Popen(
            inside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
        )

    def run_on_all(self, commands, *, timeout_s, **options):
        """The same moment on every host; what each printed and its exit status, by host."""
        running = {
            host: self.start(host, command, start_new_session=True, **options)
            for host, command in commands.items()
        }
        try:
            printed = {
                host: process.communicate(timeout=timeout_s)[0] for host, process in running.items()
            }
            return {host: (process.returncode, printed[host]) for host, process in running.items()}
        finally:
            for process in running.values():
                if process.poll() is None:
                    os.killpg(process.pid, 9)
                process.communicate()

    def _make_host(self, name, undo):
        namespace = self.namespaces[name]
        _run("ip", "netns", "add", namespace)
        undo.callback(_try, "ip", "netns", "del", namespace)
        folder = HOSTS_FILES / namespace
        folder.mkdir(parents=True)
        undo.callback(shutil.rmtree, folder)
        lines = [
            f"{'127.0.1.1' if other == name else address} {other}"
            for other, address in self.addresses.items()
        ]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self._in(name, "ip", "link", "set", "lo", "up")

    def _join(self, undo):
        switch = f"lk{os.getpid()}-s"
        _run("ip", "netns", "add", switch)
        undo.callback(_try, "ip", "netns", "del", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(self.names):
            port = f"port{number}"
            namespace = self.namespaces[name]
            _run(
                "ip",
                "-n",
                namespace,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                switch,
            )
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            self._in(name, "ip", "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            self._in(name, "ip", "link", "set", "eth0", "up")

    def _in(self, name, *command):
        _run("ip", "netns", "exec", self.namespaces[name], *command)


def _run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


def _try(*command):
    """What a command said when it failed, or None."""
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    return (
        None if result.returncode == 0 else result.stderr.strip() or f"status {result.returncode}"
    )
