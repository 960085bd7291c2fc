// Between float32 and the dtypes in which tensors are kept; random bits. Loops without branches, for the vectoriser.
#pragma once

#include <cstring>

#include "abi.h"

namespace {

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

constexpr uint32_t kMagnitude = 0x7FFFFFFF, kInfinity = 0x7F800000;
constexpr uint32_t kLargestBfloat16 = 0x7F7F0000;

inline uint32_t bfloat16_of(uint32_t bits) {  // ties to even
  uint32_t nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return (bits & kMagnitude) > kInfinity ? 0x7FC0 : nearest;
}

inline float from_float16(uint32_t half) {
  constexpr uint32_t exponent = 0x7C00u << 13;
  uint32_t bits = ((half & 0x7FFF) << 13) + ((127 - 15) << 23);
  uint32_t field = (half << 13) & exponent;
  uint32_t special = bits + ((128 - 16) << 23);                                  // infinity and NaN
  uint32_t small = bits_of(float_of(bits + (1 << 23)) - float_of(113u << 23));   // zero and subnormal: exact
  bits = field == exponent ? special : field == 0 ? small : bits;
  return float_of(bits | (half & 0x8000) << 16);
}

inline uint32_t float16_of(uint32_t bits) {  // ties to even
  constexpr uint32_t magic = ((127 - 15) + (23 - 10) + 1) << 23;  // adding it rounds at the last bit of a subnormal
  uint32_t sign = bits >> 16 & 0x8000, x = bits & kMagnitude;
  uint32_t small = bits_of(float_of(x) + float_of(magic)) - magic;
  uint32_t normal = (x - ((127 - 15) << 23) + 0xFFF + ((x >> 13) & 1)) >> 13;
  uint32_t large = x > kInfinity ? 0x7E00 : 0x7C00;
  return sign | (x >= (143u << 23) ? large : x < (113u << 23) ? small : normal);
}

// Elements `at` to `at + n` in float32: the memory itself where it is float32, else `scratch`, filled.
inline float* load(const void* data, int32_t dtype, int64_t at, int64_t n, float* __restrict scratch) {
  if (dtype == kFloat32) return const_cast<float*>(static_cast<const float*>(data)) + at;
  const uint16_t* __restrict x = static_cast<const uint16_t*>(data) + at;
  if (dtype == kBfloat16)
    for (int64_t i = 0; i < n; ++i) scratch[i] = float_of(uint32_t(x[i]) << 16);
  else
    for (int64_t i = 0; i < n; ++i) scratch[i] = from_float16(x[i]);
  return scratch;
}

constexpr uint32_t kMix1 = 0x7FEB352D, kMix2 = 0x846CA68B;

inline uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * kMix1;
  x = (x ^ x >> 15) * kMix2;
  return x ^ x >> 16;
}

constexpr bool kLittleEndian = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;

// A word whose lower half lies first in memory.
inline uint32_t in_memory(uint32_t x) { return kLittleEndian ? x : x << 16 | x >> 16; }

// The hashes of `n` pairs of indices, from `pair`.
inline void hash_pairs(const Draw& draw, uint64_t pair, int32_t n, uint32_t* __restrict out) {
  for (int32_t done = 0; done < n;) {  // runs with the same high half
    const uint64_t at = pair + uint64_t(done), run = (uint64_t(1) << 32) - uint32_t(at);
    const uint32_t start = uint32_t(at) + draw.add, rest = mix(uint32_t(at >> 32) + draw.high) + draw.then;
    const int32_t count = run < uint64_t(n - done) ? int32_t(run) : n - done;  // gcc 12: no vectors if `k` has 64 bits
    for (int32_t k = 0; k < count; ++k) out[done + k] = in_memory(mix(mix(start + uint32_t(k)) + rest));
    done += count;
  }
}

typedef uint16_t Drawn __attribute__((may_alias));

// The draws of elements `at` to `at + n` of a leaf, at most kUnit, somewhere in `words`.
inline const Drawn* draw_bits(const Draw& draw, int64_t at, int32_t n, uint32_t (&words)[kUnit / 2 + 1]) {
  Drawn* out = reinterpret_cast<Drawn*>(words);
  if (draw.kind == kRange) {
    const uint64_t first = uint64_t(draw.start) + uint64_t(at);
    hash_pairs(draw, first >> 1, int32_t((first & 1) + uint64_t(n) + 1) >> 1, words);
    return out + (first & 1);
  }
  const int64_t* __restrict index = draw.index + at;
  for (int32_t i = 0; i < n; ++i) {
    const uint32_t low = uint32_t(uint64_t(index[i]) >> 1), high = uint32_t(uint64_t(index[i]) >> 33);
    out[i] = uint16_t(mix(mix(low + draw.add) + mix(high + draw.high) + draw.then) >> (index[i] & 1) * 16);
  }
  return out;
}

// Rounds elements `at` to `at + n` of a leaf by their draws: up in magnitude with the probability of the distance. `x`
// and `to` begin at the first. Returns the largest magnitude: what lies past kLargestBfloat16 is wrong.
inline uint32_t round_drawn(const float* __restrict x, uint16_t* __restrict to, const Draw& draw, int64_t at,
                            int64_t n) {
  uint32_t largest = 0, words[kUnit / 2 + 1];
  for (int64_t done = 0; done < n; done += kUnit) {
    const int32_t count = int32_t(n - done < kUnit ? n - done : kUnit);
    const Drawn* random = draw_bits(draw, at + done, count, words);
    for (int32_t i = 0; i < count; ++i) {
      const uint32_t bits = bits_of(x[done + i]), magnitude = bits & kMagnitude;
      largest = magnitude > largest ? magnitude : largest;
      to[done + i] = uint16_t((bits + random[i]) >> 16);
    }
  }
  return largest;
}

// Writes float32 to elements `at` to `at + n` in their dtype, unless `x` is that memory.
inline void store(const float* __restrict x, void* data, int32_t dtype, int64_t at, int64_t n, const Draw& draw) {
  if (dtype == kFloat32) {
    float* to = static_cast<float*>(data) + at;
    if (to != x) std::memcpy(to, x, size_t(n) * 4);
    return;
  }
  uint16_t* __restrict to = static_cast<uint16_t*>(data) + at;
  if (dtype == kFloat16) {
    for (int64_t i = 0; i < n; ++i) to[i] = uint16_t(float16_of(bits_of(x[i])));
  } else if (draw.kind == kNearest) {
    for (int64_t i = 0; i < n; ++i) to[i] = uint16_t(bfloat16_of(bits_of(x[i])));
  } else if (round_drawn(x, to, draw, at, n) > kLargestBfloat16) {  // rare; these are rounded to nearest
    for (int64_t i = 0; i < n; ++i)
      if ((bits_of(x[i]) & kMagnitude) > kLargestBfloat16) to[i] = uint16_t(bfloat16_of(bits_of(x[i])));
  }
}

}  // namespace
