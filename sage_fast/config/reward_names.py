"""The names of rewards. Imports nothing heavy, unlike `sage_fast.rewards`."""

from __future__ import annotations

from sage_fast.config.schema import OBJECT
from sage_fast.util.errors import UserError, nearest
from sage_fast.util.plugins import registered

SHIPPED = {
    "testbed": "sage_fast.testbed.rewards:TestbedReward",
    "testbed-i2v": "sage_fast.testbed.rewards_i2v:TestbedImageReward",
    "testbed-judge": "sage_fast.testbed.judge:TestbedJudge",
    "videoalign": "sage_fast.rewards.shipped.videoalign:VideoAlignReward",
    "clipscore": "sage_fast.rewards.shipped.clip:CLIPScoreReward",
    "pickscore": "sage_fast.rewards.shipped.clip:PickScoreReward",
    "ocr": "sage_fast.rewards.shipped.ocr:OCRReward",
    "vlm": "sage_fast.rewards.shipped.vlm:VLMReward",
    "vlm-pairs": "sage_fast.rewards.shipped.vlm_pairs:VLMPairsReward",
}
"""Short names of the rewards that come with the package."""

CLIENTS = {"vlm", "vlm-pairs"}
"""Those of them that only call a server. `url` is its address, which may change."""

GROUP = "sage_fast.rewards"
"""Entry-point group for other packages: name = "package.module:Class"."""


def reward_import_path(name: str, setting: str) -> str:
    """Return the `package.module:name` of a reward.

    Args:
        setting: setting that holds the name, for messages.

    Raises:
        UserError: no reward has this short name, or it is an object of another program.
    """
    if name.startswith(OBJECT):
        known = name.removeprefix(OBJECT)
        raise UserError(
            f"{setting}: the program that trained gave this reward as an object; expected "
            f"package.module:name of it, such as my_rewards:{known}; sf.train also takes the "
            f"object, reward_funcs={known}"
        )
    if ":" in name:
        return name
    offered = registered(GROUP, SHIPPED)
    if name not in offered:
        raise UserError(
            f"{setting}: {nearest(name, sorted(offered))}; or 'package.module:name', such as "
            "my_rewards:MyReward, or http://host:port"
        )
    return offered[name]
