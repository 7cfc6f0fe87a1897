"""The names of rewards, and their check before PyTorch is imported, as `sage_fast.rewards` needs it."""

from __future__ import annotations

from sage_fast.util.errors import UserError, nearest
from sage_fast.util.plugins import module_of, registered

SHIPPED = {
    "testbed": "sage_fast.rewards.testbed:TestbedReward",
    "testbed-judge": "sage_fast.rewards.judge:TestbedJudge",
    "videoalign": "sage_fast.rewards.videoalign:VideoAlignReward",
    "clipscore": "sage_fast.rewards.clip:CLIPScoreReward",
    "pickscore": "sage_fast.rewards.clip:PickScoreReward",
}
"""Short names of the rewards that come with the package."""

GROUP = "sage_fast.rewards"
"""Entry-point group for other packages: name = "package.module:Class"."""


def place_of_reward(name: str, setting: str) -> str:
    """Return the `package.module:name` of a reward, whose package is there.

    Args:
        setting: setting that holds the name, for messages.

    Raises:
        UserError: there is no such name, or no such package.
    """
    offered = {} if ":" in name else registered(GROUP, SHIPPED)
    place = offered.get(name, name)
    if ":" not in place:
        raise UserError(
            f"{setting}: {nearest(name, sorted(offered))}; or 'package.module:name', such as my_rewards:MyReward, or "
            "http://host:port"
        )
    module_of(place, setting)
    return place
