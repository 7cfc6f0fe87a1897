// Three builds of kernels.h and norm_kernels.h in one object: baseline, AVX2 with FMA, and AVX-512. The standard headers come first, so
// that none of their functions is compiled for an instruction set that the processor may lack.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define KERNELS baseline
#include "kernels.h"
#include "norm_kernels.h"
#undef KERNELS

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define KERNELS avx2
#include "kernels.h"
#include "norm_kernels.h"
#undef KERNELS
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#define KERNELS avx512
#include "kernels.h"
#include "norm_kernels.h"
#undef KERNELS
#pragma GCC pop_options
#endif

#define SAGE_FAST_KERNELS(isa, name)                                                                       \
  Kernels{isa::step,          isa::score,                  isa::score_backward, isa::norm_modulate,        \
          isa::norm_modulate_backward, isa::norm_rotate,   isa::norm_rotate_backward, name}

namespace sage_fast {

const Kernels& kernels() {
  static const Kernels chosen = [] {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      return SAGE_FAST_KERNELS(avx512, "AVX-512");
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
      return SAGE_FAST_KERNELS(avx2, "AVX2");
    }
#endif
    return SAGE_FAST_KERNELS(baseline, "baseline");
  }();
  return chosen;
}

}  // namespace sage_fast
