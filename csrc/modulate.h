// Shared by norm_modulate and gated_norm on the torch side: arguments by sample, forward and backward.
#pragma once

#include "tensors.h"

namespace sage_fast {

// Arguments by sample: x, y and residual [B, S, d]; scale, shift and gate [B, d] with any stride between samples; grad
// [B, at least S, wide].
struct ModulateInputs {
  ModulateInputs(const Tensor& x, const Tensor& scale, double eps, int64_t wide)
      : xs(x), scales(scale), eps(static_cast<float>(eps)), wide(wide) {
    rows = x.size(1);
    width = x.size(2);
    size = size_of(xs.type());
  }

  ModulateArgs operator[](int64_t i) const {
    ModulateArgs args{};
    args.x = xs[i];
    args.scale = scales[i];
    args.shift = shifts[i];
    args.grad = grads[i];
    args.y = ys[i];
    args.gate = gates[i];
    args.residual = residuals[i];
    args.width = width;
    args.wide = wide;
    args.eps = eps;
    return args;
  }

  Samples xs, ys, grads, residuals;
  Vectors scales, shifts, gates;
  float eps;
  int64_t wide, rows, width, size;
};

inline char* data_of(const Tensor& tensor) { return static_cast<char*>(tensor.mutable_data_ptr()); }

// Computes `out` [B, S + pad_rows, wide], with zero padding rows, and with a gate `sum`.
inline void modulate_forward(const ModulateInputs& in, const Tensor& out, const Tensor* sum) {
  const int64_t bytes = out.size(1) * in.wide * in.size, used = in.rows * in.wide * in.size;
  char* data = data_of(out);
  for_each_rows(in.xs.count(), in.rows, in.width, [&](int64_t i, int64_t, int64_t begin, int64_t end) {
    std::vector<float> scratch(kModulateScratch * in.width);
    ModulateArgs args = in[i];
    args.out = data + i * bytes;
    if (sum != nullptr) args.sum = data_of(*sum) + i * in.xs.numel() * in.size;
    loops().norm_modulate(args, begin, end, scratch.data());
  });
  for (int64_t i = 0; i < in.xs.count(); ++i) std::memset(data + i * bytes + used, 0, bytes - used);
}

// Computes dx, with a gate dy, and if wanted `count` sums over the rows of each sample.
inline void modulate_backward(const ModulateInputs& in, const Tensor& dx, const Tensor* dy, Tensor* sums,
                              int64_t count, bool wanted) {
  Partials partials(wanted, in.xs.count(), in.rows, in.width, count, in.width);
  for_each_rows(in.xs.count(), in.rows, in.width, [&](int64_t i, int64_t chunk, int64_t begin, int64_t end) {
    std::vector<float> scratch(kModulateScratch * in.width);
    ModulateArgs args = in[i];
    args.out = data_of(dx) + i * in.xs.numel() * in.size;
    if (dy != nullptr) args.dy = data_of(*dy) + i * in.xs.numel() * in.size;
    loops().norm_modulate_backward(args, begin, end, partials.of(i, chunk), scratch.data());
  });
  const int64_t samples = wanted ? in.xs.count() : 0;
  for (int64_t k = 0; k < count; ++k) {
    sums[k] = new_floats(dx, {samples, in.width});
    for (int64_t i = 0; i < samples; ++i) {
      partials.add(i, k, static_cast<float*>(sums[k].mutable_data_ptr()) + i * in.width);
    }
  }
}

}  // namespace sage_fast
