"""A server that speaks HTTP/2 and nothing else, over plain TCP, as clients with prior knowledge ask it."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RequestReceived
from h2.settings import SettingCodes, Settings


class H2Server:
    """Serves inside `with`, on loopback. `arrived` has the path of each request, over all connections. A request for
    `/last` is answered once `ends` is set, and a GOAWAY ends its connection. `streams` may be under way at once."""

    def __init__(self, streams: int = 100) -> None:
        self._streams = streams
        self.ends = threading.Event()

    def __enter__(self) -> Self:
        self.arrived: list[str] = []
        self.connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listener, *self.connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        spoken = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        spoken.local_settings = Settings(False, {SettingCodes.MAX_CONCURRENT_STREAMS: self._streams})
        spoken.initiate_connection()
        with suppress(OSError):
            connection.sendall(spoken.data_to_send())
            while data := connection.recv(1 << 16):
                for event in spoken.receive_data(data):
                    if isinstance(event, RequestReceived):
                        self.arrived.append(dict(event.headers)[":path"])
                        is_last = self.arrived[-1] == "/last"
                        if is_last:
                            self.ends.wait(100)
                        spoken.send_headers(event.stream_id, [(":status", "200"), ("content-length", "2")])
                        spoken.send_data(event.stream_id, b"{}", end_stream=True)
                        if is_last:
                            spoken.close_connection(last_stream_id=event.stream_id)
                            connection.sendall(spoken.data_to_send())
                            return
                connection.sendall(spoken.data_to_send())
