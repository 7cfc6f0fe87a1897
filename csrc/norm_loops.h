// The normalisations of a transformer block over a range of one sample's rows or tokens. Uses storage.h and sums.h.
// Widths that the compiler knows (kWidth > 0) are unrolled: those of the models in use.

namespace sage_fast::INSTRUCTION_SET {

// -- norm_modulate: layer_norm(x) (1 + scale) + shift ----------------------------------------------------------------

inline void load_modulation(const ModulateArgs& args, float* gain, float* offset) {
  const float* scale = load(args.scale, 0, args.width, gain);
  for (int64_t j = 0; j < args.width; ++j) gain[j] = 1 + scale[j];
  if (args.shift.data != nullptr) {
    const float* shift = load(args.shift, 0, args.width, offset);
    if (shift != offset) std::copy(shift, shift + args.width, offset);
  }
}

// normed = (x - mean) / std of a row; returns 1 / std.
inline float normalize(const float* x, int64_t n, float eps, float* normed) {
  const float mean = sum(x, n) / n;
  for (int64_t j = 0; j < n; ++j) normed[j] = x[j] - mean;
  const float rstd = 1 / std::sqrt(dot(normed, normed, n) / n + eps);
  for (int64_t j = 0; j < n; ++j) normed[j] *= rstd;
  return rstd;
}

template <int64_t kWidth>
void modulate_rows(const ModulateArgs& args, int64_t begin, int64_t end, float* scratch) {
  const int64_t n = kWidth > 0 ? kWidth : args.width;
  float *gain = scratch, *offset = scratch + n, *x_buffer = scratch + 2 * n, *normed = scratch + 3 * n,
        *out_buffer = scratch + 4 * n;
  load_modulation(args, gain, offset);
  for (int64_t row = begin; row < end; ++row) {
    normalize(load(args.x, row * n, n, x_buffer), n, args.eps, normed);
    float* out = target(args.out, args.x.type, row * args.wide, out_buffer);
    for (int64_t j = 0; j < n; ++j) out[j] = normed[j] * gain[j] + offset[j];
    flush(args.out, args.x.type, row * args.wide, n, out_buffer);
  }
}

// dx in `out`; adds the gradients of scale and shift to sums [2, width], unless that is null.
template <int64_t kWidth>
void modulate_rows_backward(const ModulateArgs& args, int64_t begin, int64_t end, float* sums, float* scratch) {
  const int64_t n = kWidth > 0 ? kWidth : args.width;
  float *gain = scratch, *x_buffer = scratch + 2 * n, *normed = scratch + 3 * n, *out_buffer = scratch + 4 * n,
        *g_buffer = scratch + 5 * n, *d_normed = scratch + 6 * n;
  load_modulation(args, gain, scratch + n);
  for (int64_t row = begin; row < end; ++row) {
    const float rstd = normalize(load(args.x, row * n, n, x_buffer), n, args.eps, normed);
    const float* g = load(args.grad, row * args.wide, n, g_buffer);
    if (sums != nullptr) {
      for (int64_t j = 0; j < n; ++j) sums[j] += g[j] * normed[j];
      for (int64_t j = 0; j < n; ++j) sums[n + j] += g[j];
    }
    for (int64_t j = 0; j < n; ++j) d_normed[j] = g[j] * gain[j];
    const float mean = sum(d_normed, n) / n, slope = dot(d_normed, normed, n) / n;
    float* dx = target(args.out, args.x.type, row * n, out_buffer);
    for (int64_t j = 0; j < n; ++j) dx[j] = rstd * (d_normed[j] - mean - normed[j] * slope);
    flush(args.out, args.x.type, row * n, n, out_buffer);
  }
}

void norm_modulate(const ModulateArgs& args, int64_t begin, int64_t end, float* scratch) {
  (args.width == 64 ? modulate_rows<64> : modulate_rows<0>)(args, begin, end, scratch);
}

void norm_modulate_backward(const ModulateArgs& args, int64_t begin, int64_t end, float* sums, float* scratch) {
  (args.width == 64 ? modulate_rows_backward<64> : modulate_rows_backward<0>)(args, begin, end, sums, scratch);
}

// -- norm_rotate: rms_norm of every head, rotated for video tokens ---------------------------------------------------

// (a, b) -> (a cos - b sin, a sin + b cos) for pairs of neighbours: y cos + swapped(y) sin, with the sign in `sine`.
inline void rotate(const float* y, const float* cosine, const float* sine, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Lanes x = lanes_at(y + i);
    const Lanes swapped = __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    *reinterpret_cast<Lanes*>(out + i) = x * lanes_at(cosine + i) + swapped * lanes_at(sine + i);
  }
  for (; i < n; i += 2) {
    const float a = y[i], b = y[i + 1];
    out[i] = a * cosine[i] + b * sine[i];
    out[i + 1] = b * cosine[i + 1] + a * sine[i + 1];
  }
}

