// What C++ asks for the current CUDA device, as in `x.to("cuda")`, in a PyTorch that was built without CUDA.
#include <c10/core/impl/DeviceGuardImplInterface.h>

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
