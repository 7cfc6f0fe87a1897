// The normalisations of a transformer block over a range of one sample's rows or tokens. Uses storage.h and sums.h.
// Loops over a width known at compile time (kWidth > 0) are unrolled; those are the widths of the models in use.

namespace sage_fast::INSTRUCTION_SET {

// -- norm_modulate: layer_norm(x) (1 + scale) + shift; gated_norm: the same for x + gate y ---------------------------

inline void load_vector(const Array& vector, int64_t n, float* out) {
  if (vector.data == nullptr) return;
  const float* values = load(vector, 0, n, out);
  if (values != out) std::copy(values, values + n, out);
}

inline void load_modulation(const ModulateArgs& args, float* gain, float* offset) {
  const float* scale = load(args.scale, 0, args.width, gain);
  for (int64_t j = 0; j < args.width; ++j) gain[j] = 1 + scale[j];
  load_vector(args.shift, args.width, offset);
}

// Returns a row of x + gate y, rounded to the type of `sum`, where it is stored.
inline const float* gated_sum(const ModulateArgs& args, int64_t row, int64_t n, const float* gate, float* x_buffer,
                              float* y_buffer) {
  const float* x = load(args.x, row * n, n, x_buffer);
  const float* y = load(args.y, row * n, n, y_buffer);
  float* sum = target(args.sum, args.x.type, row * n, x_buffer);
  for (int64_t j = 0; j < n; ++j) sum[j] = x[j] + gate[j] * y[j];
  flush(args.sum, args.x.type, row * n, n, x_buffer);
  return load({args.sum, args.x.type}, row * n, n, x_buffer);
}

// Sets normed = (x - mean) / std for a row and returns 1 / std.
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
        *out_buffer = scratch + 4 * n, *gate = scratch + 5 * n, *y_buffer = scratch + 6 * n;
  load_modulation(args, gain, offset);
  load_vector(args.gate, n, gate);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = args.gate.data != nullptr ? gated_sum(args, row, n, gate, x_buffer, y_buffer)
                                               : load(args.x, row * n, n, x_buffer);
    normalize(x, n, args.eps, normed);
    float* out = target(args.out, args.x.type, row * args.wide, out_buffer);
    for (int64_t j = 0; j < n; ++j) out[j] = normed[j] * gain[j] + offset[j];
    flush(args.out, args.x.type, row * args.wide, n, out_buffer);
  }
}

// Writes dx to `out` and, with a gate, gate dx to `dy`. Adds the gradients of scale, shift and gate to sums
// [2 or 3, width], unless that is null.
template <int64_t kWidth>
void modulate_rows_backward(const ModulateArgs& args, int64_t begin, int64_t end, float* sums, float* scratch) {
  const int64_t n = kWidth > 0 ? kWidth : args.width;
  float *gain = scratch, *x_buffer = scratch + 2 * n, *normed = scratch + 3 * n, *out_buffer = scratch + 4 * n,
        *g_buffer = scratch + 5 * n, *d_normed = scratch + 6 * n, *residual_buffer = scratch + 7 * n,
        *y_buffer = scratch + 8 * n, *gate = scratch + 9 * n;
  load_modulation(args, gain, scratch + n);
  load_vector(args.gate, n, gate);
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
    if (args.residual.data != nullptr) {
      const float* residual = load(args.residual, row * n, n, residual_buffer);
      for (int64_t j = 0; j < n; ++j) dx[j] += residual[j];
    }
    if (args.gate.data != nullptr) {
      float* dy = target(args.dy, args.x.type, row * n, d_normed);
      for (int64_t j = 0; j < n; ++j) dy[j] = gate[j] * dx[j];
      flush(args.dy, args.x.type, row * n, n, d_normed);
      if (sums != nullptr) {
        const float* y = load(args.y, row * n, n, y_buffer);
        for (int64_t j = 0; j < n; ++j) sums[2 * n + j] += dx[j] * y[j];
      }
    }
    flush(args.out, args.x.type, row * n, n, out_buffer);
  }
}

