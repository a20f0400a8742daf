"""Code that must not wait for the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_waiting() -> Iterator[None]:
    """Raise an error where the host waits for the device, such as for a value of a tensor."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
