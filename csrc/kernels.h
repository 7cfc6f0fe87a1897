// The transition operators over one contiguous range of one sample. No torch in here: the file is compiled once per
// instruction set (kernels_*.cpp), in a namespace of its own, and chosen at run time by kernels.cpp.
//
// Elements are handled in blocks that fit the first-level cache: each input is widened to float, the arithmetic runs
// over plain float arrays that the compiler vectorises, and sums are kept in 16 lanes, so that results depend neither on
// the number of threads nor on the vector width.

#include "kernels_api.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace sage_fast::KERNELS {

constexpr int64_t kBlock = 1024;  // elements; a multiple of 4 and of kLanes
constexpr int kLanes = 16;

// -- storage types ---------------------------------------------------------------------------------------------------

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline uint16_t round_to_bfloat16(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  return value != value ? 0x7fc0 : static_cast<uint16_t>(rounded);
}

// Element `begin` onwards as floats: the input itself where it is float, else widened into `buffer`.
inline const float* load(const Array& array, int64_t begin, int64_t n, float* buffer) {
  if (array.type == Type::float32) {
    return static_cast<const float*>(array.data) + begin;
  }
  if (array.type == Type::bfloat16) {
    const uint16_t* in = static_cast<const uint16_t*>(array.data) + begin;
    for (int64_t i = 0; i < n; ++i) buffer[i] = from_bits(static_cast<uint32_t>(in[i]) << 16);
  } else {
    const _Float16* in = static_cast<const _Float16*>(array.data) + begin;
    for (int64_t i = 0; i < n; ++i) buffer[i] = static_cast<float>(in[i]);
  }
  return buffer;
}

inline void store(void* data, Type type, int64_t begin, int64_t n, const float* values) {
  if (type == Type::float32) {
    std::memcpy(static_cast<float*>(data) + begin, values, n * sizeof(float));
  } else if (type == Type::bfloat16) {
    uint16_t* out = static_cast<uint16_t*>(data) + begin;
    for (int64_t i = 0; i < n; ++i) out[i] = round_to_bfloat16(values[i]);
  } else {
    _Float16* out = static_cast<_Float16*>(data) + begin;
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<_Float16>(values[i]);
  }
}

inline double sum_of_squares(const float* values, int64_t n) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += values[i + lane] * values[i + lane];
  }
  for (int lane = 0; i < n; ++i, ++lane) lanes[lane] += values[i] * values[i];
  double sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

// -- noise (specification: sage_fast/ops/philox.py) ------------------------------------------------------------------

inline void multiply(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) {
  const uint64_t product = static_cast<uint64_t>(a) * b;
  high = static_cast<uint32_t>(product >> 32);
  low = static_cast<uint32_t>(product);
}

// (w >> 8) 2^-24 + 2^-25, in (0, 1).
inline float uniform(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24f + 0x1p-25f;
}

// sqrt(-2 ln u): ln m = 2 atanh(s), s = (m-1)/(m+1), for the mantissa m in [sqrt(1/2), sqrt(2)).
inline float radius(float u) {
  const uint32_t shifted = to_bits(u) - 0x3f3504f3u;  // the bits of sqrt(1/2)
  const float exponent = static_cast<float>(static_cast<int32_t>(shifted) >> 23);
  const float m = from_bits((shifted & 0x007fffffu) + 0x3f3504f3u);
  const float s = (m - 1.0f) / (m + 1.0f);
  const float z = s * s;
  const float series = 1.0f + z * (1.0f / 3 + z * (1.0f / 5 + z * (1.0f / 7 + z * (1.0f / 9))));
  return std::sqrt(-2.0f * (exponent * 0.693147180559945f + 2.0f * s * series));
}

// sin and cos of 2 pi u: exact reduction to an eighth of a turn, then Taylor polynomials.
inline void sine_cosine(float u, float& sine, float& cosine) {
  const int32_t quarter = static_cast<int32_t>(4.0f * u + 0.5f);
  const float angle = 6.283185307179586f * (u - 0.25f * static_cast<float>(quarter));
  const float z = angle * angle;
  const float s = angle * (1 + z * (-1.0f / 6 + z * (1.0f / 120 + z * (-1.0f / 5040 + z * (1.0f / 362880)))));
  const float c =
      1 + z * (-0.5f + z * (1.0f / 24 + z * (-1.0f / 720 + z * (1.0f / 40320 + z * (-1.0f / 3628800)))));
  const bool swapped = quarter & 1;
  const float first = swapped ? c : s;
  const float second = swapped ? s : c;
  sine = (quarter & 2) ? -first : first;
  cosine = ((quarter + 1) & 2) ? -second : second;
}

