// Noise of the transitions; the specification is sage_fast/ops/philox.py. Uses storage.h.

namespace sage_fast::INSTRUCTION_SET {

inline void multiply(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) {
  const uint64_t product = static_cast<uint64_t>(a) * b;
  high = static_cast<uint32_t>(product >> 32);
  low = static_cast<uint32_t>(product);
}

// Returns (w >> 8) 2^-24 + 2^-25, in (0, 1].
inline float uniform(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24f + 0x1p-25f;
}

// Returns sqrt(-2 ln u), from ln m = 2 atanh(s) with s = (m-1)/(m+1) for the mantissa m in [sqrt(1/2), sqrt(2)).
inline float radius(float u) {
  const uint32_t shifted = to_bits(u) - 0x3f3504f3u;  // the bits of sqrt(1/2)
  const float exponent = static_cast<float>(static_cast<int32_t>(shifted) >> 23);
  const float m = from_bits((shifted & 0x007fffffu) + 0x3f3504f3u);
  const float s = (m - 1.0f) / (m + 1.0f);
  const float z = s * s;
  const float series = 1.0f + z * (1.0f / 3 + z * (1.0f / 5 + z * (1.0f / 7 + z * (1.0f / 9))));
  return std::sqrt(-2.0f * (exponent * 0.693147180559945f + 2.0f * s * series));
}

// Computes sin and cos of 2 pi u: exact reduction to an eighth of a turn, then Taylor polynomials.
inline void sine_cosine(float u, float& sine, float& cosine) {
  const int32_t quarter = static_cast<int32_t>(4.0f * u + 0.5f);
  const float angle = 6.283185307179586f * (u - 0.25f * static_cast<float>(quarter));
  const float z = angle * angle;
  const float s = angle * (1 + z * (-1.0f / 6 + z * (1.0f / 120 + z * (-1.0f / 5040 + z * (1.0f / 362880)))));
  const float c = 1 + z * (-0.5f + z * (1.0f / 24 + z * (-1.0f / 720 + z * (1.0f / 40320 + z * (-1.0f / 3628800)))));
  const bool swapped = quarter & 1;
  const float first = swapped ? c : s;
  const float second = swapped ? s : c;
  sine = (quarter & 2) ? -first : first;
  cosine = ((quarter + 1) & 2) ? -second : second;
}

// Writes elements [4 block, 4 block + 4 count) of a sample's noise to `out`.
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

}  // namespace sage_fast::INSTRUCTION_SET
