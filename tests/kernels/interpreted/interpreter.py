"""Repairs of Triton's interpreter (3.6 to 3.9) that these tests need; it computes on bfloat16's bits as on integers."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def repair() -> None:
    """Products of bfloat16 tiles in float32, casts to bfloat16 to nearest even, and `range` of a tensor."""
    builder = interpreter.InterpreterBuilder
    cast, dot, binary = builder.cast_impl, builder.create_dot, builder.binary_op

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        pair = src.dtype.scalar, dst_type.scalar
        if pair == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(to_bfloat16(src.data), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(from_bfloat16(src.data), tl.float32)
        assert tl.bfloat16 not in pair or pair[0] == pair[1], f"no repair for a cast of {pair}"
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            interpreter.TensorHandle(from_bfloat16(side.data), tl.float32) if side.dtype.scalar == tl.bfloat16 else side
            for side in (a, b)
        )
        return dot(self, a, b, *rest)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        assert tl.bfloat16 not in (lhs.dtype.scalar, rhs.dtype.scalar), f"no repair for bfloat16 {op}"
        return binary(self, lhs, rhs, op)

    builder.cast_impl, builder.create_dot, builder.binary_op = cast_impl, create_dot, binary_op
    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        # Triton 3.6 calls int() on an array of one dim, which numpy 2.4 no longer takes.
        scope[0].set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


def to_bfloat16(data: np.ndarray) -> np.ndarray:
    """The bits of float32 `data`, rounded to nearest even."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The float32 value of bfloat16 `bits`."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)
