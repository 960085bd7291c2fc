// The kernels for one instruction set: compiled once for each, with the flags of build.py, as the table FZ_LEVEL.
//
// Nothing here may call a function that other files define inline (such as std::vector's): the linker keeps one copy of
// those, which may be the one compiled for instructions that this machine lacks.
#include "blockwise.h"
#include "convert.h"
#include "pairs.h"
#include "rules.h"

namespace {

constexpr Draw kNoDraw = {};

int moments_of(const Rule& rule) { return rule.kind == kAdam ? 2 : rule.kind == kDescent ? 0 : 1; }

// (grad / divisor) * factor into `out`, which may be `g`; what has no effect is left out.
const float* scaled(const float* g, const Rule& rule, int64_t n, float* out) {
  const float divisor = rule.divisor, factor = rule.factor;
  if (divisor == 1 && factor == 1) return g;
  const uint32_t bits = bits_of(divisor);
  if ((bits & 0x7FFFFF) == 0 && bits - 1 < (252u << 23)) {  // a power of two with an inverse: as exact, and faster
    const float inverse = 1 / divisor;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[i] = g[i] * inverse * factor;
    return out;
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = g[i] / divisor * factor;
  return out;
}

// Elements `at` to `at + n`, all in float32 on their way.
void update_unit(const Leaf& leaf, const Rule& rule, int64_t at, int64_t n, const Book (&books)[2], int64_t room,
                 float* scratch) {
  const int moments = moments_of(rule);
  float *for_p = scratch, *for_g = scratch + room;
  float* for_m[2] = {scratch + 2 * room, scratch + 3 * room};
  float* p = leaf.master ? leaf.master + at : load(leaf.param, leaf.param_dtype, at, n, for_p);
  const float* g = scaled(load(leaf.grad, leaf.grad_dtype, at, n, for_g), rule, n, for_g);
  float* m[2] = {nullptr, nullptr};
  for (int k = 0; k < moments; ++k) {
    const Moment& moment = leaf.moments[k];
    if (moment.dtype != kCodes) {
      m[k] = load(moment.values, moment.dtype, at, n, for_m[k]);
      continue;
    }
    m[k] = for_m[k];
    decode(books[k], moment, at, n, m[k]);
    if (k == 1)
      for (int64_t i = 0; i < n; ++i) m[k][i] *= m[k][i];
  }
  with_direction(rule, leaf, [&](auto direction) { step(direction, leaf, rule.step, n, p, g, m[0], m[1]); });
  store(p, leaf.param, leaf.param_dtype, at, n, leaf.master ? kNoDraw : leaf.draws[0]);
  for (int k = 0; k < moments; ++k) {
    const Moment& moment = leaf.moments[k];
    if (moment.dtype != kCodes) {
      store(m[k], moment.values, moment.dtype, at, n, leaf.draws[1 + k]);
      continue;
    }
    if (k == 1)
      for (int64_t i = 0; i < n; ++i) m[k][i] = __builtin_sqrtf(m[k][i]);
    encode(books[k], moment, at, n, m[k]);
  }
}

// Whether a leaf can be taken in pairs: all is bfloat16, and the draws agree on which elements have even indices.
bool in_pairs(const Leaf& leaf, int moments) {
  bool fits = kLittleEndian && !leaf.master;
  for (int k = 0; k <= moments; ++k) {
    const int32_t dtype = k ? leaf.moments[k - 1].dtype : leaf.param_dtype;
    const Draw& draw = leaf.draws[k];
    fits = fits && dtype == kBfloat16 && draw.kind == kRange && (draw.start ^ leaf.draws[0].start) % 2 == 0;
  }
  return fits;
}

// The same as update_unit, of `n` pairs. False: nothing is written, since some need more care.
bool update_pairs(const Leaf& leaf, const Rule& rule, int64_t at, int32_t n, int64_t room, float* scratch) {
  const int moments = moments_of(rule);
  float *g = scratch, *rest = scratch + room;  // a room for each array: half for its draws, half for what is made
  const bool plain =
      leaf.grad_dtype == kBfloat16
          ? split(reinterpret_cast<const Pair*>(static_cast<const uint16_t*>(leaf.grad) + at), n, g)
          : split(load(leaf.grad, leaf.grad_dtype, at, 2 * n, rest), n, g);
  if (!plain) return false;
  PairUnit unit{{}, {}, scaled(g, rule, 2 * n, g), g + n, {}};
  for (int k = 0; k <= moments; ++k) {
    void* values = k ? leaf.moments[k - 1].values : leaf.param;
    uint32_t* words = reinterpret_cast<uint32_t*>(rest + k * room);
    hash_pairs(leaf.draws[k], uint64_t(leaf.draws[k].start + at) >> 1, n, words);
    unit.old[k] = reinterpret_cast<Pair*>(static_cast<uint16_t*>(values) + at);
    unit.made[k] = reinterpret_cast<Pair*>(words + n);
    unit.drawn[k] = words;
  }
  const bool done = with_direction(
      rule, leaf, [&](auto direction) { return step_pairs(direction, leaf, rule.step, n, unit); });
  for (int k = 0; done && k <= moments; ++k) std::memcpy(unit.old[k], unit.made[k], size_t(n) * 4);
  return done;
}

void update(const Leaf& leaf, const Rule& rule, int64_t begin, int64_t end, int64_t unit, float* scratch) {
  const int64_t room = unit < leaf.n ? unit : leaf.n;
  const bool paired = in_pairs(leaf, moments_of(rule));
  const Book books[2] = {Book(leaf.moments[0]), Book(leaf.moments[1])};
  for (int64_t at = begin, n; at < end; at += n) {
    n = at + unit < end ? unit : end - at;
    if (paired) {
      const bool odd = (leaf.draws[0].start + at) % 2;
      n = odd || n == 1 ? 1 : n / 2 * 2;
      if (n > 1 && update_pairs(leaf, rule, at, int32_t(n / 2), room, scratch)) continue;
    }
    update_unit(leaf, rule, at, n, books, room, scratch);
  }
}

typedef float Floats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));

