// The update rules on float32, in the order of operations of reference.py, each rounded once.
#pragma once

#include "abi.h"

namespace {

// Each gives the direction of an element and replaces its `moments`.
// Late in a training c1 and then c2 are 1 in float32, and dividing by them would cost a third of the loop for nothing.
template <bool first_late, bool second_late>
struct Adam {
  static constexpr int moments = 2;
  float b1, rest1, b2, rest2, eps, c1, c2;
  float operator()(float g, float& m, float& v) const {
    m = b1 * m + rest1 * g;
    v = b2 * v + rest2 * (g * g);
    return (first_late ? m : m / c1) / (__builtin_sqrtf(second_late ? v : v / c2) + eps);
  }
};

struct Lion {
  static constexpr int moments = 1;
  float b1, rest1, b2, rest2;
  float operator()(float g, float& m, float&) const {
    float ahead = b1 * m + rest1 * g;
    m = b2 * m + rest2 * g;
    return (ahead > 0 ? 1.0f : 0.0f) - (ahead < 0 ? 1.0f : 0.0f);
  }
};

struct Trace {
  static constexpr int moments = 1;
  float decay;
  float operator()(float g, float& m, float&) const { return m = g + decay * m; }
};

struct Nesterov {
  static constexpr int moments = 1;
  float decay;
  float operator()(float g, float& m, float&) const {
    m = g + decay * m;
    return g + decay * m;
  }
};

struct Descent {
  static constexpr int moments = 0;
  float operator()(float g, float&, float&) const { return g; }
};

// visit(direction of the rule for this leaf)
template <class Visit>
inline auto with_direction(const Rule& r, const Leaf& leaf, Visit visit) {
  switch (r.kind) {
    case kAdam:
      if (leaf.c1 != 1) return visit(Adam<false, false>{r.b1, r.rest1, r.b2, r.rest2, r.eps, leaf.c1, leaf.c2});
      if (leaf.c2 != 1) return visit(Adam<true, false>{r.b1, r.rest1, r.b2, r.rest2, r.eps, leaf.c1, leaf.c2});
      return visit(Adam<true, true>{r.b1, r.rest1, r.b2, r.rest2, r.eps, leaf.c1, leaf.c2});
    case kLion:
      return visit(Lion{r.b1, r.rest1, r.b2, r.rest2});
    case kTrace:
      return visit(Trace{r.b1});
    case kNesterov:
      return visit(Nesterov{r.b1});
    default:
      return visit(Descent{});
  }
}

template <class Direction>
inline void step(const Direction direction, const Leaf& leaf, float rate, int64_t n, float* __restrict p,
                 const float* __restrict g, float* __restrict m, float* __restrict v) {
  constexpr int moments = Direction::moments;
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

}  // namespace
