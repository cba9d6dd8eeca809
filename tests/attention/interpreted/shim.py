"""What Triton 3.6's interpreter gets wrong or does slowly, put right for the tests. Import before any kernel.

The interpreter holds bfloat16 as uint16 and multiplies the bit patterns in tl.dot (no error, garbage results), feeds
float16 to numpy's slow path, cuts float32 to bfloat16 where a GPU rounds, turns one-element arrays into loop bounds in
a way that numpy 2.4 refuses, and copies every argument's storage onto itself after a launch (5 GiB for such a pool).
Production kernels have no part in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

create_dot = interpreter.InterpreterBuilder.create_dot
patch_lang_tensor = interpreter._patch_lang_tensor
convert_float = interpreter._convert_float


def as_float32(handle: Any) -> np.ndarray:
    """A dot operand as numbers."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    if {a.dtype.scalar, b.dtype.scalar} <= {tl.bfloat16, tl.float16, tl.float32}:
        return interpreter.TensorHandle(np.matmul(as_float32(a), as_float32(b)) + d.data, d.dtype.scalar)
    return create_dot(self, a, b, d, input_precision, max_num_imprecise_acc)


def convert(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
    """Bits of `target` for the numbers `data` of type `source`, rounded to nearest even."""
    if (source, target) == (tl.bfloat16, tl.float32):
        return data.astype(np.uint32) << 16
    if (source, target) == (tl.float32, tl.bfloat16):
        bits = np.ascontiguousarray(data).view(np.uint32)
        rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)
    return convert_float(data, source, target, rounding_mode)


def patched_tensor(tensor: Any, scope: Any) -> None:
    patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))


def install() -> None:
    """Idempotent."""
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter._patch_lang_tensor = patched_tensor
    interpreter._convert_float = convert
    # Tensors of these tests lie in CPU memory: there is nothing to bring to the host or back.
    interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    interpreter.GridExecutor._restore_args_dev = lambda self, *unused: None
