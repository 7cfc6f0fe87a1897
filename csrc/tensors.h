// From stable-ABI tensors to the kernels' arrays, and the parallel loop that both operators use.
#pragma once

#include "kernels_api.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace sage_fast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kColumns = 6;      // a, b, c, w, k, m
constexpr int64_t kChunk = 1 << 15;  // elements of one sample that one task handles

inline Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Type::float32;
    case ScalarType::BFloat16: return Type::bfloat16;
    case ScalarType::Half: return Type::float16;
    default: STD_TORCH_CHECK(false, "expected float32, bfloat16 or float16"); return Type::float32;
  }
}

inline int64_t size_of(Type type) { return type == Type::float32 ? 4 : 2; }

// A contiguous tensor [B, ...] seen as B samples.
class Samples {
 public:
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

// Rows of the coefficient table by sample.
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
  const float* operator[](int64_t sample) const {
    return static_cast<const float*>(coefs_.const_data_ptr()) + kColumns * step(sample);
  }

 private:
  Tensor coefs_, step_;
  bool single_;
};

// Calls f(sample, chunk, begin, end) for fixed chunks of every sample, in parallel. Chunks do not depend on the number of
// threads, so neither do sums over them.
template <class F>
void for_each_chunk(const Samples& x, const F& f) {
  const int64_t chunks = (x.numel() + kChunk - 1) / kChunk;
  torch::stable::parallel_for(0, x.count() * chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = task % chunks * kChunk;
      f(task / chunks, task % chunks, begin, std::min(begin + kChunk, x.numel()));
    }
  });
}

// Mean over a sample from its chunks' sums, added in order; 0 for samples without elements.
inline double mean_of_chunks(const std::vector<double>& sums, int64_t sample, int64_t numel, int64_t width, int64_t k) {
  const int64_t chunks = (numel + kChunk - 1) / kChunk;
  double sum = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += sums[(sample * chunks + chunk) * width + k];
  return sum / std::max<int64_t>(numel, 1);
}

inline Tensor new_floats(const Tensor& like, int64_t count) {
  const int64_t sizes[] = {count};
  return torch::stable::new_empty(like, {sizes, 1}, ScalarType::Float);
}

}  // namespace sage_fast