void norm_modulate(const ModulateArgs& args, int64_t begin, int64_t end, float* scratch) {
  (args.width == 64 ? modulate_rows<64> : modulate_rows<0>)(args, begin, end, scratch);
}

void norm_modulate_backward(const ModulateArgs& args, int64_t begin, int64_t end, float* sums, float* scratch) {
  (args.width == 64 ? modulate_rows_backward<64> : modulate_rows_backward<0>)(args, begin, end, sums, scratch);
}

// -- norm_rotate: rms_norm of queries and keys; video tokens are rotated ---------------------------------------------
//
// A group is what is normalised together: a head, or with kAllHeads all heads of a token.

// Rotates neighbouring pairs, (a, b) -> (a cos - b sin, a sin + b cos), as y cos + swapped(y) sin; `sine` has the sign.
inline void rotate(const float* y, const float* cosine, const float* sine, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const Quad x = quad_at(y + i), swapped = __builtin_shufflevector(x, x, 1, 0, 3, 2);
    *reinterpret_cast<Quad*>(out + i) = x * quad_at(cosine + i) + swapped * quad_at(sine + i);
  }
  for (; i < n; i += 2) {
    const float a = y[i], b = y[i + 1];
    out[i] = a * cosine[i] + b * sine[i];
    out[i + 1] = b * cosine[i + 1] + a * sine[i + 1];
  }
}

// Expands the rotary table of one token: both channels of a pair get its cosine and sine. `sign` -1 rotates back.
inline void spread(const float* cos_sin, float sign, int64_t n, float* cosine, float* sine) {
  for (int64_t i = 0; i < n; i += 2) {
    cosine[i] = cosine[i + 1] = cos_sin[i];
    sine[i] = -sign * cos_sin[i + 1];
    sine[i + 1] = sign * cos_sin[i + 1];
  }
}

template <int64_t kWidth, bool kAllHeads>
void rotate_rows(const RotateArgs& args, int64_t begin, int64_t end, float* scratch) {
  const int64_t n = kWidth > 0 ? kWidth : args.width, row = args.heads * n;
  const int64_t group = kAllHeads ? row : n, groups = kAllHeads ? 1 : args.heads;
  float *x_buffer = scratch, *y = scratch + group, *out_buffer = scratch + 2 * group, *cosine = scratch + 3 * group,
        *sine = scratch + 4 * group, *weights = scratch + 5 * group;
  for (int64_t k = 0; k < 4; ++k) load_vector(args.weights[k / 2][k % 2], group, weights + k * group);
  const Type type = args.joint.type;
  for (int64_t token = begin; token < end; ++token) {
    const bool video = token < args.video_tokens;
    if (video) spread(args.rotary + token * n, 1, n, cosine, sine);
    for (int64_t part = 0; part < 2; ++part) {
      const float* weight = weights + (2 * part + !video) * group;
      for (int64_t i = 0; i < groups; ++i) {
        const float* x = load(args.joint, (3 * token + part) * row + i * group, group, x_buffer);
        const int64_t out_at = token * row + i * group;
        float* out = target(args.out[part], type, out_at, out_buffer);
        const float rstd = 1 / std::sqrt(dot(x, x, group) / group + args.eps);
        if (video) {
          for (int64_t j = 0; j < group; ++j) y[j] = x[j] * rstd * weight[j];
          for (int64_t head = 0; head < group; head += n) rotate(y + head, cosine, sine, n, out + head);
        } else {
          for (int64_t j = 0; j < group; ++j) out[j] = x[j] * rstd * weight[j];
        }
        flush(args.out[part], type, out_at, group, out_buffer);
      }
    }
  }
}

