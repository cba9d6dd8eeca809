"""The instruction sets that kernels of the CPU are compiled for, best first.

    amx           AVX-512 with bfloat16, and 16 x 16 tile products of bfloat16
    avx512_bf16   AVX-512 with products of bfloat16 pairs (vdpbf16ps)
    avx512_vnni   AVX-512 with products of quads of bytes (vpdpbusd), which the levels above have too
    avx512        16 floats at a time
    avx2          8 floats at a time
    neon_dotprod  4 floats at a time, with products of quads of bytes (sdot): most aarch64 since 2018
    neon          4 floats at a time: aarch64

CPUs without instructions for bfloat16 and float16 widen them to float32 when they load them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from attention.cpu.build import AMX_BF16, AVX512, AVX512_BF16, AVX512_VNNI, cpu_features, require
from net.compiled import NotCompiled, RefusedByCompiler

log = logging.getLogger(__name__)

LEVELS: dict[str, tuple[str, ...]] = {
    "amx": (*AVX512_BF16, "f16c", *AMX_BF16),
    "avx512_bf16": (*AVX512_BF16, "f16c"),
    "avx512_vnni": (*AVX512_VNNI, "f16c"),
    "avx512": (*AVX512, "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "neon_dotprod": ("asimd", "fp", "atomics", "asimddp"),
    "neon": ("asimd", "fp"),
}
"""Name -> the CPU features it needs, as /proc/cpuinfo spells them; --cpu-level takes these names."""


def levels_here() -> list[str]:
    """Levels that this CPU has, best first."""
    return [level for level, features in LEVELS.items() if set(features) <= cpu_features()]


def lower(level: str, bfloat16: bool, is_compiled: Callable[[str], bool]) -> list[str]:
    """Levels of this CPU below `level`, best first, whose kernels may be faster than those of `level`, because they
    compute otherwise: with vectors of another width, or, for `bfloat16`, without its products. Only levels whose
    kernels `is_compiled`: a first start compiles one level, and not five."""
    seen, found = {_arithmetic(level, bfloat16)}, []
    for each in levels_here()[levels_here().index(level) + 1 :]:
        kind = _arithmetic(each, bfloat16)
        if kind not in seen and is_compiled(each):
            seen.add(kind)
            found.append(each)
    return found


def _arithmetic(level: str, bfloat16: bool) -> tuple[str, bool]:
    """The instructions with which a level multiplies elements. Those of bytes do not count."""
    width = level if level == "avx2" else "neon" if level.startswith("neon") else "avx512"
    return (level, True) if bfloat16 and level in ("amx", "avx512_bf16") else (width, False)


def best(offers: Callable[[str], object], level: str = "auto") -> str:
    """`level`, or for auto the first one for which `offers` (which compiles and loads kernels) does not raise. If the
    compiler refuses a level of this CPU, the log has an error: the next level is slower. Raises NotCompiled with the
    reason: that of the named level, or for auto that of the last one."""
    if level != "auto":
        try:
            require(LEVELS[level])
            offers(level)
        except NotCompiled as reason:
            here = ", ".join(levels_here()) or "none"
            raise NotCompiled(f"--cpu-level {level}: {reason}; this CPU has: {here}") from reason
        return level
    last = NotCompiled("this CPU is not aarch64 and lacks AVX2 with FMA and F16C")
    for each in levels_here():
        try:
            offers(each)
        except NotCompiled as reason:
            if isinstance(reason, RefusedByCompiler):
                log.error("no kernels of level %s, so those of a slower level compute: %s", each, reason)
            last = reason
        else:
            return each
    raise last
