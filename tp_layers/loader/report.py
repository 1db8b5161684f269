"""What a load did on one rank, and how much memory it took."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass(frozen=True)
class LoadReport:
    """What one rank did in `load` or `reload`.

    Attributes:
        bytes_held: of its parameters and persistent buffers.
        bytes_needed: of the files, that are in its shards.
        bytes_read: asked of the files: those needed, and what lies between the columns of a rowwise weight.
        seconds: in all; the phases are `seconds_preparing` (headers, the model without weights, the plan),
            `seconds_allocating` and `seconds_reading`.
        peak_host_bytes, peak_device_bytes: beyond what the process used before: anonymous memory where the system tells
            it (Linux), seen 50 times a second, and what torch allocated on a CUDA device (where a report was asked
            for). 0 where they are not known.
    """

    rank: int
    size: int
    bytes_held: int
    bytes_needed: int
    bytes_read: int
    seconds: float
    seconds_preparing: float
    seconds_allocating: float
    seconds_reading: float
    peak_host_bytes: int
    peak_device_bytes: int

    @property
    def gigabytes_per_second(self) -> float:
        """Of the bytes read, while reading."""
        return self.bytes_read / self.seconds_reading / 1e9 if self.seconds_reading else 0.0

    def __str__(self) -> str:
        phases = f"preparing {self.seconds_preparing:.2f}, allocating {self.seconds_allocating:.2f}, reading "
        phases += f"{self.seconds_reading:.2f} at {self.gigabytes_per_second:.2f} GB/s"
        return (
            f"rank {self.rank} of {self.size} holds {self.bytes_held / 1e6:,.1f} MB and read "
            f"{self.bytes_read / 1e6:,.1f} MB for the {self.bytes_needed / 1e6:,.1f} MB it needed, in "
            f"{self.seconds:.2f} s ({phases}); peak memory {self.peak_host_bytes / 1e6:,.1f} MB on the host, "
            f"{self.peak_device_bytes / 1e6:,.1f} MB on the device"
        )


def held_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and persistent buffers of `model` on this rank, tied ones counted once."""
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())


def anonymous_bytes() -> int:
    """Memory of this process that no file backs; 0 where the system does not tell."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()


class Meter:
    """Seconds of each phase, and the most memory seen beyond what there was at first."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak_host = 0
        self._started, self._host = time.monotonic(), anonymous_bytes()
        self.device, self._peak, self._allocated = torch.device("cpu"), False, 0

    def watch(self, device: torch.device, peak: bool) -> None:
        """The load is onto `device`; with `peak`, takes note of its memory, which resets torch's statistics of it."""
        self.device, self._peak = device, peak and device.type == "cuda"
        if self._peak:
            torch.cuda.reset_peak_memory_stats(device)
            self._allocated = torch.cuda.memory_allocated(device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what happens within it."""
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start
        self.look()

    def look(self) -> None:
        """Takes note of the memory in use."""
        self.peak_host = max(self.peak_host, anonymous_bytes() - self._host)

    def report(self, rank: int, size: int, model: nn.Module, needed: int, requested: int) -> LoadReport:
        """The report of what was done until now."""
        self.look()
        peak = torch.cuda.max_memory_allocated(self.device) - self._allocated if self._peak else 0
        return LoadReport(
            rank=rank,
            size=size,
            bytes_held=held_bytes(model),
            bytes_needed=needed,
            bytes_read=requested,
            seconds=time.monotonic() - self._started,
            seconds_preparing=self.seconds.get("preparing", 0.0),
            seconds_allocating=self.seconds.get("allocating", 0.0),
            seconds_reading=self.seconds.get("reading", 0.0),
            peak_host_bytes=self.peak_host,
            peak_device_bytes=peak,
        )