// Writes the gradient of joint. Adds those of the weights to sums [2, 2, group], unless that is null.
template <int64_t kWidth, bool kAllHeads>
void rotate_rows_backward(const RotateArgs& args, int64_t begin, int64_t end, float* sums, float* scratch) {
  const int64_t n = kWidth > 0 ? kWidth : args.width, row = args.heads * n;
  const int64_t group = kAllHeads ? row : n, groups = kAllHeads ? 1 : args.heads;
  float *x_buffer = scratch, *normed = scratch + group, *out_buffer = scratch + 2 * group,
        *g_buffer = scratch + 3 * group, *turned = scratch + 4 * group, *cosine = scratch + 5 * group,
        *sine = scratch + 6 * group, *weights = scratch + 7 * group;
  for (int64_t k = 0; k < 4; ++k) load_vector(args.weights[k / 2][k % 2], group, weights + k * group);
  const Type type = args.joint.type;
  for (int64_t token = begin; token < end; ++token) {
    const bool video = token < args.video_tokens;
    if (video) spread(args.rotary + token * n, -1, n, cosine, sine);
    for (int64_t part = 0; part < 3; ++part) {
      const Heads& grads = args.grad[part];
      for (int64_t i = 0; i < groups; ++i) {
        const int64_t at = (3 * token + part) * row + i * group;
        const float* g = nullptr;
        for (int64_t head = 0; head < group; head += n) {
          const int64_t grad_at = token * grads.token_stride + (kAllHeads ? head / n : i) * grads.head_stride;
          g = load(grads.array, grad_at, n, g_buffer);
          if (part == 2) {  // values: a plain copy
            store(args.d_joint, type, at + head, n, g);
          } else if (video) {
            rotate(g, cosine, sine, n, turned + head);
          } else if (kAllHeads) {
            std::copy(g, g + n, turned + head);
          }
        }
        if (part == 2) continue;
        if (video || kAllHeads) g = turned;
        const int64_t which = 2 * part + !video;
        const float* x = load(args.joint, at, group, x_buffer);
        const float rstd = 1 / std::sqrt(dot(x, x, group) / group + args.eps);
        for (int64_t j = 0; j < group; ++j) normed[j] = x[j] * rstd;
        if (sums != nullptr) {
          float* weight_sum = sums + which * group;
          for (int64_t j = 0; j < group; ++j) weight_sum[j] += g[j] * normed[j];
        }
        for (int64_t j = 0; j < group; ++j) turned[j] = g[j] * weights[which * group + j];
        const float slope = dot(turned, normed, group) / group;
        float* dx = target(args.d_joint, type, at, out_buffer);
        for (int64_t j = 0; j < group; ++j) dx[j] = rstd * (turned[j] - normed[j] * slope);
        flush(args.d_joint, type, at, group, out_buffer);
      }
    }
  }
}

template <int64_t kWidth>
void rotate_width(const RotateArgs& args, int64_t begin, int64_t end, float* scratch) {
  (args.all_heads ? rotate_rows<kWidth, true> : rotate_rows<kWidth, false>)(args, begin, end, scratch);
}

template <int64_t kWidth>
void rotate_width_backward(const RotateArgs& args, int64_t begin, int64_t end, float* sums, float* scratch) {
  (args.all_heads ? rotate_rows_backward<kWidth, true>
                  : rotate_rows_backward<kWidth, false>)(args, begin, end, sums, scratch);
}

void norm_rotate(const RotateArgs& args, int64_t begin, int64_t end, float* scratch) {
  (args.width == 16    ? rotate_width<16>
   : args.width == 128 ? rotate_width<128>
                       : rotate_width<0>)(args, begin, end, scratch);
}

void norm_rotate_backward(const RotateArgs& args, int64_t begin, int64_t end, float* sums, float* scratch) {
  (args.width == 16    ? rotate_width_backward<16>
   : args.width == 128 ? rotate_width_backward<128>
                       : rotate_width_backward<0>)(args, begin, end, sums, scratch);
}

}  // namespace sage_fast::INSTRUCTION_SET
