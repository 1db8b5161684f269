"""CUDA graphs of a sharded model: a capture is refused where its replays would be wrong without a word.

    captured     layers, chunks of a sum and sums in rank order, over NCCL. The model has run once before, with the same
                 shapes: that compiles kernels, opens NCCL's connections and compares the ranks' inputs
    otherwise    a sum that is put off is taken at once, as what reads it may lie outside the graph; the comparison of
                 the first inputs waits for a call that is not captured
    refused      sums over gloo, which go through the CPU, and whatever asks the other ranks for objects: `apply`,
                 `load`, `reload`, `save`, adapters

All ranks capture and replay alike. A graph holds addresses: `reload` writes to them, so the next replay has the new
weights; of adapters, and of scales set later, a graph knows nothing; nor does a replay refuse to run on what a failed
`reload` has left. Graphs end before the process group does, which otherwise waits for them.
"""

import torch


def is_captured() -> bool:
    """Whether the current stream is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def captures(x: torch.Tensor) -> bool:
    """Whether what is done to `x` goes into a graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def refuse_objects(what: str) -> None:
    """Raises RuntimeError in a capture, in which nothing can be read from a device."""
    if is_captured():
        raise RuntimeError(f"{what} cannot be part of a CUDA graph: call it before the capture")


def refuse_gloo(x: torch.Tensor, device: torch.device) -> None:
    """Raises RuntimeError where `x`'s stream is captured, and its group's `device` is the CPU, which only gloo's is."""
    if device.type == "cpu" and captures(x):
        raise RuntimeError(
            "a collective over gloo cannot be part of a CUDA graph: it goes through the CPU, which no replay repeats. "
            "Use NCCL, or run without a graph"
        )
