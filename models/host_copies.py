"""KV between a CUDA device and the host beside the computing: pinned host memory, and a stream of its own.

A copy from or to pageable memory stops the host and goes through a staging buffer of the driver; from pinned memory the copy
engine reads and writes by itself while kernels run. What is copied out must have been computed, and what is copied in must be
there before it is read: each direction waits for exactly that, by events. On other devices these are plain copies.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopies:
    """Copies for one device. May be used by several threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, tensor: Tensor) -> Tensor:
        """A host tensor with the contents that `tensor` has when what is enqueued so far is done; complete on return."""
        if self._stream is None:
            return tensor.cpu()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)
        self._stream.synchronize()
        return host

    def to_device(self, host: Tensor) -> Tensor:
        """A tensor on the device with the contents of `host`; what is enqueued from now on finds it complete."""
        if self._stream is None:
            return host.to(self._device)
        with torch.cuda.stream(self._stream):
            copied = host.pin_memory().to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        copied.record_stream(current)
        return copied
