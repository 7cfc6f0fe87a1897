// The transition operators over a range of one sample's elements. Uses storage.h, philox.h and sums.h.
//
// Elements are processed in blocks that fit the L1 cache: each input is widened to float, and the compiler vectorises
// the arithmetic over plain float arrays.

namespace sage_fast::INSTRUCTION_SET {

constexpr int64_t kBlock = 1024;  // elements; a multiple of 4 and of kLanes

// Returns `n` velocities from `begin` on as floats, the guided ones computed in `buffer`. Each operation rounds, as in
// PyTorch: in one loop, the compiler would contract the last two to a fused multiply-add.
inline const float* load(const Velocity& velocity, int64_t begin, int64_t n, float* buffer, float* uncond_buffer) {
  const float* v = load(velocity.v, begin, n, buffer);
  if (velocity.v_uncond.data == nullptr) return v;
  const float* uncond = load(velocity.v_uncond, begin, n, uncond_buffer);
  for (int64_t j = 0; j < n; ++j) buffer[j] = velocity.guidance * (v[j] - uncond[j]);
  for (int64_t j = 0; j < n; ++j) buffer[j] += uncond[j];
  return buffer;
}

// Computes x_next = a x + b v + c noise over [begin, end), begin a multiple of 4. Returns the sum of squared residuals
// of the stored, rounded values.
double step(const StepArgs& args, int64_t begin, int64_t end) {
  float x_buffer[kBlock], v_buffer[kBlock], mean[kBlock], next[kBlock + 4];
  const float a = args.row.a, b = args.row.b, c = args.row.c;
  double sum = 0;
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = std::min(kBlock, end - i);
    const float* x = load(args.x, i, n, x_buffer);
    const float* v = load(args.v, i, n, v_buffer, next);
    for (int64_t j = 0; j < n; ++j) mean[j] = a * x[j] + b * v[j];
    if (c != 0) {
      normal(args.seed, args.step, static_cast<uint64_t>(i) / 4, (n + 3) / 4, next);
      for (int64_t j = 0; j < n; ++j) next[j] = mean[j] + c * next[j];
    } else {
      std::copy(mean, mean + n, next);
    }
    store(args.x_next, args.x.type, i, n, next);
    if (args.x.type == Type::bfloat16) {
      for (int64_t j = 0; j < n; ++j) {
        next[j] = from_bfloat16(to_bfloat16(next[j])) - mean[j];
      }
    } else {
      for (int64_t j = 0; j < n; ++j) next[j] -= mean[j];
    }
    sum += sum_of_squares(next, n);
  }
  return sum;
}

// Computes the sums of (x_next - a x - b v)^2, (v - v_anchor)^2 and (v - v_old)^2 over [begin, end), and with `errors`
// those of |x_next - a x - b v + (1 -+ beta) b (v - v_old)|.
void score(const ScoreArgs& args, int64_t begin, int64_t end, double* sums) {
  float x_buffer[kBlock], next_buffer[kBlock], v_buffer[kBlock], other_buffer[kBlock];
  float residual[kBlock], difference[kBlock];
  const float a = args.row.a, b = args.row.b;
  std::fill(sums, sums + 5, 0.0);
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = std::min(kBlock, end - i);
    const float* x = load(args.x, i, n, x_buffer);
    const float* next = load(args.x_next, i, n, next_buffer);
    const float* v = load(args.v, i, n, v_buffer, other_buffer);
    for (int64_t j = 0; j < n; ++j) residual[j] = next[j] - a * x[j] - b * v[j];
    sums[0] += sum_of_squares(residual, n);
    for (int k = 0; k < 2; ++k) {
      if (args.other[k].data == nullptr) continue;
      const float* other = load(args.other[k], i, n, other_buffer);
      for (int64_t j = 0; j < n; ++j) difference[j] = v[j] - other[j];
      sums[1 + k] += sum_of_squares(difference, n);
    }
    if (!args.errors) continue;
    if (args.other[1].data == nullptr) std::fill(difference, difference + n, 0.0f);  // v stands for v_old
    for (int k = 0; k < 2; ++k) {
      const float share = (k == 0 ? 1 - args.beta : 1 + args.beta) * b;
      for (int64_t j = 0; j < n; ++j) other_buffer[j] = residual[j] + share * difference[j];
      sums[3 + k] += sum_of_magnitudes(other_buffer, n);
    }
  }
}

// Computes dv = weight[0] (x_next - a x - b v) + weight[1] (v - v_anchor) + weight[2] (v - v_old) over [begin, end).
// With guidance, the gradients of the two velocities: dv times guidance and times 1 - guidance.
void score_backward(const ScoreArgs& args, const float* weight, void* dv, void* dv_uncond, int64_t begin, int64_t end) {
  float x_buffer[kBlock], next_buffer[kBlock], v_buffer[kBlock], other_buffer[kBlock], out[kBlock];
  const float a = args.row.a, b = args.row.b;
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = std::min(kBlock, end - i);
    const float* x = load(args.x, i, n, x_buffer);
    const float* next = load(args.x_next, i, n, next_buffer);
    const float* v = load(args.v, i, n, v_buffer, other_buffer);
    for (int64_t j = 0; j < n; ++j) out[j] = weight[0] * (next[j] - a * x[j] - b * v[j]);
    for (int k = 0; k < 2; ++k) {
      if (args.other[k].data == nullptr) continue;
      const float* other = load(args.other[k], i, n, other_buffer);
      for (int64_t j = 0; j < n; ++j) out[j] += weight[1 + k] * (v[j] - other[j]);
    }
    if (args.v.v_uncond.data != nullptr) {
      for (int64_t j = 0; j < n; ++j) other_buffer[j] = (1 - args.v.guidance) * out[j];
      store(dv_uncond, args.v.v_uncond.type, i, n, other_buffer);
      for (int64_t j = 0; j < n; ++j) out[j] *= args.v.guidance;
    }
    store(dv, args.v.v.type, i, n, out);
  }
}

}  // namespace sage_fast::INSTRUCTION_SET
