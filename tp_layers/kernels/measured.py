"""Which backend was the faster one: written by the benchmarks from measurements on a GPU, read by `backend.choose`.

Keys are (architecture, operation, shape class, dtype class) as in `configs.py` and `backend.OPERATIONS`, values are
"triton" or "torch". Empty until measured.
"""

FASTER: dict[tuple[str, str, str, str], str] = {}
