// Sums over 16 lanes, so that a result does not depend on the vector width.

namespace sage_fast::INSTRUCTION_SET {

constexpr int kLanes = 16;

// Four floats, a register of every processor: wider vectors than those of the instruction set would live in memory.
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));

inline Quad quad_at(const float* values) { return *reinterpret_cast<const Quad*>(values); }

// Adds lanes i and i + 8, then i and i + 4, i + 2, i + 1.
inline float total(Quad a, Quad b, Quad c, Quad d) {
  const Quad s = (a + c) + (b + d);
  return (s[0] + s[2]) + (s[1] + s[3]);
}

inline float dot(const float* x, const float* y, int64_t n) {
  Quad a = {}, b = {}, c = {}, d = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    a += quad_at(x + i) * quad_at(y + i);
    b += quad_at(x + i + 4) * quad_at(y + i + 4);
    c += quad_at(x + i + 8) * quad_at(y + i + 8);
    d += quad_at(x + i + 12) * quad_at(y + i + 12);
  }
  float rest = 0;
  for (; i < n; ++i) rest += x[i] * y[i];
  return total(a, b, c, d) + rest;
}

inline float sum(const float* x, int64_t n) {
  Quad a = {}, b = {}, c = {}, d = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    a += quad_at(x + i);
    b += quad_at(x + i + 4);
    c += quad_at(x + i + 8);
    d += quad_at(x + i + 12);
  }
  float rest = 0;
  for (; i < n; ++i) rest += x[i];
  return total(a, b, c, d) + rest;
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
