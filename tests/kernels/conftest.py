"""Kernels run either compiled or interpreted, for the life of a process: the interpreted tests have their own."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
