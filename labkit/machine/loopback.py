"""The loopback interface, through which ranks and kernels of one machine talk."""

import socket

CONNECT_S = 2.0


def no_loopback_reason() -> str | None:
    """Return why this machine cannot connect to itself, or None."""
    # Some containers have no network at all.
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
