"""The studio's server, running beside a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from codegen.studio.server import Server


@contextmanager
def running_server() -> Iterator[Server]:
    """The server on a free port of this machine, until the block ends."""
    with Server(0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
