"""What Triton 3.6's interpreter gets wrong or does slowly, put right for the tests. Import before any kernel.

The interpreter holds bfloat16 as uint16 and multiplies the bit patterns in tl.dot (no error, garbage results), feeds
float16 to numpy's slow path, cuts float32 to bfloat16 where a GPU rounds, turns one-element arrays into loop bounds in
a way that numpy 2.4 refuses, and copies every argument's storage onto itself after a launch (5 GiB for such a pool). A
third of its time it prepares what it has prepared: each call of a function inside a kernel replaces every function of
the language, and each value makes its types anew. Production kernels have no part in it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

create_dot = interpreter.InterpreterBuilder.create_dot
patch_lang_tensor = interpreter._patch_lang_tensor
convert_float = interpreter._convert_float
patch_lang = interpreter._patch_lang
get_np_dtype = interpreter._get_np_dtype
with_element_ty = tl.core.block_type.with_element_ty

replaced: set[ModuleType] = set()
"""The modules of the language whose functions are interpreted now."""

numpy_types: dict[str, np.dtype] = {}
block_types: dict[tuple[str, tuple[int, ...]], Any] = {}


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


class Scope(interpreter._LangPatchScope):
    """What a kernel has replaced, until it ends."""

    def restore(self) -> None:
        super().restore()
        replaced.clear()


def patched(function: Any) -> Any:
    """The language as the interpreter needs it, once for a kernel and for the functions inside it."""
    modules = {value for value in function.__globals__.values() if value is tl or value is tl.core}
    if modules and modules <= replaced:
        return interpreter._LangPatchScope()
    replaced.update(modules)
    return patch_lang(function)


def numpy_type(kind: Any) -> np.dtype:
    if kind.name not in numpy_types:
        numpy_types[kind.name] = get_np_dtype(kind)
    return numpy_types[kind.name]


def block_type(self: Any, element: Any) -> Any:
    key = element.name, self.shape
    if key not in block_types:
        block_types[key] = with_element_ty(self, element)
    return block_types[key]


@lru_cache
def extents(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """(tensor.shape, tensor.numel)"""
    return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def tensor(self: Any, handle: Any, type: Any) -> None:
    """tl.tensor.__init__"""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = extents(type.shape if type.is_block() else ())


def install() -> None:
    """Idempotent."""
    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patched
    interpreter._get_np_dtype = numpy_type
    tl.core.block_type.with_element_ty = block_type
    tl.tensor.__init__ = tensor
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter._patch_lang_tensor = patched_tensor
    interpreter._convert_float = convert
    # Tensors of these tests lie in CPU memory: there is nothing to bring to the host or back.
    interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    interpreter.GridExecutor._restore_args_dev = lambda self, *unused: None
