// Three builds of kernels.h in one object: baseline, AVX2 with FMA, and AVX-512. The standard headers come first, so
// that none of their functions is compiled for an instruction set that the processor may lack.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define KERNELS baseline
#include "kernels.h"
#undef KERNELS

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define KERNELS avx2
#include "kernels.h"
#undef KERNELS
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#define KERNELS avx512
#include "kernels.h"
#undef KERNELS
#pragma GCC pop_options
#endif

namespace sage_fast {

const Kernels& kernels() {
  static const Kernels chosen = [] {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      return Kernels{avx512::step, avx512::score, avx512::score_backward, "AVX-512"};
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
      return Kernels{avx2::step, avx2::score, avx2::score_backward, "AVX2"};
    }
#endif
    return Kernels{baseline::step, baseline::score, baseline::score_backward, "baseline"};
  }();
  return chosen;
}

}  // namespace sage_fast
