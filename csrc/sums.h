// Sums over 16 lanes, so that a result does not depend on the vector width.

namespace sage_fast::INSTRUCTION_SET {

constexpr int kLanes = 16;

// Sixteen floats; the compiler splits them for narrower registers.
typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));

inline Lanes lanes_at(const float* values) { return *reinterpret_cast<const Lanes*>(values); }

inline float total(const Lanes& lanes) {
  Lanes s = lanes + __builtin_shufflevector(lanes, lanes, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  s += __builtin_shufflevector(s, s, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  s += __builtin_shufflevector(s, s, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  s += __builtin_shufflevector(s, s, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return s[0];
}

inline float dot(const float* a, const float* b, int64_t n) {
  Lanes lanes = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) lanes += lanes_at(a + i) * lanes_at(b + i);
  float rest = 0;
  for (; i < n; ++i) rest += a[i] * b[i];
  return total(lanes) + rest;
}

inline float sum(const float* a, int64_t n) {
  Lanes lanes = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) lanes += lanes_at(a + i);
  float rest = 0;
  for (; i < n; ++i) rest += a[i];
  return total(lanes) + rest;
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
