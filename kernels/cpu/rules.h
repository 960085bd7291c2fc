// The update rules on float32, in the order of operations of reference.py, each rounded once.
#pragma once

#include "abi.h"

namespace {

// Each gives the direction of an element and replaces its moments.
// Late in a training c1 and then c2 are 1 in float32, and dividing by them would cost a third of the loop for nothing.
template <bool first_late, bool second_late>
struct Adam {
  float b1, rest1, b2, rest2, eps, c1, c2;
  float operator()(float g, float& m, float& v) const {
    m = b1 * m + rest1 * g;
    v = b2 * v + rest2 * (g * g);
    return (first_late ? m : m / c1) / (__builtin_sqrtf(second_late ? v : v / c2) + eps);
  }
};

struct Lion {
  float b1, rest1, b2, rest2;
  float operator()(float g, float& m, float&) const {
    float ahead = b1 * m + rest1 * g;
    m = b2 * m + rest2 * g;
    return (ahead > 0 ? 1.0f : 0.0f) - (ahead < 0 ? 1.0f : 0.0f);
  }
};

struct Trace {
  float decay;
  float operator()(float g, float& m, float&) const { return m = g + decay * m; }
};

struct Nesterov {
  float decay;
  float operator()(float g, float& m, float&) const {
    m = g + decay * m;
    return g + decay * m;
  }
};

struct Descent {
  float operator()(float g, float&, float&) const { return g; }
};

template <int moments, class Direction>
inline void step(const Direction direction, const Leaf& leaf, float rate, int64_t n, float* __restrict p,
                 const float* __restrict g, float* __restrict m, float* __restrict v) {
  const float decay = leaf.weight_decay;
  const bool decays = leaf.decays;
  for (int64_t i = 0; i < n; ++i) {
    float first = 0, second = 0;
    if (moments > 0) first = m[i];
    if (moments > 1) second = v[i];
    float u = direction(g[i], first, second);
    if (decays) u = u + decay * p[i];
    p[i] = p[i] + u * rate;
    if (moments > 0) m[i] = first;
    if (moments > 1) v[i] = second;
  }
}

template <bool first_late, bool second_late>
inline void adam(const Rule& r, const Leaf& leaf, int64_t n, float* p, const float* g, float* m, float* v) {
  const Adam<first_late, second_late> direction{r.b1, r.rest1, r.b2, r.rest2, r.eps, leaf.c1, leaf.c2};
  step<2>(direction, leaf, r.step, n, p, g, m, v);
}

inline void apply(const Rule& r, const Leaf& leaf, int64_t n, float* p, const float* g, float* m, float* v) {
  switch (r.kind) {
    case kAdam:
      if (leaf.c1 != 1) return adam<false, false>(r, leaf, n, p, g, m, v);
      return leaf.c2 != 1 ? adam<true, false>(r, leaf, n, p, g, m, v) : adam<true, true>(r, leaf, n, p, g, m, v);
    case kLion:
      return step<1>(Lion{r.b1, r.rest1, r.b2, r.rest2}, leaf, r.step, n, p, g, m, v);
    case kTrace:
      return step<1>(Trace{r.b1}, leaf, r.step, n, p, g, m, v);
    case kNesterov:
      return step<1>(Nesterov{r.b1}, leaf, r.step, n, p, g, m, v);
    default:
      return step<0>(Descent{}, leaf, r.step, n, p, g, m, v);
  }
}

}  // namespace
