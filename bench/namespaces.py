"""Two network namespaces joined by a link of a given rate: what two nodes see of each other, on one machine."""

import os
import shutil
import subprocess
from types import TracebackType

# Addresses of a range that nobody routes.
ADDRESSES = ("10.213.77.1", "10.213.77.2")


def refused() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"there is no '{missing[0]}' (iproute2) here"
    name = f"try{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"network namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


class Link:
    """`with Link(gbit) as link`: `link.names` are the namespaces, each with one end, `link.devices` the ends."""

    def __init__(self, gbit: float) -> None:
        self.gbit = gbit
        self.names = [f"overlap{os.getpid()}{end}" for end in "ab"]
        self.devices = [f"ov{os.getpid() % 10**6}{end}" for end in "ab"]

    def __enter__(self) -> "Link":
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            _run("ip", "link", "add", self.devices[0], "type", "veth", "peer", "name", self.devices[1])
            for name, device, address in zip(self.names, self.devices, ADDRESSES, strict=True):
                _run("ip", "link", "set", device, "netns", name)
                self._within(name, "ip", "addr", "add", f"{address}/24", "dev", device)
                self._within(name, "ip", "link", "set", device, "up")
                self._within(name, "ip", "link", "set", "lo", "up")
                # A bucket of 2 ms: shorter ones do not reach the rate, as the kernel looks only so often.
                burst = max(64 * 1024, int(self.gbit * 1e9 / 8 * 2e-3))
                rate = ("rate", f"{self.gbit * 1e3:g}mbit", "burst", str(burst), "latency", "400ms")
                self._within(name, "tc", "qdisc", "add", "dev", device, "root", "tbf", *rate)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()

    def prefix(self, rank: int) -> list[str]:
        """What runs a command in a rank's namespace."""
        return ["ip", "netns", "exec", self.names[rank]]

    def _within(self, name: str, *command: str) -> None:
        _run("ip", "netns", "exec", name, *command)

    def _remove(self) -> None:
        # The pair of devices goes with either namespace.
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
