// gated_norm and its backward on the CPU; the specification is sage_fast/ops/gated_norm.py.
#include "modulate.h"

#include <tuple>

namespace sage_fast {

std::tuple<Tensor, Tensor> gated_norm(const Tensor& x, const Tensor& y, const Tensor& gate, const Tensor& scale,
                                      const Tensor& shift, double eps, int64_t pad) {
  ModulateInputs in(x, scale, eps, x.size(2) + pad);
  in.shifts = Vectors(shift);
  in.gates = Vectors(gate);
  in.ys = Samples(y);
  Tensor sum = new_like(x), out = new_sized(x, {x.size(0), in.rows, in.wide});
  modulate_forward(in, out, &sum);
  return {sum, out};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gated_norm_backward(const Tensor& grad_sum, const Tensor& grad,
                                                                       const Tensor& sum, const Tensor& gate,
                                                                       const Tensor& scale,
                                                                       const std::optional<Tensor>& y, double eps) {
  ModulateInputs in(sum, scale, eps, grad.size(2));
  in.grads = Samples(grad);
  in.residuals = Samples(grad_sum);
  in.gates = Vectors(gate);
  in.ys = Samples(y);
  Tensor dx = new_like(sum), dy = new_like(sum), sums[3] = {dx, dx, dx};
  modulate_backward(in, dx, &dy, sums, 3, y.has_value());
  return {dx, dy, sums[2], sums[0], sums[1]};
}

STABLE_TORCH_LIBRARY_FRAGMENT(sage_fast_cpu, m) {
  m.def(
      "gated_norm(Tensor x, Tensor y, Tensor gate, Tensor scale, Tensor shift, float eps, int pad=0)"
      " -> (Tensor, Tensor)");
  m.def(
      "gated_norm_backward(Tensor grad_sum, Tensor grad, Tensor sum, Tensor gate, Tensor scale, Tensor? y, float eps)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(sage_fast_cpu, CPU, m) {
  m.impl("gated_norm", TORCH_BOX(&gated_norm));
  m.impl("gated_norm_backward", TORCH_BOX(&gated_norm_backward));
}

}  // namespace sage_fast
