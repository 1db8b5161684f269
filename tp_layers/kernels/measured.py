"""Which backend was the faster one on a GPU: written by bench/choose.py from measurements, read by `backend.choose`.

Keys are (architecture, operation, shape class, dtype class) as in `configs.py` and `backend.OPERATIONS`, values are
"triton" or "torch". Beside each, the torch twin's time over the kernel's: their mean, and the least of them.
Empty until measured.
"""

FASTER: dict[tuple[str, str, str, str], str] = {}

# Whether fused blocks are the faster ones, by kind of device. On the CPU they take 1.00 to 1.07 times as long, at
# widths of 64 to 1024 (bench/fused.py): a GEMM there does not gain from being wider, and the twins save no pass.
# On CUDA it is not measured yet; the kernels save the passes that `backend.OPERATIONS` names.
FUSED: dict[str, bool] = {"cpu": False, "cuda": True}
