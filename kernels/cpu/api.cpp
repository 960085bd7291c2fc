// The functions that Python calls: choice of the level, and the split over threads.
//
// A split never changes a result: each element, block and chunk is computed by one thread, in the same way.
//
// Threads are OpenMP's, whose pool is the one torch uses where both load the same runtime: threads of our own would share
// the cores with torch's, which spin for a while after each of its operations. As in torch, a forked child must not ask
// for several threads. A compiler without OpenMP ignores the pragma, and one thread does all.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>

#include "abi.h"

#define FZ_EXPORT extern "C" __attribute__((visibility("default")))

extern const Level fz_portable;
#if defined(__x86_64__)
extern const Level fz_avx2, fz_avx512;
#endif

namespace {

constexpr int64_t kLeastShare = 1 << 15;  // elements; a thread costs more than fewer of them

const Level& level_of(int32_t level) {
#if defined(__x86_64__)
  if (level == 2) return fz_avx512;
  if (level == 1) return fz_avx2;
#endif
  (void)level;
  return fz_portable;
}

int64_t unit_of(const Leaf& leaf) {
  int64_t unit = 1;
  for (const Moment& moment : leaf.moments)
    if (moment.dtype == kCodes) unit = std::lcm(unit, moment.block);
  return unit < kUnit ? (kUnit + unit - 1) / unit * unit : unit;
}

// run(share, shares, scratch) for each share, at once; false without memory for `scratch` floats each.
template <class Run>
bool spread(int64_t total, int32_t threads, int64_t scratch, Run run) {
  const int64_t line = 16, room = (scratch + line - 1) / line * line;
  const int64_t shares = std::max<int64_t>(1, std::min<int64_t>(threads, total / kLeastShare));
  std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(64, size_t(room * shares) * 4), std::free);
  if (!memory) return false;
  float* floats = static_cast<float*>(memory.get());
#pragma omp parallel for num_threads(int(shares)) schedule(static, 1)
  for (int64_t share = 0; share < shares; ++share) run(share, shares, floats + share * room);
  return true;
}

// Where a share begins in [offset, offset + n), of `total`: elements from `offset`, a multiple of `unit`, at most n.
int64_t cut(int64_t share, int64_t shares, int64_t total, int64_t offset, int64_t n, int64_t unit) {
  const int64_t at = std::clamp<int64_t>(total / shares * share + total % shares * share / shares - offset, 0, n);
  return share == shares ? n : std::min(n, (at + unit - 1) / unit * unit);
}

}  // namespace

FZ_EXPORT int32_t fz_best_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) return 0;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return wide ? 2 : 1;
#else
  return 0;
#endif
}

FZ_EXPORT int32_t fz_update(const Leaf* leaves, int64_t count, const Rule* rule, int32_t threads, int32_t level) {
  const Level& kernels = level_of(level);
  int64_t total = 0, room = 0;
  for (int64_t i = 0; i < count; ++i) {
    total += leaves[i].n;
    room = std::max(room, std::min(unit_of(leaves[i]), leaves[i].n));
  }
  room = std::max<int64_t>(room, 1) * kScratchArrays;
  return spread(total, threads, room, [=, &kernels](int64_t share, int64_t shares, float* scratch) {
    int64_t offset = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Leaf& leaf = leaves[i];
      const int64_t unit = unit_of(leaf);
      const int64_t begin = cut(share, shares, total, offset, leaf.n, unit);
      const int64_t end = cut(share + 1, shares, total, offset, leaf.n, unit);
      if (begin < end) kernels.update(leaf, *rule, begin, end, unit, scratch);
      offset += leaf.n;
    }
  });
}

FZ_EXPORT int32_t fz_square_sums(const Run* runs, int64_t count, int32_t threads, int32_t level) {
  const Level& kernels = level_of(level);
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += runs[i].n;
  return spread(total, threads, kUnit, [=, &kernels](int64_t share, int64_t shares, float* scratch) {
    int64_t offset = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Run& run = runs[i];
      const int64_t begin = cut(share, shares, total, offset, run.n, run.chunk);
      const int64_t end = cut(share + 1, shares, total, offset, run.n, run.chunk);
      if (begin < end) kernels.square_sum(run.x, run.dtype, begin, end, run.chunk, run.out, scratch);
      offset += run.n;
    }
  });
}

FZ_EXPORT int32_t fz_accumulate(float* acc, const void* grad, int32_t dtype, int64_t n, float weight, int32_t threads,
                                int32_t level) {
  const Level& kernels = level_of(level);
  return spread(n, threads, kUnit, [=, &kernels](int64_t share, int64_t shares, float* scratch) {
    const int64_t begin = cut(share, shares, n, 0, n, kUnit), end = cut(share + 1, shares, n, 0, n, kUnit);
    kernels.accumulate(acc, grad, dtype, begin, end, weight, scratch);
  });
}

FZ_EXPORT int64_t fz_sizes() { return int64_t(sizeof(Leaf)) << 32 | int64_t(sizeof(Run)) << 16 | int64_t(sizeof(Rule)); }
