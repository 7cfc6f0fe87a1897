// Sums over 16 lanes, so that a result does not depend on the vector width.

namespace sage_fast::INSTRUCTION_SET {

constexpr int kLanes = 16;

// Four floats, a register of every processor: wider vectors than those of the instruction set would live in memory.
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));

inline Quad quad_at(const float* values) { return *reinterpret_cast<const Quad*>(values); }

// Sixteen lanes of a sum.
struct Lanes {
  Quad quads[4] = {};

  // Adds lanes i and i + 8, then i and i + 4, i + 2, i + 1.
  float total() const {
    const Quad s = (quads[0] + quads[2]) + (quads[1] + quads[3]);
    return (s[0] + s[2]) + (s[1] + s[3]);
  }
};

inline float dot(const float* x, const float* y, int64_t n) {
  Lanes lanes;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int k = 0; k < 4; ++k) lanes.quads[k] += quad_at(x + i + 4 * k) * quad_at(y + i + 4 * k);
  }
  float rest = 0;
  for (; i < n; ++i) rest += x[i] * y[i];
  return lanes.total() + rest;
}

inline float sum(const float* x, int64_t n) {
  Lanes lanes;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int k = 0; k < 4; ++k) lanes.quads[k] += quad_at(x + i + 4 * k);
  }
  float rest = 0;
  for (; i < n; ++i) rest += x[i];
  return lanes.total() + rest;
}

// Sums f(value): accumulates in float lanes and adds the lanes in double.
template <typename F>
double sum_of(const float* values, int64_t n, F f) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += f(values[i + lane]);
  }
  for (int lane = 0; i < n; ++i, ++lane) lanes[lane] += f(values[i]);
  double sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

inline double sum_of_squares(const float* values, int64_t n) {
  return sum_of(values, n, [](float value) { return value * value; });
}

inline double sum_of_magnitudes(const float* values, int64_t n) {
  return sum_of(values, n, [](float value) { return std::fabs(value); });
}

}  // namespace sage_fast::INSTRUCTION_SET
