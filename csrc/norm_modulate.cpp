// norm_modulate and its backward on the CPU; the specification is sage_fast/ops/norm_modulate.py.
#include "tensors.h"

#include <tuple>

namespace sage_fast {

namespace {

// The arguments by sample: x [B, S, d], scale and shift [B, d] with any stride between samples.
struct Inputs {
  Inputs(const Tensor& x, const Tensor& scale, const std::optional<Tensor>& shift, double eps, int64_t wide)
      : xs(x), scales(scale), shifts(shift), eps(static_cast<float>(eps)), wide(wide) {
    rows = x.size(1);
    width = x.size(2);
  }

  ModulateArgs operator[](int64_t i) const { return {xs[i], scales[i], shifts[i], {}, nullptr, width, wide, eps}; }

  Samples xs;
  Vectors scales, shifts;
  float eps;
  int64_t wide, rows, width;
};

}  // namespace

Tensor norm_modulate(const Tensor& x, const Tensor& scale, const Tensor& shift, double eps, int64_t room) {
  const Inputs in(x, scale, shift, eps, x.size(2) + room);
  Tensor out = new_sized(x, {x.size(0), in.rows, in.wide});
  char* data = static_cast<char*>(out.mutable_data_ptr());
  for_each_rows(in.xs.count(), in.rows, in.width, [&](int64_t i, int64_t, int64_t begin, int64_t end) {
    std::vector<float> scratch(kModulateScratch * in.width);
    ModulateArgs args = in[i];
    args.out = data + i * in.rows * in.wide * size_of(in.xs.type());
    loops().norm_modulate(args, begin, end, scratch.data());
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> norm_modulate_backward(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                                          double eps, bool modulation) {
  const Inputs in(x, scale, std::nullopt, eps, grad.size(2));
  const Samples grads(grad);
  Tensor dx = new_like(x);
  char* data = static_cast<char*>(dx.mutable_data_ptr());
  Partials partials(modulation, in.xs.count(), in.rows, in.width);
  for_each_rows(in.xs.count(), in.rows, in.width, [&](int64_t i, int64_t chunk, int64_t begin, int64_t end) {
    std::vector<float> scratch(kModulateScratch * in.width);
    ModulateArgs args = in[i];
    args.grad = grads[i];
    args.out = data + i * in.xs.numel() * size_of(in.xs.type());
    loops().norm_modulate_backward(args, begin, end, partials.of(i, chunk), scratch.data());
  });
  const int64_t samples = modulation ? in.xs.count() : 0;
  Tensor dscale = new_floats(x, {samples, in.width}), dshift = new_floats(x, {samples, in.width});
  for (int64_t i = 0; i < samples; ++i) {
    partials.add(i, 0, static_cast<float*>(dscale.mutable_data_ptr()) + i * in.width);
    partials.add(i, 1, static_cast<float*>(dshift.mutable_data_ptr()) + i * in.width);
  }
  return {dx, dscale, dshift};
}

STABLE_TORCH_LIBRARY_FRAGMENT(sage_fast_cpu, m) {
  m.def("norm_modulate(Tensor x, Tensor scale, Tensor shift, float eps, int room=0) -> Tensor");
  m.def(
      "norm_modulate_backward(Tensor grad, Tensor x, Tensor scale, float eps, bool modulation)"
      " -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(sage_fast_cpu, CPU, m) {
  m.impl("norm_modulate", TORCH_BOX(&norm_modulate));
  m.impl("norm_modulate_backward", TORCH_BOX(&norm_modulate_backward));
}

}  // namespace sage_fast
