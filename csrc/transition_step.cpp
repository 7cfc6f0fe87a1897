// transition_step on the CPU; the specification is sage_fast/ops/transition_step.py.
#include "tensors.h"

#include <tuple>

namespace sage_fast {

std::tuple<Tensor, Tensor> transition_step(const Tensor& x, const Tensor& v, const std::optional<Tensor>& v_uncond,
                                           std::optional<double> guidance, const Tensor& coefs, const Tensor& step,
                                           const Tensor& seed) {
  const Samples xs(x);
  const Velocities vs(v, v_uncond, guidance);
  STD_TORCH_CHECK(xs.type() != Type::float16, "x: expected float32 or bfloat16");
  const Rows rows(coefs, step, xs.count());
  const Tensor seeds = torch::stable::contiguous(seed);

  Tensor x_next = new_like(x);
  Tensor log_prob = new_floats(x, {xs.count()});
  char* out = static_cast<char*>(x_next.mutable_data_ptr());
  const int64_t chunks = chunks_of(xs.numel());
  std::vector<double> sums(xs.count() * chunks);
  for_each_chunk(xs, [&](int64_t i, int64_t chunk, int64_t begin, int64_t end) {
    StepArgs args{xs[i], vs[i], out + i * xs.numel() * size_of(xs.type()), rows[i], 0, 0};
    args.seed = static_cast<const uint64_t*>(seeds.const_data_ptr())[i];
    args.step = static_cast<uint32_t>(rows.step(i));
    sums[i * chunks + chunk] = loops().step(args, begin, end);
  });
  float* log_probs = static_cast<float*>(log_prob.mutable_data_ptr());
  for (int64_t i = 0; i < xs.count(); ++i) {
    const Row row = rows[i];
    log_probs[i] = static_cast<float>(row.w * mean_of_chunks(sums, i, xs.numel(), 1, 0) + row.k);
  }
  return {x_next, log_prob};
}

STABLE_TORCH_LIBRARY_FRAGMENT(sage_fast_cpu, m) {
  m.def(
      "transition_step(Tensor x, Tensor v, Tensor? v_uncond, float? guidance, Tensor coefs, Tensor step, Tensor seed)"
      " -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(sage_fast_cpu, CPU, m) { m.impl("transition_step", TORCH_BOX(&transition_step)); }

}  // namespace sage_fast