// Elements [4 block, 4 block + 4 count) of a sample's noise.
inline void normal(uint64_t seed, uint32_t step, uint64_t block, int64_t count, float* out) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    uint32_t c0 = static_cast<uint32_t>(block + i), c1 = static_cast<uint32_t>((block + i) >> 32);
    uint32_t c2 = step, c3 = 0;
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      uint32_t high0, low0, high1, low1;
      multiply(c0, 0xD2511F53u, high0, low0);
      multiply(c2, 0xCD9E8D57u, high1, low1);
      c0 = high1 ^ c1 ^ k0;
      c1 = low1;
      c2 = high0 ^ c3 ^ k1;
      c3 = low0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    float sine, cosine;
    const float radius01 = radius(uniform(c0));
    sine_cosine(uniform(c1), sine, cosine);
    out[4 * i] = radius01 * cosine;
    out[4 * i + 1] = radius01 * sine;
    const float radius23 = radius(uniform(c2));
    sine_cosine(uniform(c3), sine, cosine);
    out[4 * i + 2] = radius23 * cosine;
    out[4 * i + 3] = radius23 * sine;
  }
}

// -- operators -------------------------------------------------------------------------------------------------------

// x_next = a x + b v + c noise over [begin, end), begin a multiple of 4; returns the sum of squared residuals of the
// values as stored.
double step(const StepArgs& args, int64_t begin, int64_t end) {
  float x_buffer[kBlock], v_buffer[kBlock], uncond_buffer[kBlock], mean[kBlock], next[kBlock + 4];
  const float a = args.row[0], b = args.row[1], c = args.row[2];
  double sum = 0;
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = std::min(kBlock, end - i);
    const float* x = load(args.x, i, n, x_buffer);
    const float* v = load(args.v, i, n, v_buffer);
    if (args.v_uncond.data != nullptr) {
      const float* uncond = load(args.v_uncond, i, n, uncond_buffer);
      for (int64_t j = 0; j < n; ++j) {
        mean[j] = a * x[j] + b * (uncond[j] + args.guidance * (v[j] - uncond[j]));
      }
    } else {
      for (int64_t j = 0; j < n; ++j) mean[j] = a * x[j] + b * v[j];
    }
    if (c != 0) {
      normal(args.seed, args.step, static_cast<uint64_t>(i) / 4, (n + 3) / 4, next);
      for (int64_t j = 0; j < n; ++j) next[j] = mean[j] + c * next[j];
    } else {
      std::copy(mean, mean + n, next);
    }
    store(args.x_next, args.x.type, i, n, next);
    if (args.x.type == Type::bfloat16) {
      for (int64_t j = 0; j < n; ++j) {
        next[j] = from_bits(static_cast<uint32_t>(round_to_bfloat16(next[j])) << 16) - mean[j];
      }
    } else {
      for (int64_t j = 0; j < n; ++j) next[j] -= mean[j];
    }
    sum += sum_of_squares(next, n);
  }
  return sum;
}

// Sums of (x_next - a x - b v)^2, (v - v_anchor)^2 and (v - v_old)^2 over [begin, end).
void score(const ScoreArgs& args, int64_t begin, int64_t end, double* sums) {
  float x_buffer[kBlock], next_buffer[kBlock], v_buffer[kBlock], other_buffer[kBlock], difference[kBlock];
  const float a = args.row[0], b = args.row[1];
  sums[0] = sums[1] = sums[2] = 0;
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = std::min(kBlock, end - i);
    const float* x = load(args.x, i, n, x_buffer);
    const float* next = load(args.x_next, i, n, next_buffer);
    const float* v = load(args.v, i, n, v_buffer);
    for (int64_t j = 0; j < n; ++j) difference[j] = next[j] - a * x[j] - b * v[j];
    sums[0] += sum_of_squares(difference, n);
    for (int k = 0; k < 2; ++k) {
      if (args.other[k].data == nullptr) continue;
      const float* other = load(args.other[k], i, n, other_buffer);
      for (int64_t j = 0; j < n; ++j) difference[j] = v[j] - other[j];
      sums[1 + k] += sum_of_squares(difference, n);
    }
  }
}

// dv = weight[0] (x_next - a x - b v) + weight[1] (v - v_anchor) + weight[2] (v - v_old) over [begin, end).
void score_backward(const ScoreArgs& args, const float* weight, void* dv, int64_t begin, int64_t end) {
  float x_buffer[kBlock], next_buffer[kBlock], v_buffer[kBlock], other_buffer[kBlock], out[kBlock];
  const float a = args.row[0], b = args.row[1];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = std::min(kBlock, end - i);
    const float* x = load(args.x, i, n, x_buffer);
    const float* next = load(args.x_next, i, n, next_buffer);
    const float* v = load(args.v, i, n, v_buffer);
    for (int64_t j = 0; j < n; ++j) out[j] = weight[0] * (next[j] - a * x[j] - b * v[j]);
    for (int k = 0; k < 2; ++k) {
      if (args.other[k].data == nullptr) continue;
      const float* other = load(args.other[k], i, n, other_buffer);
      for (int64_t j = 0; j < n; ++j) out[j] += weight[1 + k] * (v[j] - other[j]);
    }
    store(dv, args.v.type, i, n, out);
  }
}

}  // namespace sage_fast::KERNELS