constexpr int64_t kVectors = 4, kLanes = kVectors * 8;

// Lane k takes elements k, k + 32, ...; so the sum is the same at every level.
inline void add_squares(Doubles (&sums)[kVectors], const float* x, int64_t n) {
  Floats next[kVectors] = {};
  std::memcpy(next, x, size_t(n) * 4);
  for (int k = 0; k < kVectors; ++k) {
    Doubles wide = __builtin_convertvector(next[k], Doubles);
    sums[k] += wide * wide;
  }
}

double square_sum_of_chunk(const void* x, int32_t dtype, int64_t begin, int64_t end, float* scratch) {
  Doubles sums[kVectors] = {};
  for (int64_t at = begin; at < end; at += kUnit) {
    const int64_t n = at + kUnit < end ? kUnit : end - at;
    const float* values = load(x, dtype, at, n, scratch);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) add_squares(sums, values + i, kLanes);
    if (i < n) add_squares(sums, values + i, n - i);
  }
  Doubles all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return ((all[0] + all[1]) + (all[2] + all[3])) + ((all[4] + all[5]) + (all[6] + all[7]));
}

constexpr int64_t kFew = 8;

// What `square_sum_of_chunk` gives for at most kFew elements: lanes without any add nothing.
inline double square_sum_of_few(const float* x, int64_t n) {
  double all[kFew] = {};
  for (int64_t i = 0; i < n; ++i) all[i] = double(x[i]) * double(x[i]);
  return ((all[0] + all[1]) + (all[2] + all[3])) + ((all[4] + all[5]) + (all[6] + all[7]));
}

template <int64_t kChunk>
void square_sums_of_few(const float* x, int64_t n, int64_t chunk, double* out) {
  const int64_t size = kChunk ? kChunk : chunk;
  for (; n >= size; n -= size, x += size) *out++ = square_sum_of_few(x, size);
  if (n) *out = square_sum_of_few(x, n);
}

// Of whole chunks: `begin` is a multiple of `chunk`.
void square_sum(const void* x, int32_t dtype, int64_t begin, int64_t end, int64_t chunk, double* out, float* scratch) {
  if (chunk <= kFew) {  // small leaves have many small chunks
    const auto run = chunk == 1 ? square_sums_of_few<1> : chunk == 4 ? square_sums_of_few<4> : square_sums_of_few<0>;
    const int64_t room = kUnit / chunk * chunk;
    for (int64_t at = begin; at < end; at += room) {
      const int64_t n = at + room < end ? room : end - at;
      run(load(x, dtype, at, n, scratch), n, chunk, out + at / chunk);
    }
    return;
  }
  for (int64_t at = begin; at < end; at += chunk)
    out[at / chunk] = square_sum_of_chunk(x, dtype, at, end - at < chunk ? end : at + chunk, scratch);
}

void accumulate(float* acc, const void* grad, int32_t dtype, int64_t begin, int64_t end, float weight, float* scratch) {
  for (int64_t at = begin; at < end; at += kUnit) {
    const int64_t n = at + kUnit < end ? kUnit : end - at;
    const float* __restrict g = load(grad, dtype, at, n, scratch);
    float* __restrict to = acc + at;
    for (int64_t i = 0; i < n; ++i) to[i] = to[i] + weight * g[i];
  }
}

}  // namespace

extern const Level FZ_LEVEL;
const Level FZ_LEVEL = {update, square_sum, accumulate};
