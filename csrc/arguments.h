// What the torch side and the inner loops share; no torch in here.
#pragma once

#include <cstdint>

namespace sage_fast {

enum class Type { float32, bfloat16, float16 };

struct Array {
  const void* data = nullptr;  // null: not given
  Type type = Type::float32;
};

// One row of the coefficient table: x_next = a x + b v + c noise, log-prob = w mean(residual^2) + k, and
// KL = m mean(difference^2).
struct Row {
  float a, b, c, w, k, m;
};
static_assert(sizeof(Row) == 6 * sizeof(float), "rows are read from a contiguous table [T, 6]");

// One sample.
struct StepArgs {
  Array x, v, v_uncond;
  void* x_next;
  Row row;
  float guidance;
  uint64_t seed;
  uint32_t step;
};

// One sample.
struct ScoreArgs {
  Array x, x_next, v;
  Array other[2];  // anchor, rollout policy
  Row row;
};

// Rows of one sample: x [S, width]; scale and shift [width]. `out` is the result [S, wide], or dx [S, width]; grad
// [S, wide]: its first `width` columns count, and of the result only those are written.
struct ModulateArgs {
  Array x, scale, shift, grad;
  void* out;
  int64_t width, wide;
  float eps;
};

// Heads of one sample's tokens, each `width` neighbours in memory; strides in elements.
struct Heads {
  Array array;
  int64_t token_stride, head_stride;
};

// One sample: video tokens first, then text. `out` is the result, or the gradient of video, with `text_out` that of
// text.
struct RotateArgs {
  Heads video, text, grad;
  Array video_weight, text_weight;  // [width]
  const float* rotary;              // [video_tokens, width / 2, 2]
  void *out, *text_out;
  int64_t video_tokens, heads, width;
  float eps;
};

constexpr int64_t kModulateScratch = 7, kRotateScratch = 9;  // floats for each element of a row or head

// The inner loops, each over a range [begin, end) of one sample: its elements, rows or tokens.
struct Loops {
  double (*step)(const StepArgs&, int64_t begin, int64_t end);
  void (*score)(const ScoreArgs&, int64_t begin, int64_t end, double* sums);
  void (*score_backward)(const ScoreArgs&, const float* weight, void* dv, int64_t begin, int64_t end);
  void (*norm_modulate)(const ModulateArgs&, int64_t begin, int64_t end, float* scratch);
  void (*norm_modulate_backward)(const ModulateArgs&, int64_t begin, int64_t end, float* sums, float* scratch);
  void (*norm_rotate)(const RotateArgs&, int64_t begin, int64_t end, float* scratch);
  void (*norm_rotate_backward)(const RotateArgs&, int64_t begin, int64_t end, float* sums, float* scratch);
};

// The loops for the widest instruction set that this processor has.
const Loops& loops();

}  // namespace sage_fast
