// Leaves all in bfloat16, rounded by draws of consecutive indices: two neighbours at a time in one word, as they lie in
// memory and as their draws do. What goes through scratch elsewhere stays in registers; the bits are the same.
#pragma once

#include "convert.h"
#include "rules.h"

namespace {

struct __attribute__((packed, aligned(2), may_alias)) Pair {
  uint32_t word;  // the first of two bfloat16 is its lower half
};

inline float first_of(uint32_t word) { return float_of(word << 16); }
inline float second_of(uint32_t word) { return float_of(word & 0xFFFF0000); }

// What a unit reads and writes: `old` and `made` of the param and the moments, gradients, draws.
struct PairUnit {
  Pair *old[3], *made[3];
  const float *first, *second;
  const uint32_t* drawn[3];
};

// Two floats rounded by a word of draws. Sets the upper bit of a half of `large` where that is the largest bfloat16 or
// more, which the draw may have made wrong.
inline uint32_t round_pair(float first, float second, uint32_t drawn, uint32_t& large) {
  const uint32_t made = ((bits_of(first) + (drawn & 0xFFFF)) >> 16) | ((bits_of(second) + (drawn >> 16)) & 0xFFFF0000);
  large |= (made + 0x00810081) ^ made;
  return made;
}

// Steps `n` pairs from `old` to `made`. False: some of `made` may be wrong.
template <class Direction>
inline bool step_pairs(const Direction direction, const Leaf& leaf, float rate, int32_t n, const PairUnit& u) {
  constexpr int moments = Direction::moments;
  const Pair *p = u.old[0], *m = u.old[1], *v = u.old[2];
  Pair *new_p = u.made[0], *new_m = u.made[1], *new_v = u.made[2];
  const uint32_t *for_p = u.drawn[0], *for_m = u.drawn[1], *for_v = u.drawn[2];
  const float *first = u.first, *second = u.second;
  const float decay = leaf.weight_decay;
  const bool decays = leaf.decays;
  uint32_t large = 0;
#pragma GCC ivdep
  for (int32_t k = 0; k < n; ++k) {
    float p0 = first_of(p[k].word), p1 = second_of(p[k].word), m0 = 0, m1 = 0, v0 = 0, v1 = 0;
    if (moments > 0) m0 = first_of(m[k].word), m1 = second_of(m[k].word);
    if (moments > 1) v0 = first_of(v[k].word), v1 = second_of(v[k].word);
    float u0 = direction(first[k], m0, v0), u1 = direction(second[k], m1, v1);
    if (decays) u0 = u0 + decay * p0, u1 = u1 + decay * p1;
    new_p[k].word = round_pair(p0 + u0 * rate, p1 + u1 * rate, for_p[k], large);
    if (moments > 0) new_m[k].word = round_pair(m0, m1, for_m[k], large);
    if (moments > 1) new_v[k].word = round_pair(v0, v1, for_v[k], large);
  }
  return !(large & 0x80008000);
}

// Gradients of `n` pairs, the first ones to `out`, the second ones to out + n. False: there is NaN with bits that
// bfloat16 does not keep; a draw added to them could carry through the sign, which `round_pair` would not see.
inline bool split(const float* __restrict g, int32_t n, float* __restrict out) {
  uint32_t largest = 0;
  for (int32_t i = 0; i < 2 * n; ++i) {
    const uint32_t magnitude = bits_of(g[i]) & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  for (int32_t k = 0; k < n; ++k) out[k] = g[2 * k], out[n + k] = g[2 * k + 1];
  return largest <= kInfinity;
}

inline bool split(const Pair* __restrict g, int32_t n, float* __restrict out) {
  for (int32_t k = 0; k < n; ++k) out[k] = first_of(g[k].word), out[n + k] = second_of(g[k].word);
  return true;
}

}  // namespace
