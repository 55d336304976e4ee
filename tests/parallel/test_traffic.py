"""What sockets say they have sent, while another thread closes files."""

import os
import socket
from pathlib import Path

import pytest

from labkit.parallel import traffic

pytestmark = pytest.mark.skipif(traffic.tcp_bytes_sent() is None, reason="the system does not say")


def test_bytes_are_those_of_the_sockets_that_are_still_open(monkeypatch, tmp_path):
    before = traffic.tcp_bytes_sent()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.sendall(bytes(1000))
        assert traffic.tcp_bytes_sent() - before == 1000
        with Path(os.devnull).open() as no_socket:
            closed = os.dup(no_socket.fileno())
            os.close(closed)
            # as it was listed, before another thread closed one and opened a file in the place of another
            for descriptor in (closed, no_socket.fileno(), client.fileno()):
                (tmp_path / str(descriptor)).symlink_to(f"/proc/self/fd/{client.fileno()}")
            monkeypatch.setattr(traffic, "OPEN_FILES", tmp_path)
            opened = len(list(Path("/proc/self/fd").iterdir()))
            assert traffic.tcp_bytes_sent() == 1000
            assert len(list(Path("/proc/self/fd").iterdir())) == opened
