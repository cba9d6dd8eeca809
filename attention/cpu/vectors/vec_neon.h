// The operations that vec.h needs of an instruction set, in NEON of ARMv8 (aarch64).
#pragma once
#include <arm_neon.h>

static inline Vec maximum(Vec a, Vec b) { return (Vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
static inline bool any(IntVec mask) { return vmaxvq_u32((uint32x4_t)mask) != 0; }

static inline Vec load(const Bf16 *p) { return (Vec)vshll_n_u16(vld1_u16(&p->bits), 16); }
static inline IntVec load_pairs(const Bf16 *p, int) { IntVec v; memcpy(&v, p, sizeof v); return v; }
static inline Vec load(const Fp16 *p) { return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }

static inline void store(Bf16 *p, Vec v) {
  const IntVec bits = (IntVec)v, odd = (bits >> 16) & 1;
  const IntVec rounded = (IntVec)choose(v == v, (Vec)(bits + 0x7fff + odd), (Vec)(bits | 0x400000));
  vst1_u16(&p->bits, vshrn_n_u32((uint32x4_t)rounded, 16));
}

static inline void store(Fp16 *p, Vec v) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v))); }

static inline uint8x8_t bytes(const uint8_t *p) {
  uint32_t four;
  memcpy(&four, p, 4);
  return vcreate_u8(four);
}
static inline Vec load_int8(const uint8_t *p) {
  return (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(bytes(p))))));
}
static inline Vec load_e4m3(const uint8_t *p) {
  const int16x4_t wide = vshl_n_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(bytes(p)))), 7);  // the sign twice
  return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(vreinterpret_u16_s16(wide), vdup_n_u16(0xbfff))));
}
static inline void store_bytes(uint8_t *p, IntVec v) {
  const uint16x4_t words = vmovn_u32((uint32x4_t)v);
  const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0);
  memcpy(p, &four, 4);
}

static inline Vec split(Vec t, Vec *whole) {
  const Vec bounded = maximum(t, splat(-127));
  *whole = (Vec)vrndmq_f32((float32x4_t)bounded);
  return bounded - *whole;
}
static inline Vec raise_to(Vec p, Vec whole, Vec t) {
  const IntVec exponent = (IntVec)vcvtq_s32_f32((float32x4_t)whole) << 23;
  return (Vec)(((IntVec)p + exponent) & ~(t < splat(-126)));
}
