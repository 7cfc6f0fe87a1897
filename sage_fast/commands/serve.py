"""`sage-fast serve-reward`: check the rewards of a configuration, then serve them over HTTP until a signal."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping

from sage_fast.config.load import load
from sage_fast.data.prompts import read_prompts
from sage_fast.rewards import CompositeReward
from sage_fast.rewards.http import TOKEN
from sage_fast.rewards.server import RewardServer
from sage_fast.util.errors import UserError
from sage_fast.util.ranks import initialize

log = logging.getLogger(__name__)


def serve_reward(path: str, overrides: Mapping[str, str], host: str, port: int, largest_mib: int) -> int:
    """Serve the rewards of a configuration until SIGINT or SIGTERM.

    Args:
        path: a YAML file.
        overrides: settings that replace the file's, as typed.
        host, port: address to listen on; port 0 picks a free one.
        largest_mib: largest request.

    Returns:
        The exit status.

    Raises:
        UserError: a setting or a reward is wrong.
        OSError: the server cannot listen on the address.
    """
    if not 0 <= port < 2**16:
        raise UserError(f"--port {port}: expected 0 (a free one) to 65535, such as 8000")
    config, device = load(path, overrides), str(initialize())
    prompts = [prompt.text for prompt in read_prompts(config.data.prompts, config.sampling)]
    reward = CompositeReward.of(config.reward, device)
    reward.check(config.sampling, prompts, device)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = RewardServer(reward, host, port, device, largest_mib * 2**20)
    try:
        log.info(f"serves {', '.join(reward.names)} ({', '.join(reward.parts)}) at {server.address}")
        if not server.token and server.server_address[0] not in ("127.0.0.1", "::1"):
            log.info(f"note: anyone who can reach this port can have videos scored; {TOKEN} asks for a password")
        server.serve_forever()
    except KeyboardInterrupt:
        log.info("ended")
    finally:
        signal.signal(signal.SIGTERM, before)
        server.server_close()
    return 0
