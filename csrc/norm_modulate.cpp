// norm_modulate and its backward on the CPU; the specification is sage_fast/ops/norm_modulate.py.
#include "modulate.h"

#include <tuple>

namespace sage_fast {

Tensor norm_modulate(const Tensor& x, const Tensor& scale, const Tensor& shift, double eps, int64_t pad,
                     int64_t pad_rows) {
  ModulateInputs in(x, scale, eps, x.size(2) + pad);
  in.shifts = Vectors(shift);
  Tensor out = new_sized(x, {x.size(0), in.rows + pad_rows, in.wide});
  modulate_forward(in, out, nullptr);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> norm_modulate_backward(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                                          double eps, bool modulation,
                                                          const std::optional<Tensor>& residual) {
  ModulateInputs in(x, scale, eps, grad.size(2));
  in.grads = Samples(grad);
  in.residuals = Samples(residual);
  Tensor dx = new_like(x), sums[2] = {dx, dx};
  modulate_backward(in, dx, nullptr, sums, 2, modulation);
  return {dx, sums[0], sums[1]};
}

STABLE_TORCH_LIBRARY_FRAGMENT(sage_fast_cpu, m) {
  m.def("norm_modulate(Tensor x, Tensor scale, Tensor shift, float eps, int pad=0, int pad_rows=0) -> Tensor");
  m.def(
      "norm_modulate_backward(Tensor grad, Tensor x, Tensor scale, float eps, bool modulation,"
      " Tensor? residual=None) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(sage_fast_cpu, CPU, m) {
  m.impl("norm_modulate", TORCH_BOX(&norm_modulate));
  m.impl("norm_modulate_backward", TORCH_BOX(&norm_modulate_backward));
}

}  // namespace sage_fast