// The rotary table of one token, each value for both channels of its pair; `sign` -1 rotates back.
inline void spread(const float* cos_sin, float sign, int64_t n, float* cosine, float* sine) {
  for (int64_t i = 0; i < n; i += 2) {
    cosine[i] = cosine[i + 1] = cos_sin[i];
    sine[i] = -sign * cos_sin[i + 1];
    sine[i + 1] = sign * cos_sin[i + 1];
  }
}

template <int64_t kWidth>
void rotate_rows(const RotateArgs& args, int64_t begin, int64_t end, float* scratch) {
  const int64_t n = kWidth > 0 ? kWidth : args.width;
  float *x_buffer = scratch, *y = scratch + n, *out_buffer = scratch + 2 * n, *cosine = scratch + 3 * n,
        *sine = scratch + 4 * n;
  const float* video_weight = load(args.video_weight, 0, n, scratch + 5 * n);
  const float* text_weight = load(args.text_weight, 0, n, scratch + 6 * n);
  for (int64_t token = begin; token < end; ++token) {
    const bool video = token < args.video_tokens;
    const Heads& heads = video ? args.video : args.text;
    const float* weight = video ? video_weight : text_weight;
    const int64_t at = heads.token_stride * (video ? token : token - args.video_tokens);
    if (video) spread(args.rotary + token * n, 1, n, cosine, sine);
    for (int64_t head = 0; head < args.heads; ++head) {
      const float* x = load(heads.array, at + head * heads.head_stride, n, x_buffer);
      const int64_t out_at = (token * args.heads + head) * n;
      float* out = target(args.out, heads.array.type, out_at, out_buffer);
      const float rstd = 1 / std::sqrt(dot(x, x, n) / n + args.eps);
      if (video) {
        for (int64_t j = 0; j < n; ++j) y[j] = x[j] * rstd * weight[j];
        rotate(y, cosine, sine, n, out);
      } else {
        for (int64_t j = 0; j < n; ++j) out[j] = x[j] * rstd * weight[j];
      }
      flush(args.out, heads.array.type, out_at, n, out_buffer);
    }
  }
}

// Gradients of video and text; adds those of their weights to sums [2, width], unless that is null.
template <int64_t kWidth>
void rotate_rows_backward(const RotateArgs& args, int64_t begin, int64_t end, float* sums, float* scratch) {
  const int64_t n = kWidth > 0 ? kWidth : args.width;
  float *x_buffer = scratch, *normed = scratch + n, *out_buffer = scratch + 2 * n, *g_buffer = scratch + 3 * n,
        *turned = scratch + 4 * n, *cosine = scratch + 5 * n, *sine = scratch + 6 * n;
  const float* video_weight = load(args.video_weight, 0, n, scratch + 7 * n);
  const float* text_weight = load(args.text_weight, 0, n, scratch + 8 * n);
  for (int64_t token = begin; token < end; ++token) {
    const bool video = token < args.video_tokens;
    const Heads& heads = video ? args.video : args.text;
    const float* weight = video ? video_weight : text_weight;
    const int64_t own = video ? token : token - args.video_tokens;
    if (video) spread(args.rotary + token * n, -1, n, cosine, sine);
    for (int64_t head = 0; head < args.heads; ++head) {
      const float* x = load(heads.array, own * heads.token_stride + head * heads.head_stride, n, x_buffer);
      const float* g =
          load(args.grad.array, token * args.grad.token_stride + head * args.grad.head_stride, n, g_buffer);
      if (video) {
        rotate(g, cosine, sine, n, turned);
        g = turned;
      }
      const float rstd = 1 / std::sqrt(dot(x, x, n) / n + args.eps);
      for (int64_t j = 0; j < n; ++j) normed[j] = x[j] * rstd;
      if (sums != nullptr) {
        float* of_weight = sums + (video ? 0 : n);
        for (int64_t j = 0; j < n; ++j) of_weight[j] += g[j] * normed[j];
      }
      for (int64_t j = 0; j < n; ++j) turned[j] = g[j] * weight[j];
      const float slope = dot(turned, normed, n) / n;
      void* grads = video ? args.out : args.text_out;
      const int64_t out_at = (own * args.heads + head) * n;
      float* dx = target(grads, heads.array.type, out_at, out_buffer);
      for (int64_t j = 0; j < n; ++j) dx[j] = rstd * (turned[j] - normed[j] * slope);
      flush(grads, heads.array.type, out_at, n, out_buffer);
    }
  }
}

void norm_rotate(const RotateArgs& args, int64_t begin, int64_t end, float* scratch) {
  (args.width == 16    ? rotate_rows<16>
   : args.width == 128 ? rotate_rows<128>
                       : rotate_rows<0>)(args, begin, end, scratch);
}

void norm_rotate_backward(const RotateArgs& args, int64_t begin, int64_t end, float* sums, float* scratch) {
  (args.width == 16    ? rotate_rows_backward<16>
   : args.width == 128 ? rotate_rows_backward<128>
                       : rotate_rows_backward<0>)(args, begin, end, sums, scratch);
}

}  // namespace sage_fast::INSTRUCTION_SET
