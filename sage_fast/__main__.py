import os
import sys

from sage_fast.cli import main

# `python -m` and torchrun put the current folder before all packages, and a console script does
# not. Both look there last, so that a file of the current folder takes no package's name.
if sys.path[0] in ("", os.getcwd()):
    sys.path.append(sys.path.pop(0))

sys.exit(main())
