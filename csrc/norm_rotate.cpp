// norm_rotate and its backward on the CPU; the specification is sage_fast/ops/norm_rotate.py.
#include "tensors.h"

#include <tuple>

namespace sage_fast {

namespace {

// [B, S, H, D]: each head contiguous, with any strides between heads, tokens and samples.
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

// The arguments by sample.
struct Inputs {
  Inputs(const Tensor& video, const Tensor& text, const Tensor& video_weight, const Tensor& text_weight,
         const Tensor& rotary, double eps)
      : videos(video),
        texts(text),
        video_weight(torch::stable::contiguous(video_weight)),
        text_weight(torch::stable::contiguous(text_weight)),
        table(torch::stable::contiguous(rotary)),
        eps(static_cast<float>(eps)) {
    STD_TORCH_CHECK(videos.type == texts.type, "text: expected the dtype of video");
    STD_TORCH_CHECK(rotary.scalar_type() == ScalarType::Float, "rotary: expected float32");
    samples = video.size(0);
    video_tokens = video.size(1);
    tokens = video_tokens + text.size(1);
    heads = video.size(2);
    width = video.size(3);
  }

  RotateArgs operator[](int64_t i) const {
    RotateArgs args{};
    args.video = videos[i];
    args.text = texts[i];
    args.video_weight = array_of(video_weight);
    args.text_weight = array_of(text_weight);
    args.rotary = static_cast<const float*>(table.const_data_ptr());
    args.video_tokens = video_tokens;
    args.heads = heads;
    args.width = width;
    args.eps = eps;
    return args;
  }

  HeadTensor videos, texts;
  Tensor video_weight, text_weight, table;
  float eps;
  int64_t samples, video_tokens, tokens, heads, width;
};

}  // namespace

Tensor norm_rotate(const Tensor& video, const Tensor& text, const Tensor& video_weight, const Tensor& text_weight,
                   const Tensor& rotary, double eps) {
  const Inputs in(video, text, video_weight, text_weight, rotary, eps);
  Tensor out = new_sized(video, {in.samples, in.tokens, in.heads, in.width});
  char* data = static_cast<char*>(out.mutable_data_ptr());
  const int64_t row = in.heads * in.width;
  for_each_rows(in.samples, in.tokens, row, [&](int64_t i, int64_t, int64_t begin, int64_t end) {
    std::vector<float> scratch(kRotateScratch * in.width);
    RotateArgs args = in[i];
    args.out = data + i * in.tokens * row * size_of(in.videos.type);
    loops().norm_rotate(args, begin, end, scratch.data());
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_rotate_backward(const Tensor& grad, const Tensor& video,
                                                                const Tensor& text, const Tensor& video_weight,
                                                                const Tensor& text_weight, const Tensor& rotary,
                                                                double eps, bool weights) {
  const Inputs in(video, text, video_weight, text_weight, rotary, eps);
  const HeadTensor grads(grad);
  const int64_t row = in.heads * in.width, texts = in.tokens - in.video_tokens, size = size_of(in.videos.type);
  Tensor d_video = new_sized(video, {in.samples, in.video_tokens, in.heads, in.width});
  Tensor d_text = new_sized(video, {in.samples, texts, in.heads, in.width});
  char* video_data = static_cast<char*>(d_video.mutable_data_ptr());
  char* text_data = static_cast<char*>(d_text.mutable_data_ptr());
  Partials partials(weights, in.samples, in.tokens, row, in.width);
  for_each_rows(in.samples, in.tokens, row, [&](int64_t i, int64_t chunk, int64_t begin, int64_t end) {
    std::vector<float> scratch(kRotateScratch * in.width);
    RotateArgs args = in[i];
    args.grad = grads[i];
    args.out = video_data + i * in.video_tokens * row * size;
    args.text_out = text_data + i * texts * row * size;
    loops().norm_rotate_backward(args, begin, end, partials.of(i, chunk), scratch.data());
  });
  const int64_t width = weights ? in.width : 0;
  Tensor d_video_weight = new_floats(video, {width}), d_text_weight = new_floats(video, {width});
  if (weights) {
    Tensor* out[2] = {&d_video_weight, &d_text_weight};
    for (int k = 0; k < 2; ++k) {
      float* sums = static_cast<float*>(out[k]->mutable_data_ptr());
      std::fill(sums, sums + width, 0.0f);
      std::vector<float> of_sample(width);
      for (int64_t i = 0; i < in.samples; ++i) {
        partials.add(i, k, of_sample.data());
        for (int64_t j = 0; j < width; ++j) sums[j] += of_sample[j];
      }
    }
  }
  return {d_video, d_text, d_video_weight, d_text_weight};
}

STABLE_TORCH_LIBRARY_FRAGMENT(sage_fast_cpu, m) {
  m.def(
      "norm_rotate(Tensor video, Tensor text, Tensor video_weight, Tensor text_weight, Tensor rotary, float eps)"
      " -> Tensor");
  m.def(
      "norm_rotate_backward(Tensor grad, Tensor video, Tensor text, Tensor video_weight, Tensor text_weight,"
      " Tensor rotary, float eps, bool weights) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(sage_fast_cpu, CPU, m) {
  m.impl("norm_rotate", TORCH_BOX(&norm_rotate));
  m.impl("norm_rotate_backward", TORCH_BOX(&norm_rotate_backward));
}

}  // namespace sage_fast
