"""How a plan and a run name their method."""

import re
from pathlib import Path

import pytest

from sage_fast.algorithm.objective import SURROGATES, Objective
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.algorithm.transitions import SAMPLERS
from sage_fast.cli import main
from sage_fast.config.fields import meanings, own_settings, sections
from sage_fast.config.loader import load
from sage_fast.config.schema import Config
from sage_fast.run.messages import config_warnings, method_of
from sage_fast.run.pace import PACED, pace_warning
from sage_fast.util.files import read_json
from tests.tiny import FEW_STEPS, arguments

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({}, "SAGE-GRPO: sage SDE, eta 0.5, equalizer, dual KL, lambda 1e-07 to 1e-05"),
        (
            {
                "sampling.sampler": "precise",
                "kl.feedback": "none",
                "kl.lambda_min": "0.05",
                "kl.lambda_max": "0.05",
            },
            "SAGE-GRPO: precise SDE, eta 0.5, equalizer, dual KL, lambda 0.05",
        ),
        (
            {"objective.equalizer": "false", "sampling.sde_window": "4", "kl.feedback": "paper"},
            "GRPO: sage SDE, eta 0.5, noise in 4 of 20 steps, no equalizer, dual KL, lambda 1e-07 "
            "to 1e-05",
        ),
        (
            {"sampling.sampler": "flow", "kl.strategy": "moving"},
            "GRPO: flow SDE, eta 0.5, equalizer, moving KL, lambda 1e-07 to 1e-05",
        ),
        (
            {
                "sampling.sampler": "precise",
                "objective.surrogate": "kl_mask",
                "kl.strategy": "none",
            },
            "SAGE-GRPO with a KL mask: precise SDE, eta 0.5, equalizer, no KL",
        ),
        (
            {
                "sampling.sampler": "ode",
                "objective.surrogate": "nft",
                "kl.beta_pos": "0",
                "kl.beta_vel": "0",
            },
            "DiffusionNFT variant: ODE rollouts, beta 1, no KL",
        ),
        (
            {"objective.surrogate": "awm", "kl.feedback": "none", "kl.strategy": "fixed"},
            "Advantage-weighted matching: sage SDE, eta 0.5, equalizer, fixed KL, lambda 1e-07 to "
            "1e-05",
        ),
    ],
)
def test_a_method_in_words(settings: dict[str, str], method: str) -> None:
    config = load(None, settings)
    assert method_of(Objective(config), config.sampling) == method


def test_the_log_corrected_samplers_are_those_of_one_sde() -> None:
    assert {name for name, row in SAMPLERS.items() if row.log_corrected} == {"sage", "precise"}
    assert all(row.title.startswith("GRPO") == row.scores_rollout for row in SURROGATES.values())


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_head_of_a_configuration_has_its_method(file: Path) -> None:
    what, config = file.read_text().splitlines()[0], load(file)
    method = method_of(Objective(config), config.sampling)
    assert ("SAGE-GRPO" in what) == method.startswith("SAGE-GRPO")
    assert ("DiffusionNFT variant" in what) == method.startswith("DiffusionNFT variant")


