"""The Triton kernels, one operation per file. Imported only where a kernel runs: a machine may have no triton."""
