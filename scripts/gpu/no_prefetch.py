"""sage-fast without FSDP's prefetch of the next blocks: what hiding the gathers is worth."""

import sys

from torch.distributed.fsdp import FSDPModule

from sage_fast.cli import main


def _prefetch_nothing(*_: object) -> None:
    pass


if __name__ == "__main__":
    FSDPModule.set_modules_to_forward_prefetch = _prefetch_nothing  # type: ignore[method-assign, assignment]
    sys.exit(main(sys.argv[1:]))
