// Compiles the inner loops three times (baseline, AVX2 with FMA, AVX-512) into one object and chooses at run time. The
// standard headers come first; otherwise their functions could be compiled for an instruction set that the processor
// lacks.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "arguments.h"

#define INSTRUCTION_SET baseline
#include "loops.h"
#undef INSTRUCTION_SET

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define INSTRUCTION_SET avx2
#include "loops.h"
#undef INSTRUCTION_SET
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#define INSTRUCTION_SET avx512
#include "loops.h"
#undef INSTRUCTION_SET
#pragma GCC pop_options
#endif

namespace sage_fast {

const Loops& loops() {
  static const Loops chosen = [] {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      return avx512::kLoops;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
      return avx2::kLoops;
    }
#endif
    return baseline::kLoops;
  }();
  return chosen;
}

}  // namespace sage_fast
