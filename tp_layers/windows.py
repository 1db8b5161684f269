"""Which all-reduce was the fastest on a machine: by bench/choose_windows.py from measurements; read by `ways.py`.

Keys are (name of the GPU, ranks, dtype), values windows of message sizes, (first, last, way): in bytes, both measured.
Ways are those of `ways.WAYS`. Elsewhere NCCL's own all-reduce is taken. Beside each window, NCCL's time over the way's:
the least in the window.
Empty until measured.
"""

Window = tuple[int, int, str]

WINDOWS: dict[tuple[str, int, str], tuple[Window, ...]] = {}
