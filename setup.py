"""Builds the C++ operators where torch and a compiler are there at build time; everything else is in pyproject.toml.

Without them (a wheel built in isolation, a machine without a compiler) the package installs all the same and runs the
PyTorch reference on the CPU, which it says once at start.
"""

import sys

from setuptools import setup

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:
    print("sage-fast: torch is not importable here, so the C++ operators are not built", file=sys.stderr)
    arguments = {}
else:

    class BuildOperators(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = "build/objects"  # a wheel built in a checkout reuses those of its editable install

    extension = CppExtension(
        "sage_fast._C",
        [
            "csrc/kernels.cpp",
            "csrc/norm_modulate.cpp",
            "csrc/norm_rotate.cpp",
            "csrc/transition_score.cpp",
            "csrc/transition_step.cpp",
        ],
        depends=["csrc/kernels.h", "csrc/kernels_api.h", "csrc/norm_kernels.h", "csrc/tensors.h"],
        # Errno and floating-point traps are the two things that keep GCC from vectorising sqrt and selections.
        extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wno-psabi"],
        define_macros=[("TORCH_TARGET_VERSION", "0x020b000000000000")],  # stable ABI of torch 2.11 and later
        py_limited_api=True,
        optional=True,
    )
    arguments = {"ext_modules": [extension], "cmdclass": {"build_ext": BuildOperators}}

setup(**arguments)
