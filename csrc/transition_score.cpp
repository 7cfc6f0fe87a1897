// transition_score and its backward on the CPU; the specification is sage_fast/ops/transition_score.py.
#include "tensors.h"

#include <tuple>

namespace sage_fast {

namespace {

struct Inputs {
  Inputs(const Tensor& x, const Tensor& x_next, const Tensor& v, const std::optional<Tensor>& v_uncond,
         std::optional<double> guidance, const std::optional<Tensor>& v_anchor, const std::optional<Tensor>& v_old,
         const Tensor& coefs, const Tensor& step)
      : xs(x),
        nexts(x_next),
        anchors(v_anchor),
        olds(v_old),
        vs(v, v_uncond, guidance),
        rows(coefs, step, xs.count()) {}

  ScoreArgs operator[](int64_t i) const { return {xs[i], nexts[i], vs[i], {anchors[i], olds[i]}, rows[i]}; }

  Samples xs, nexts, anchors, olds;
  Velocities vs;
  Rows rows;
};

const float* floats(const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); }

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> transition_score(
    const Tensor& x, const Tensor& x_next, const Tensor& v, const std::optional<Tensor>& v_uncond,
    std::optional<double> guidance, const std::optional<Tensor>& v_anchor, const std::optional<Tensor>& v_old,
    const Tensor& coefs, const Tensor& step, std::optional<double> beta) {
  const Inputs in(x, x_next, v, v_uncond, guidance, v_anchor, v_old, coefs, step);
  const int64_t samples = in.xs.count(), numel = in.xs.numel(), chunks = chunks_of(numel);
  std::vector<double> sums(samples * chunks * 5);
  for_each_chunk(in.xs, [&](int64_t i, int64_t chunk, int64_t begin, int64_t end) {
    ScoreArgs args = in[i];
    args.errors = beta.has_value();
    args.beta = static_cast<float>(beta.value_or(0));
    loops().score(args, begin, end, &sums[(i * chunks + chunk) * 5]);
  });
  Tensor out[5] = {new_floats(x, {samples}), new_floats(x, {samples}), new_floats(x, {samples}),
                   new_floats(x, {samples}), new_floats(x, {samples})};
  for (int64_t i = 0; i < samples; ++i) {
    const Row row = in.rows[i];
    for (int k = 0; k < 5; ++k) {
      const double mean = mean_of_chunks(sums, i, numel, 5, k);
      const double value = k == 0 ? row.w * mean + row.k : k < 3 ? row.m * mean : mean;
      static_cast<float*>(out[k].mutable_data_ptr())[i] = static_cast<float>(value);
    }
  }
  return {out[0], out[1], out[2], out[3], out[4]};
}

std::tuple<Tensor, Tensor> transition_score_backward(
    const Tensor& grad_logp, const Tensor& grad_kl_anchor, const Tensor& grad_kl_old, const Tensor& x,
    const Tensor& x_next, const Tensor& v, const std::optional<Tensor>& v_uncond, std::optional<double> guidance,
    const std::optional<Tensor>& v_anchor, const std::optional<Tensor>& v_old, const Tensor& coefs,
    const Tensor& step) {
  const Inputs in(x, x_next, v, v_uncond, guidance, v_anchor, v_old, coefs, step);
  const Tensor grads[3] = {torch::stable::contiguous(grad_logp), torch::stable::contiguous(grad_kl_anchor),
                           torch::stable::contiguous(grad_kl_old)};
  for (const Tensor& grad : grads) {
    STD_TORCH_CHECK(grad.scalar_type() == ScalarType::Float, "gradients: expected float32");
  }

  Tensor dv = new_like(v), dv_uncond = v_uncond.has_value() ? new_like(*v_uncond) : new_sized(v, {0});
  char* out = static_cast<char*>(dv.mutable_data_ptr());
  char* out_uncond = static_cast<char*>(dv_uncond.mutable_data_ptr());
  const int64_t numel = in.xs.numel();
  const double scale = 2.0 / std::max<int64_t>(numel, 1);
  for_each_chunk(in.xs, [&](int64_t i, int64_t, int64_t begin, int64_t end) {
    const Row row = in.rows[i];
    const float weight[3] = {static_cast<float>(-scale * floats(grads[0])[i] * row.w * row.b),
                             static_cast<float>(scale * floats(grads[1])[i] * row.m),
                             static_cast<float>(scale * floats(grads[2])[i] * row.m)};
    const int64_t first = i * numel, first_uncond = v_uncond.has_value() ? first : 0;
    loops().score_backward(in[i], weight, out + first * size_of(in.vs.vs.type()),
                           out_uncond + first_uncond * size_of(in.vs.unconds.type()), begin, end);
  });
  return {dv, dv_uncond};
}

STABLE_TORCH_LIBRARY_FRAGMENT(sage_fast_cpu, m) {
  m.def(
      "transition_score(Tensor x, Tensor x_next, Tensor v, Tensor? v_uncond, float? guidance, Tensor? v_anchor,"
      " Tensor? v_old, Tensor coefs, Tensor step, float? beta) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "transition_score_backward(Tensor grad_logp, Tensor grad_kl_anchor, Tensor grad_kl_old, Tensor x, Tensor x_next,"
      " Tensor v, Tensor? v_uncond, float? guidance, Tensor? v_anchor, Tensor? v_old, Tensor coefs, Tensor step)"
      " -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(sage_fast_cpu, CPU, m) {
  m.impl("transition_score", TORCH_BOX(&transition_score));
  m.impl("transition_score_backward", TORCH_BOX(&transition_score_backward));
}

}  // namespace sage_fast
