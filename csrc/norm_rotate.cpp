// norm_rotate and its backward on the CPU; the specification is sage_fast/ops/norm_rotate.py.
#include "tensors.h"

#include <tuple>

namespace sage_fast {

namespace {

// A tensor [B, S, H, D] with contiguous heads and any strides between heads, tokens and samples.
struct HeadTensor {
  explicit HeadTensor(const Tensor& tensor)
      : tensor(tensor.stride(3) == 1 || tensor.size(3) == 1 ? tensor : torch::stable::contiguous(tensor)),
        type(type_of(tensor)) {}

  Heads operator[](int64_t sample) const {
    const char* data = static_cast<const char*>(tensor.const_data_ptr());
    return {{data + sample * tensor.stride(0) * size_of(type), type}, tensor.stride(1), tensor.stride(2)};
  }

  Tensor tensor;
  Type type;
};

// Arguments by sample.
struct Inputs {
  Inputs(const Tensor& joint, const Tensor& video_query, const Tensor& text_query, const Tensor& video_key,
         const Tensor& text_key, const Tensor& rotary, double eps)
      : joints(joint),
        weights{torch::stable::contiguous(video_query), torch::stable::contiguous(text_query),
                torch::stable::contiguous(video_key), torch::stable::contiguous(text_key)},
        table(torch::stable::contiguous(rotary)),
        eps(static_cast<float>(eps)) {
    STD_TORCH_CHECK(rotary.scalar_type() == ScalarType::Float, "rotary: expected float32");
    samples = joint.size(0);
    tokens = joint.size(1);
    heads = joint.size(3);
    width = joint.size(4);
    all_heads = video_query.dim() == 2;
    group = all_heads ? heads * width : width;
    video_tokens = rotary.size(0);
  }

  RotateArgs operator[](int64_t i) const {
    RotateArgs args{};
    args.joint = joints[i];
    args.all_heads = all_heads;
    for (int k = 0; k < 4; ++k) args.weights[k / 2][k % 2] = array_of(weights[k]);
    args.rotary = static_cast<const float*>(table.const_data_ptr());
    args.video_tokens = video_tokens;
    args.heads = heads;
    args.width = width;
    args.eps = eps;
    return args;
  }

  Samples joints;
  Tensor weights[4], table;
  float eps;
  bool all_heads;
  int64_t samples, video_tokens, tokens, heads, width;
  int64_t group;  // elements that are normalised together, as many as a weight has
};

}  // namespace

std::tuple<Tensor, Tensor> norm_rotate(const Tensor& joint, const Tensor& video_query, const Tensor& text_query,
                                       const Tensor& video_key, const Tensor& text_key, const Tensor& rotary,
                                       double eps) {
  const Inputs in(joint, video_query, text_query, video_key, text_key, rotary, eps);
  const std::vector<int64_t> sizes = {in.samples, in.tokens, in.heads, in.width};
  Tensor out[2] = {new_sized(joint, sizes), new_sized(joint, sizes)};
  const int64_t row = in.heads * in.width, bytes = in.tokens * row * size_of(in.joints.type());
  for_each_rows(in.samples, in.tokens, row, [&](int64_t i, int64_t, int64_t begin, int64_t end) {
    std::vector<float> scratch(kRotateScratch * in.group);
    RotateArgs args = in[i];
    for (int k = 0; k < 2; ++k) args.out[k] = static_cast<char*>(out[k].mutable_data_ptr()) + i * bytes;
    loops().norm_rotate(args, begin, end, scratch.data());
  });
  return {out[0], out[1]};
}

std::tuple<Tensor, Tensor> norm_rotate_backward(const Tensor& grad_query, const Tensor& grad_key,
                                                const Tensor& grad_value, const Tensor& joint,
                                                const Tensor& video_query, const Tensor& text_query,
                                                const Tensor& video_key, const Tensor& text_key, const Tensor& rotary,
                                                double eps, bool weights) {
  const Inputs in(joint, video_query, text_query, video_key, text_key, rotary, eps);
  const HeadTensor grads[3] = {HeadTensor(grad_query), HeadTensor(grad_key), HeadTensor(grad_value)};
  const int64_t row = in.heads * in.width, bytes = in.joints.numel() * size_of(in.joints.type());
  Tensor d_joint = new_like(joint);
  Partials partials(weights, in.samples, in.tokens, row, 4, in.group);
  for_each_rows(in.samples, in.tokens, row, [&](int64_t i, int64_t chunk, int64_t begin, int64_t end) {
    std::vector<float> scratch(kRotateScratch * in.group);
    RotateArgs args = in[i];
    for (int k = 0; k < 3; ++k) args.grad[k] = grads[k][i];
    args.d_joint = static_cast<char*>(d_joint.mutable_data_ptr()) + i * bytes;
    loops().norm_rotate_backward(args, begin, end, partials.of(i, chunk), scratch.data());
  });
  std::vector<int64_t> sizes = {weights ? 4 : 0};
  if (in.all_heads) sizes.push_back(in.heads);
  sizes.push_back(in.width);
  Tensor d_weights = new_floats(joint, sizes);
  if (weights) {
    float* sums = static_cast<float*>(d_weights.mutable_data_ptr());
    std::fill(sums, sums + 4 * in.group, 0.0f);
    std::vector<float> sample_sum(in.group);
    for (int64_t i = 0; i < in.samples; ++i) {
      for (int k = 0; k < 4; ++k) {
        partials.add(i, k, sample_sum.data());
        for (int64_t j = 0; j < in.group; ++j) sums[k * in.group + j] += sample_sum[j];
      }
    }
  }
  return {d_joint, d_weights};
}

STABLE_TORCH_LIBRARY_FRAGMENT(sage_fast_cpu, m) {
  m.def(
      "norm_rotate(Tensor joint, Tensor video_query, Tensor text_query, Tensor video_key, Tensor text_key,"
      " Tensor rotary, float eps) -> (Tensor, Tensor)");
  m.def(
      "norm_rotate_backward(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor joint, Tensor video_query,"
      " Tensor text_query, Tensor video_key, Tensor text_key, Tensor rotary, float eps, bool weights)"
      " -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(sage_fast_cpu, CPU, m) {
  m.impl("norm_rotate", TORCH_BOX(&norm_rotate));
  m.impl("norm_rotate_backward", TORCH_BOX(&norm_rotate_backward));
}

}  // namespace sage_fast
