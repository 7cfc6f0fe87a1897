// The inner loops of all operators. dispatch.cpp includes this file once per instruction set, in a namespace named by
// INSTRUCTION_SET, so neither it nor the files below have an include guard. Does not include torch.

#include "storage.h"
#include "sums.h"
#include "philox.h"
#include "transition_loops.h"
#include "norm_loops.h"

namespace sage_fast::INSTRUCTION_SET {

constexpr Loops kLoops = {
    step, score, score_backward, norm_modulate, norm_modulate_backward, norm_rotate, norm_rotate_backward};

}  // namespace sage_fast::INSTRUCTION_SET
