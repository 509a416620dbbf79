"""The server under load: what every connection needs so that its pieces are sent at once."""

from __future__ import annotations

import socket

from .conftest import wait_until


def test_a_piece_is_not_held_back_until_the_one_before_is_acknowledged(serve):
    server = serve()
    with socket.create_connection(server.socket.getsockname()):
        wait_until(lambda: server.server.server_state.connections)
        [protocol] = server.server.server_state.connections
        accepted = protocol.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
