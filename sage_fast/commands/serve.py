"""`sage-fast serve-reward`: check the rewards of a configuration, then serve them over HTTP until a
signal."""

from __future__ import annotations

import argparse
import logging
import signal
from collections.abc import Callable, Mapping

from sage_fast.config.loader import load
from sage_fast.data.prompts import metadata_of, read_prompts
from sage_fast.util.errors import UserError
from sage_fast.util.paths import TypedPath

log = logging.getLogger(__name__)


def add_arguments(add: Callable[..., object]) -> None:
    add("config", type=TypedPath, metavar="CONFIG", help="YAML file; its rewards are served")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="0 picks a free port (default: 8000)")
    add(
        "--largest",
        type=int,
        metavar="MIB",
        default=1024,
        help="largest request in MiB (default: 1024)",
    )


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    """Serve the rewards of a configuration until SIGINT or SIGTERM.

    Raises:
        UserError: a setting or a reward is wrong, or the server cannot listen on the address.
    """
    if not 0 <= options.port < 2**16:
        raise UserError(f"--port {options.port}: expected 0 (a free one) to 65535, such as 8000")
    if options.largest < 1:
        raise UserError(f"--largest {options.largest}: expected at least 1 MiB, such as 1024")
    config = load(options.config, overrides)
    prompts = read_prompts(config.data.prompts)
    from sage_fast.rewards import CompositeReward
    from sage_fast.rewards.http import TOKEN, token
    from sage_fast.util.process_group import initialize

    try:
        from sage_fast.rewards.server import LOOPBACK, RewardServer
    except ModuleNotFoundError as error:
        raise UserError(
            f"serve-reward needs {error.name}: pip install starlette uvicorn"
        ) from error

    if options.host not in LOOPBACK and not token():
        raise UserError(
            f"--host {options.host}: expected {LOOPBACK[0]}, or a password in {TOKEN} for server "
            "and runs"
        )
    device = str(initialize())
    reward = CompositeReward.of(config.reward, device, metadata_of(prompts), least_workers=1)
    reward.check(config.sampling, [prompt.key for prompt in prompts], device)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server = RewardServer(reward, options.host, options.port, device, options.largest * 2**20)
    except OSError as error:
        raise UserError(f"--host {options.host} --port {options.port}: {error.strerror}") from error
    try:
        log.info(
            f"serves {', '.join(reward.names)} ({', '.join(reward.parts)}) at {server.address}"
        )
        server.listen()
    except KeyboardInterrupt:
        log.info("ended")
    finally:
        signal.signal(signal.SIGTERM, before)
        server.socket.close()
