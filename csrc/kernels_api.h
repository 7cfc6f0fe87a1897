// What the torch side and the kernels share; no torch in here.
#pragma once

#include <cstdint>

namespace sage_fast {

enum class Type { float32, bfloat16, float16 };

struct Array {
  const void* data = nullptr;  // null: not given
  Type type = Type::float32;
};

// One sample. `row` points at its (a, b, c, w, k, m).
struct StepArgs {
  Array x, v, v_uncond;
  void* x_next;
  const float* row;
  float guidance;
  uint64_t seed;
  uint32_t step;
};

struct ScoreArgs {
  Array x, x_next, v;
  Array other[2];  // anchor, rollout policy
  const float* row;
};

struct Kernels {
  double (*step)(const StepArgs&, int64_t begin, int64_t end);
  void (*score)(const ScoreArgs&, int64_t begin, int64_t end, double* sums);
  void (*score_backward)(const ScoreArgs&, const float* weight, void* dv, int64_t begin, int64_t end);
  const char* name;
};

// The kernels for the widest instruction set that this processor has.
const Kernels& kernels();

}  // namespace sage_fast
