"""Which ranks share a host, and which interface leads to the others."""

import pytest

from labkit.parallel.ranks import network_interface as interface
from labkit.parallel.ranks.hosts import host_identity, label_hosts
from labkit.parallel.ranks.network_interface import GLOO_INTERFACE, choose_gloo_interface, interface_of, source_address


def test_ranks_are_grouped_by_host_and_hosts_of_one_name_told_apart():
    assert label_hosts([("a", "11"), ("a", "11"), ("b", "22")]) == {"a": [0, 1], "b": [2]}
    assert label_hosts([("c", "123456"), ("c", "abcdef"), ("c", "123456")]) == {"c-1234": [0, 2], "c-abcd": [1]}
    assert host_identity() == host_identity()


def test_loopback_is_found_by_route_and_address():
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == interface.LOOPBACK
    assert source_address("no-such-host.invalid") == ""
    assert interface_of("203.0.113.1") is None


class _Store(dict):
    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]


@pytest.fixture
def job(monkeypatch):
    """A job of two nodes, of whose addresses there is one a name."""
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "master")
    sources = {"master": "10.0.0.1", "10.0.0.2": "10.0.0.1"}
    monkeypatch.setattr(interface, "source_address", lambda host: sources[host])
    monkeypatch.setattr(interface, "interface_of", {"10.0.0.1": "eth7", "127.0.1.1": "lo"}.get)
    return sources


def chosen(store, ranks_here=1):
    return choose_gloo_interface(store, 0, 2, ranks_here)


def test_the_interface_that_routes_to_the_master_is_used(job):
    assert chosen(_Store()) == "eth7"


def test_a_master_whose_name_is_its_loopback_looks_for_the_others(job):
    job["master"] = "127.0.1.1"
    assert chosen(_Store({"labkit/address of rank 1": b"10.0.0.2"})) == "eth7"
    assert chosen(_Store({"labkit/address of rank 1": b""})) is None  # gloo may know better


def test_a_choice_that_was_made_stands_and_one_machine_uses_its_loopback(job, monkeypatch):
    store = _Store()
    monkeypatch.setenv(GLOO_INTERFACE, "ib0")
    assert chosen(store) == "ib0"
    assert store["labkit/address of rank 0"] == b"10.0.0.1"  # for others, who may wait for it
    assert chosen(store, ranks_here=2) == "ib0"
    monkeypatch.delenv(GLOO_INTERFACE)
    assert chosen(store, ranks_here=2) == interface.LOOPBACK
