"""Which backend was the faster one on a GPU: written by bench/choose.py from measurements, read by `backend.choose`.

Keys are (architecture, operation, shape class, dtype class) as in `configs.py` and `backend.OPERATIONS`, values are
"triton" or "torch". Beside each, the torch twin's time over the kernel's: their mean, and the least of them.
Empty until measured.
"""

FASTER: dict[tuple[str, str, str, str], str] = {}
