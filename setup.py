"""Build the C++ operators if torch and a compiler are available at build time; everything else is
in pyproject.toml.

Without them (a wheel built in isolation, a machine without a compiler) the package still installs.
It then runs the PyTorch reference on the CPU and says so once at start.
"""

import glob
import sys

from setuptools import setup

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:
    print(
        "sage-fast: torch is not importable here, so the C++ operators are not built",
        file=sys.stderr,
    )
    arguments = {}
else:

    class BuildOperators(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = (
                "build/objects"  # a wheel built in a checkout reuses the editable install's objects
            )

    extension = CppExtension(
        "sage_fast._C",
        sorted(glob.glob("csrc/*.cpp")),
        depends=sorted(glob.glob("csrc/*.h")),
        # Errno and floating-point traps keep GCC from vectorising sqrt and selections.
        extra_compile_args=[
            "-O3",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-fvisibility=hidden",
            "-Wno-psabi",
        ],
        # stable ABI of torch 2.11 and later
        define_macros=[("TORCH_TARGET_VERSION", "0x020b000000000000")],
        py_limited_api=True,
        optional=True,
    )
    arguments = {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildOperators},
        # Not a single symbol of Python is used, so one wheel serves every version from
        # `requires-python` on.
        "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
    }

setup(**arguments)
