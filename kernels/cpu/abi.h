// What Python and C share: `library.py` mirrors these structs, field by field.
#pragma once

#include <cstdint>

enum Dtype : int32_t { kFloat32, kBfloat16, kFloat16, kCodes };
enum RuleKind : int32_t { kAdam, kLion, kTrace, kNesterov, kDescent };
enum DrawKind : int32_t { kNearest, kRange, kIndex };

struct Moment {
  void* values;
  float* scales;      // of codes, one for each block
  const float* book;  // of codes, in ascending order
  int64_t block;
  int32_t dtype;
  int32_t book_size;
};

struct Draw {
  const int64_t* index;  // kIndex
  int64_t start;         // kRange: the index of the first element
  uint32_t add, then, high;
  int32_t kind;
};

struct Leaf {
  void* param;
  const void* grad;
  float* master;  // or null: the param itself is updated
  int64_t n;
  Moment moments[2];
  Draw draws[3];  // of the param, then of each moment
  int32_t param_dtype, grad_dtype;
  float c1, c2;  // Adam: 1 - b1^count, 1 - b2^count
  float weight_decay;
  int32_t decays;  // 0: weight_decay is not even added as zero
};

struct Run {  // sums of squares of one tensor
  const void* x;
  int64_t n, chunk;
  double* out;  // one for each chunk
  int32_t dtype;
};

struct Rule {
  int32_t kind;
  float b1, rest1;  // and 1 - b1; of Momentum, b1 is its decay
  float b2, rest2;
  float eps;
  float step;  // -learning_rate
  float divisor, factor;
};

// One of the builds of level.cpp. Ranges are of elements; `unit` elements are processed at a time.
struct Level {
  void (*update)(const Leaf& leaf, const Rule& rule, int64_t begin, int64_t end, int64_t unit, float* scratch);
  void (*square_sum)(const void* x, int32_t dtype, int64_t begin, int64_t end, int64_t chunk, double* out,
                     float* scratch);
  void (*accumulate)(float* acc, const void* grad, int32_t dtype, int64_t begin, int64_t end, float weight,
                     float* scratch);
};

constexpr int64_t kUnit = 512;         // float32 scratch of so many elements stays in the first-level cache
constexpr int64_t kScratchArrays = 4;  // param, grad, two moments