def test_a_plan_and_a_run_begin_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run says it before the model is loaded, and its report too, with the noise and the weight
    of each step."""
    words = ["train", str(CONFIGS / "recipes" / "paper.yaml"), "--output", str(tmp_path / "run")]
    words += FEW_STEPS + arguments(
        train__iterations=1, eval__num_prompts=1, eval__seeds_per_prompt=1
    )
    method = "SAGE-GRPO: sage SDE, eta 1, equalizer, dual KL, lambda 0.2"
    for more in (["--dry-run"], []):
        assert main([*words, *more]) == 0
        assert capsys.readouterr().out.splitlines()[1] == method
    report = (tmp_path / "run" / "report.html").read_text()
    assert f"<p>{method}</p>" in report
    facts = read_json(tmp_path / "run" / "run.json")
    for title, name in (
        ("noise that the SDE adds", "transition_std"),
        ("multiplies the step's gradient", "equalizer"),
    ):
        cells = re.search(rf"{title}</td>((?:<td>[^<]+</td>)+)</tr>", report)
        assert cells is not None
        assert re.findall(r"<td>([^<]+)", cells[1]) == [f"{value:.3f}" for value in facts[name]]


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        ({"objective.surrogate": "log_prob", "train.optimizer_steps": "3"}, True),
        ({"objective.surrogate": "awm", "train.optimizer_steps": "3"}, True),
        ({"objective.surrogate": "log_prob"}, False),
        (
            {
                "objective.surrogate": "log_prob",
                "train.optimizer_steps": "3",
                "kl.strategy": "dual",
                "kl.lambda_max": "0.1",
            },
            False,
        ),
        ({"objective.surrogate": "clip", "train.optimizer_steps": "3"}, False),
        ({"objective.surrogate": "kl_mask", "train.optimizer_steps": "3"}, False),
    ],
)
def test_updates_that_nothing_bounds_are_told(overrides: dict[str, str], warns: bool) -> None:
    """Off-policy, without a ratio, a mask or a KL."""
    warnings = config_warnings(ResolvedConfig(load(None, {"kl.strategy": "none"} | overrides)))
    assert any("nothing holds the later updates" in warning for warning in warnings) == warns


# -- settings that are too slow for a run ----------------------------------------------------------

NOT_PACED = {
    "reward.max_dropped", "objective.kl_limit", "kl.anchor_fraction", "train.prompts_per_iteration",
    "train.optimizer_steps",
    "train.timestep_fraction", "train.learning_rate", "train.grace_seconds", "train.iterations",
    "tracking.training_videos", "tracking.training_videos_interval",
}  # fmt: skip
"""Numbers whose meaning names updates or iterations, but which do not count them."""


def test_every_setting_that_is_counted_in_updates_has_a_row() -> None:
    """A new number whose meaning names updates or iterations belongs to one of the two lists."""
    counted = set()
    for section in sections(Config).values():
        for setting in own_settings(section):
            meaning = meanings(section)[setting.field]
            is_number = setting.type in (int, float)
            if is_number and re.search(r"optimizer steps|updates?\b|iterations?\b", meaning, re.I):
                counted.add(setting.name)
    assert counted == {*PACED, *NOT_PACED}


ACTING = {
    "train.iterations": "20", "train.optimizer_steps": "2", "kl.strategy": "moving",
    "kl.lambda_max": "0.1",
    "kl.feedback": "paper", "kl.anchor_interval": "38", "kl.warmup_steps": "39", "kl.history": "39",
    "train.warmup_steps": "40", "train.ema_decay": "0.82", "train.checkpoint_interval": "19",
    "eval.interval": "19",
}  # fmt: skip
"""The largest values that act within 40 updates: one more is too slow."""


def paced(overrides: dict[str, str]) -> str | None:
    return pace_warning(ResolvedConfig(load(None, ACTING | overrides)))


@pytest.mark.parametrize(
    ("name", "slow", "says"),
    [
        ("kl.anchor_interval", "39", "the anchor stays at the start"),
        ("kl.warmup_steps", "40", "lambda ends at 9.8e-02 and never reaches kl.lambda_max"),
        ("kl.history", "40", "the average is over all updates"),
        (
            "train.warmup_steps",
            "41",
            "the learning rate ends at 9.8e-06 and never reaches train.learning_rate",
        ),
        ("train.ema_decay", "0.83", "the decay rises to 0.820 only"),
        ("train.checkpoint_interval", "20", "no checkpoint before the end"),
        ("eval.interval", "20", "no evaluation between the first and the last"),
    ],
)
def test_a_setting_that_cannot_act_within_the_run_is_named(name: str, slow: str, says: str) -> None:
    assert set(PACED) <= {*ACTING}
    assert paced({}) is None
    warning = paced({name: slow})
    assert warning is not None
    assert warning.startswith("too few updates (40 updates in 20 iterations) for ")
    assert f"{name} = {slow} ({says}" in warning
    assert "; " not in warning
    assert warning in config_warnings(ResolvedConfig(load(None, ACTING | {name: slow})))


def test_what_has_no_part_in_a_run_is_not_too_slow() -> None:
    without = {
        "kl.strategy": "none",
        "kl.warmup_steps": "1000",
        "kl.anchor_interval": "1000",
        "kl.history": "1000",
    }
    assert paced(without | {"train.ema_decay": "0", "eval.interval": "0"}) is None
    assert (
        paced(
            {"kl.strategy": "stepwise", "kl.velocity_term": "rollout", "kl.anchor_interval": "1000"}
        )
        is None
    )
    assert paced({"kl.feedback": "none", "kl.history": "1000"}) is None
    assert paced({"kl.lambda_min": "0.1", "kl.warmup_steps": "1000"}) is None


def test_an_average_that_rolls_out_and_hardly_moves_is_named() -> None:
    """Its decay is the same from the first update on: 0.99 to the power of 40 is 0.67."""
    rolls_out = {"sampling.averaged_weights": "true"}
    assert paced(rolls_out | {"train.ema_decay": "0.98"}) is None
    warning = paced(rolls_out | {"train.ema_decay": "0.99"})
    assert warning is not None
    assert (
        "train.ema_decay = 0.99 (the average still is 67 % of the weights at the start)" in warning
    )


@pytest.mark.parametrize(
    "name", ["demo", "demo-i2v", "demo-nft", "recipes/paper", "hunyuanvideo15-480p"]
)
def test_a_shipped_configuration_has_nothing_that_is_too_slow(name: str) -> None:
    assert pace_warning(ResolvedConfig(load(CONFIGS / f"{name}.yaml"))) is None
