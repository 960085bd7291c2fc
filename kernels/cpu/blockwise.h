// Moments in 8 bits: codes of a book's values, and a scale for each block.
#pragma once

#include "convert.h"

namespace {

// Keys put floats from -1 to 1 in order: sign, exponent from 2^-25 on, and 6 bits of the fraction.
constexpr int32_t kKeys = 25 << 6, kFirstKey = (127 - 25) << 6;

inline int32_t key_of(float x) {
  const int32_t bits = int32_t(bits_of(x)), size = ((bits & int32_t(kMagnitude)) >> 17) - kFirstKey;
  const int32_t key = size < 0 ? 0 : size > kKeys ? kKeys : size;
  return bits < 0 ? kKeys - key : kKeys + key;
}

struct Book {
  float values[256];
  float borders[384];            // halfway between neighbours; infinity past the last
  int32_t below[2 * kKeys + 1];  // of each key: how many borders have a lower one
  int32_t last, step;            // 2 step - 1 is at least the most borders that share a key

  explicit Book(const Moment& moment) {
    if (moment.dtype != kCodes) return;
    last = moment.book_size - 1;
    for (int32_t i = 0; i < 256; ++i) values[i] = moment.book[i < last ? i : last];
    for (int32_t i = 0; i < 384; ++i)
      borders[i] = i < last ? (moment.book[i + 1] + moment.book[i]) / 2 : float_of(kInfinity);
    int32_t most = 0;
    for (int32_t i = 0, key = 0; i <= last; ++i) {
      const int32_t own = i < last ? key_of(borders[i]) : 2 * kKeys;
      for (; key <= own; ++key) below[key] = i;
      const int32_t together = i - below[own] + (i < last);
      most = together > most ? together : most;
    }
    for (step = 1; 2 * step - 1 < most;) step *= 2;
  }
};

inline void decode(const Book& book, const Moment& moment, int64_t at, int64_t n, float* __restrict out) {
  const uint8_t* __restrict codes = static_cast<const uint8_t*>(moment.values) + at;
  const float* __restrict values = book.values;
  for (int64_t begin = 0; begin < n; begin += moment.block) {
    int64_t end = begin + moment.block < n ? begin + moment.block : n;
    float scale = moment.scales[(at + begin) / moment.block];
    for (int64_t i = begin; i < end; ++i) out[i] = values[codes[i]] * scale;
  }
}

inline float largest(const float* __restrict x, int64_t n) {  // of magnitudes; as integers, so that NaN is the largest
  int32_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    int32_t bits = int32_t(bits_of(x[i]) & kMagnitude);
    found = bits > found ? bits : found;
  }
  return float_of(uint32_t(found));
}

// How many borders lie below each value: those of lower keys, and by bisection those of its own. All of them: NaN.
inline void nearest(const Book& book, const float* __restrict x, float divisor, int64_t n, uint8_t* __restrict codes) {
  constexpr int64_t together = 64;
  const float* __restrict borders = book.borders;
  const int32_t* __restrict below = book.below;
  for (int64_t begin = 0; begin < n; begin += together) {
    int32_t count = int32_t(begin + together < n ? together : n - begin);
    float value[together];
    int32_t code[together];
    for (int32_t i = 0; i < count; ++i) value[i] = x[begin + i] / divisor, code[i] = below[key_of(value[i])];
    for (int32_t step = book.step; step; step /= 2)
      for (int32_t i = 0; i < count; ++i) code[i] += borders[code[i] + step - 1] < value[i] ? step : 0;
    for (int32_t i = 0; i < count; ++i) {
      const bool known = value[i] == value[i] && code[i] < book.last;
      codes[begin + i] = uint8_t(known ? code[i] : book.last);
    }
  }
}

inline void encode(const Book& book, const Moment& moment, int64_t at, int64_t n, const float* __restrict x) {
  uint8_t* codes = static_cast<uint8_t*>(moment.values) + at;
  for (int64_t begin = 0; begin < n; begin += moment.block) {
    int64_t count = begin + moment.block < n ? moment.block : n - begin;
    float scale = largest(x + begin, count);
    moment.scales[(at + begin) / moment.block] = scale;
    nearest(book, x + begin, scale == 0 ? 1 : scale, count, codes + begin);
  }
}

}  // namespace
