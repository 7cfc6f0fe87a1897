"""Two formulas as printed in the paper against ours: the score below Eq. 7 and the feedback of Eq.
42."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from sage_fast.algorithm.kl_weight import FeedbackRow, KLController
from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.config.schema import KLConfig
from sage_fast.report.charts import COLORS, GREY
from studies.finding import Claim, Finding, Material, Verdict
from studies.paper.mixture import Mixture, follow_printed_score, follow_table, sample

STEPS, SHIFT, ETA = 40, 5.0, 1.0
DRIFT = 0.15
"""Sum of |share - 1/4| over the modes above which their weights count as moved."""
TARGET, BALANCE, UPDATES = 1e-4, 0.1, 80
"""Target KL, the lambda at which the loop below reaches it, and the number of updates."""
STARTS = (0.01, 0.05, 1.0)
"""Initial values of lambda, all outside the band below; lambda is bounded to BALANCE / 1000 and
BALANCE * 1000."""
BAND = (0.5, 1.5)
"""Share of the target within which Eq. 42 leaves lambda alone."""


def mode_drift(count: int) -> dict[str, float]:
    """Return score -> sum over modes of |share of samples - 1/4|; sampler `flow`, with mode 0 twice
    as far out."""
    mixture = Mixture()
    mixture.modes[0] *= 2
    table = transition_table(sigma_schedule(STEPS, SHIFT), "flow", ETA)
    steps = {"ours": follow_table, "printed": follow_printed_score}
    shares = {
        name: mixture.shares(sample(mixture, table, count, seed=1, step=step))
        for name, step in steps.items()
    }
    return {name: float((share - 0.25).abs().sum()) for name, share in shares.items()}


def closed_loop(direction: str, start: float) -> list[tuple[float, float]]:
    """Run the trainer's controller in a loop where KL = TARGET x BALANCE / lambda; return (lambda,
    KL) per update.

    Direction `opposite` raises lambda where Eq. 42 as `printed` lowers it.
    """
    controller = KLController(
        KLConfig(
            feedback="paper",
            target=TARGET,
            warmup_steps=0,
            lambda_min=BALANCE / 1000,
            lambda_max=BALANCE * 1000,
        )
    )
    if direction == "opposite":
        controller.row = FeedbackRow(factors=(1.1, 0.9))
    controller.value = start
    course = []
    for _ in range(UPDATES):
        kl = TARGET * BALANCE / controller.value
        course.append((controller.value, kl))
        controller.update(kl)
    return course


def arrives(course: list[tuple[float, float]]) -> bool:
    """Whether the final KL lies in the band around its target."""
    return BAND[0] <= course[-1][1] / TARGET <= BAND[1]


def judge_print(
    drift: Mapping[str, float], loops: Mapping[tuple[str, float], list[tuple[float, float]]]
) -> Verdict:
    """Decide whether the printed score keeps the modes and the printed feedback arrives from every
    start.

    `not decidable` if ours fails as well.
    """

    def good(score: str, direction: str) -> bool:
        return drift[score] < DRIFT and all(
            arrives(course) for (name, _), course in loops.items() if name == direction
        )

    if good("printed", "printed"):
        return "held"
    return "not held" if good("ours", "opposite") else "not decidable"


def find_print(material: Material) -> Finding:
    """Compare both formulas on data and in a loop where the right answer is known."""
    drift = mode_drift(1000 if material.quick else 10000)
    names = ("printed", "opposite")
    loops: dict[tuple[str, float], list[tuple[float, float]]] = {
        (name, start): closed_loop(name, start) for name in names for start in STARTS
    }
    verdict = judge_print(drift, loops)
    arrived = {name: sum(arrives(loops[name, start]) for start in STARTS) for name in names}
    far = [loops["printed", start][-1][1] / TARGET for start in STARTS]
    text = (
        f"The printed score moves the weights of four modes by {drift['printed']:.2f} in L1, the "
        f"one with the factor 1 - s by {drift['ours']:.2f} (flow, {STEPS} steps, shift {SHIFT:g}, "
        f"eta {ETA:g}). Where KL = constant / lambda, the printed feedback reaches the target from "
        f"{arrived['printed']} of {len(STARTS)} starts and ends between {min(far):.2g} and "
        f"{max(far):.2g} times it after {UPDATES} updates; the opposite direction reaches it from "
        f"{arrived['opposite']}."
    )
    rows: list[dict[str, object]] = [
        {"part": "score", "name": name, "drift": value} for name, value in drift.items()
    ]
    rows += [
        {
            "part": "feedback",
            "name": name,
            "start": start,
            "update": update,
            "lambda": value,
            "kl": kl,
        }
        for (name, start), course in loops.items()
        for update, (value, kl) in enumerate(course)
    ]

    def draw(figure: Figure) -> None:
        left, middle, right = figure.subplots(1, 3, width_ratios=[1, 2, 2])
        left.bar(list(drift), list(drift.values()), color=[COLORS[0], COLORS[1]], width=0.6)
        left.set_title("drift of the modes", fontsize=9.5)
        left.set_ylabel("sum of |share - 1/4|")
        left.grid(axis="x", visible=False)
        for (name, start), course in loops.items():
            color, label = (
                COLORS[1 if name == "printed" else 0],
                name if start == STARTS[0] else None,
            )
            for axes, values in (
                (middle, [value for value, _ in course]),
                (right, [kl for _, kl in course]),
            ):
                axes.plot(values, color=color, label=label, linewidth=1.3)
        right.axhspan(BAND[0] * TARGET, BAND[1] * TARGET, color=GREY, alpha=0.2, linewidth=0)
        for axes, title in ((middle, "lambda"), (right, "KL; grey: around the target")):
            axes.set_yscale("log")
            axes.set_title(title, fontsize=9.5)
            axes.set_xlabel("update")
        middle.legend(fontsize=8)

    return Finding(verdict=verdict, text=text, draw=draw, rows=rows)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        name="print",
        title="The formulas as printed",
        kind="paper",
        source="below Eq. 7, and Eq. 42",
        says=(
            "The score below Eq. 7 keeps the distribution, and the feedback of Eq. 42 keeps the KL "
            "near its target."
        ),
        find=find_print,
    ),
)
