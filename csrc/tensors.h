// Converts tensors of torch's stable ABI to the arrays of the inner loops, and runs these in parallel over samples.
#pragma once

#include "arguments.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

namespace sage_fast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kChunk = 1 << 15;     // elements of one sample per task
constexpr int64_t kRowChunk = 1 << 13;  // the same for the normalisations, whose samples may be small
constexpr int64_t kRowChunks = 128;     // most tasks of one sample there: each has scratch and sums as wide as a row

inline Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Type::float32;
    case ScalarType::BFloat16: return Type::bfloat16;
    case ScalarType::Half: return Type::float16;
    default: STD_TORCH_CHECK(false, "expected float32, bfloat16 or float16"); return Type::float32;
  }
}

inline Array array_of(const Tensor& contiguous) { return {contiguous.const_data_ptr(), type_of(contiguous)}; }

inline int64_t size_of(Type type) { return type == Type::float32 ? 4 : 2; }

// A contiguous tensor [B, ...] as B samples.
class Samples {
 public:
  Samples() = default;
  explicit Samples(const Tensor& tensor) : tensor_(torch::stable::contiguous(tensor)), type_(type_of(tensor)) {
    count_ = tensor_->size(0);
    numel_ = 1;
    for (int64_t d = 1; d < tensor_->dim(); ++d) numel_ *= tensor_->size(d);
  }
  explicit Samples(const std::optional<Tensor>& tensor) {
    if (tensor.has_value()) *this = Samples(*tensor);
  }

  int64_t count() const { return count_; }
  int64_t numel() const { return numel_; }
  Type type() const { return type_; }

  Array operator[](int64_t sample) const {
    if (!tensor_.has_value()) return {};
    return {static_cast<const char*>(tensor_->const_data_ptr()) + sample * numel_ * size_of(type_), type_};
  }

 private:
  std::optional<Tensor> tensor_;
  Type type_ = Type::float32;
  int64_t count_ = 0, numel_ = 0;
};

// Velocities [B, ...] of B samples, guided if there are unconditional ones.
struct Velocities {
  Velocities(const Tensor& v, const std::optional<Tensor>& v_uncond, std::optional<double> guidance)
      : vs(v), unconds(v_uncond), scale(static_cast<float>(guidance.value_or(1))) {}

  Velocity operator[](int64_t sample) const { return {vs[sample], unconds[sample], scale}; }

  Samples vs, unconds;
  float scale;
};

// Each sample's row of the coefficient table.
class Rows {
 public:
  Rows(const Tensor& coefs, const Tensor& step, int64_t samples)
      : coefs_(torch::stable::contiguous(coefs)), step_(torch::stable::contiguous(step)), single_(step.dim() == 0) {
    STD_TORCH_CHECK(coefs.scalar_type() == ScalarType::Float, "coefs: expected float32");
    for (int64_t i = 0; i < samples; ++i) {
      const int64_t t = this->step(i);
      STD_TORCH_CHECK(t >= 0 && t < coefs_.size(0), "step ", t, " is outside the table of ", coefs_.size(0), " rows");
    }
  }
  int64_t step(int64_t sample) const {
    return static_cast<const int64_t*>(step_.const_data_ptr())[single_ ? 0 : sample];
  }
  Row operator[](int64_t sample) const {
    Row row;
    std::memcpy(&row, static_cast<const Row*>(coefs_.const_data_ptr()) + step(sample), sizeof row);
    return row;
  }

 private:
  Tensor coefs_, step_;
  bool single_;
};

inline int64_t chunks_of(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

// Calls f(sample, chunk, begin, end) in parallel for fixed chunks of every sample. Chunks do not depend on the number
// of threads, so neither do sums over them.
template <class F>
void for_each_chunk(const Samples& x, const F& f) {
  const int64_t chunks = chunks_of(x.numel());
  torch::stable::parallel_for(0, x.count() * chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = task % chunks * kChunk;
      f(task / chunks, task % chunks, begin, std::min(begin + kChunk, x.numel()));
    }
  });
}

inline int64_t rows_of_chunk(int64_t rows, int64_t width) {
  return std::max({kRowChunk / std::max<int64_t>(width, 1), (rows + kRowChunks - 1) / kRowChunks, int64_t{1}});
}

inline int64_t row_chunks_of(int64_t rows, int64_t width) {
  const int64_t size = rows_of_chunk(rows, width);
  return (rows + size - 1) / size;
}

// Calls f(sample, chunk, begin, end) in parallel for fixed chunks of every sample's rows of `width` elements.
template <class F>
void for_each_rows(int64_t samples, int64_t rows, int64_t width, const F& f) {
  const int64_t size = rows_of_chunk(rows, width), chunks = row_chunks_of(rows, width);
  torch::stable::parallel_for(0, samples * chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = task % chunks * size;
      f(task / chunks, task % chunks, begin, std::min(begin + size, rows));
    }
  });
}

// `count` sums of `sum_width` floats for each chunk of `for_each_rows`. They are added in order, so results do not
// depend on the number of threads.
class Partials {
 public:
  Partials(bool wanted, int64_t samples, int64_t rows, int64_t width, int64_t count, int64_t sum_width)
      : chunks_(row_chunks_of(rows, width)),
        count_(count),
        width_(sum_width),
        sums_(wanted ? samples * chunks_ * count * sum_width : 0) {}

  float* of(int64_t sample, int64_t chunk) {
    return sums_.empty() ? nullptr : &sums_[(sample * chunks_ + chunk) * count_ * width_];
  }
  void add(int64_t sample, int64_t k, float* out) const {
    std::fill(out, out + width_, 0.0f);
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const float* sums = &sums_[((sample * chunks_ + chunk) * count_ + k) * width_];
      for (int64_t j = 0; j < width_; ++j) out[j] += sums[j];
    }
  }

 private:
  int64_t chunks_, count_, width_;
  std::vector<float> sums_;
};

// A tensor [B, d] as one contiguous vector per sample, with any stride between vectors, 0 included.
class Vectors {
 public:
  Vectors() = default;
  explicit Vectors(const Tensor& tensor)
      : tensor_(tensor.stride(1) == 1 || tensor.size(1) == 1 ? tensor : torch::stable::contiguous(tensor)),
        type_(type_of(tensor)) {}
  explicit Vectors(const std::optional<Tensor>& tensor) {
    if (tensor.has_value()) *this = Vectors(*tensor);
  }
  Array operator[](int64_t sample) const {
    if (!tensor_.has_value()) return {};
    return {static_cast<const char*>(tensor_->const_data_ptr()) + sample * tensor_->stride(0) * size_of(type_), type_};
  }

 private:
  std::optional<Tensor> tensor_;
  Type type_ = Type::float32;
};

// Returns the mean over a sample from the sums of its chunks, added in order; 0 for an empty sample.
inline double mean_of_chunks(const std::vector<double>& sums, int64_t sample, int64_t numel, int64_t width, int64_t k) {
  const int64_t chunks = chunks_of(numel);
  double sum = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += sums[(sample * chunks + chunk) * width + k];
  return sum / std::max<int64_t>(numel, 1);
}

inline Tensor new_sized(const Tensor& like, const std::vector<int64_t>& sizes) {
  return torch::stable::new_empty(like, {sizes.data(), sizes.size()});
}

inline Tensor new_like(const Tensor& like) { return new_sized(like, {like.sizes().begin(), like.sizes().end()}); }

inline Tensor new_floats(const Tensor& like, const std::vector<int64_t>& sizes) {
  return torch::stable::new_empty(like, {sizes.data(), sizes.size()}, ScalarType::Float);
}

}  // namespace sage_fast
