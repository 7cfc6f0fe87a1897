// Reads and writes arrays of float32, bfloat16 or float16 as floats. Only this file widens and rounds bfloat16.

namespace sage_fast::INSTRUCTION_SET {

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

inline float from_bfloat16(uint16_t value) { return from_bits(static_cast<uint32_t>(value) << 16); }

inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  return value != value ? 0x7fc0 : static_cast<uint16_t>(rounded);
}

// Returns `n` elements from `begin` on as floats: a float array itself, else `buffer`, after widening into it.
inline const float* load(const Array& array, int64_t begin, int64_t n, float* buffer) {
  if (array.type == Type::float32) {
    return static_cast<const float*>(array.data) + begin;
  }
  if (array.type == Type::bfloat16) {
    const uint16_t* in = static_cast<const uint16_t*>(array.data) + begin;
    for (int64_t i = 0; i < n; ++i) buffer[i] = from_bfloat16(in[i]);
  } else {
    const _Float16* in = static_cast<const _Float16*>(array.data) + begin;
    for (int64_t i = 0; i < n; ++i) buffer[i] = static_cast<float>(in[i]);
  }
  return buffer;
}

// Rounds `values` to `type` and writes them to `data` from element `begin` on.
inline void store(void* data, Type type, int64_t begin, int64_t n, const float* values) {
  if (type == Type::float32) {
    std::memcpy(static_cast<float*>(data) + begin, values, n * sizeof(float));
  } else if (type == Type::bfloat16) {
    uint16_t* out = static_cast<uint16_t*>(data) + begin;
    for (int64_t i = 0; i < n; ++i) out[i] = to_bfloat16(values[i]);
  } else {
    _Float16* out = static_cast<_Float16*>(data) + begin;
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<_Float16>(values[i]);
  }
}

// Returns where to compute results: in place for floats, else in `buffer`, which `flush` then rounds and stores.
inline float* target(void* data, Type type, int64_t begin, float* buffer) {
  return type == Type::float32 ? static_cast<float*>(data) + begin : buffer;
}

inline void flush(void* data, Type type, int64_t begin, int64_t n, const float* buffer) {
  if (type != Type::float32) store(data, type, begin, n, buffer);
}

}  // namespace sage_fast::INSTRUCTION_SET
