import sys

from sage_fast.cli import main

sys.exit(main())
