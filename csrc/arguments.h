// Types shared by the torch side and the inner loops. Does not include torch.
#pragma once

#include <cstdint>

namespace sage_fast {

enum class Type { float32, bfloat16, float16 };

struct Array {
  const void* data = nullptr;  // null: absent
  Type type = Type::float32;
};

// One row of the coefficient table: x_next = a x + b v + c noise, log-prob = w mean(residual^2) + k,
// KL = m mean(difference^2).
struct Row {
  float a, b, c, w, k, m;
};
static_assert(sizeof(Row) == 6 * sizeof(float), "rows are read from a contiguous table [T, 6]");

// One sample's velocity: v_uncond + guidance (v - v_uncond), or v if v_uncond is absent.
struct Velocity {
  Array v, v_uncond;
  float guidance;
};

// Arguments of transition_step for one sample.
struct StepArgs {
  Array x;
  Velocity v;
  void* x_next;
  Row row;
  uint64_t seed;
  uint32_t step;
};

// Arguments of transition_score for one sample.
struct ScoreArgs {
  Array x, x_next;
  Velocity v;
  Array other[2];  // anchor, rollout policy
  Row row;
  bool errors = false;  // whether the sums of the errors are wanted
  float beta = 0;
};

// Rows of one sample: x, y, sum, dy and residual [S, width]; scale, shift and gate [width]. `out` is the result
// [S, wide] or dx [S, width]; grad is [S, wide]. Only the first `width` columns of the result are written, and only
// those of grad are read. With a gate, sum = x + gate y is normalised, and a backward reads `sum` as x. `residual` is
// added to dx.
struct ModulateArgs {
  Array x, scale, shift, grad, y, gate, residual;
  void *out, *sum, *dy;
  int64_t width, wide;
  float eps;
};

// Heads of one sample's tokens, each `width` contiguous elements; strides in elements.
struct Heads {
  Array array;
  int64_t token_stride, head_stride;
};

// Arguments of norm_rotate for one sample. `joint` [S, 3, heads, width] holds queries, keys and values side by side,
// video tokens first. `out` is the queries and the keys [S, heads, width], `grad` the gradients of all three; `d_joint`
// is like joint.
struct RotateArgs {
  Array joint;
  bool all_heads;       // whether all heads of a token are normalised together, or each by itself
  Array weights[2][2];  // [query or key][video or text], each [width], or [heads, width] with all_heads
  const float* rotary;  // [video_tokens, width / 2, 2]
  Heads grad[3];
  void *out[2], *d_joint;
  int64_t video_tokens, heads, width;
  float eps;
};

constexpr int64_t kModulateScratch = 10, kRotateScratch = 11;  // floats per element of a row, or of what is normalised together

// The inner loops. Each covers a range [begin, end) of one sample's elements, rows or tokens.
struct Loops {
  double (*step)(const StepArgs&, int64_t begin, int64_t end);
  void (*score)(const ScoreArgs&, int64_t begin, int64_t end, double* sums);
  void (*score_backward)(const ScoreArgs&, const float* weight, void* dv, void* dv_uncond, int64_t begin, int64_t end);
  void (*norm_modulate)(const ModulateArgs&, int64_t begin, int64_t end, float* scratch);
  void (*norm_modulate_backward)(const ModulateArgs&, int64_t begin, int64_t end, float* sums, float* scratch);
  void (*norm_rotate)(const RotateArgs&, int64_t begin, int64_t end, float* scratch);
  void (*norm_rotate_backward)(const RotateArgs&, int64_t begin, int64_t end, float* sums, float* scratch);
};

// Returns the loops for the widest instruction set that this processor supports.
const Loops& loops();

}  // namespace sage_fast
