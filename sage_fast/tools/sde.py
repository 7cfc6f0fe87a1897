"""`sage-fast sde`: print and draw the transition tables of the samplers. Needs no model."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from sage_fast.algorithm.transitions import SAMPLERS, TransitionTable, sigma_schedule, transition_table
from sage_fast.util.errors import UserError, nearest
from sage_fast.util.files import make_folder_of

KINDS = (".svg", ".png")
COLUMNS = "step   sigma    next         a         b  c, noise   excess     N_t     S_t"


def tables(steps: int, shift: float, eta: float, samplers: Sequence[str]) -> list[TransitionTable]:
    """Return the transition tables of the named samplers.

    Without names: those that are `compared` and defined at this eta.

    Raises:
        UserError: unknown sampler, or a number out of range.
    """
    for name in samplers:
        if name not in SAMPLERS:
            raise UserError(f"--sampler {name!r}: {nearest(name, SAMPLERS)}")
    if not 1 <= steps <= 1000:
        raise UserError(f"--steps {steps}: expected 1 to 1000; the nearest is {min(max(steps, 1), 1000)}")
    if not 0 < shift <= 100:
        raise UserError(f"--shift {shift:g}: expected above 0 and at most 100, such as 5 (480p) or 1 (no shift)")
    if not 0 <= eta <= 10:
        raise UserError(f"--eta {eta:g}: expected 0 to 10; the nearest is {10 if eta > 10 else 0}")
    for name in samplers:
        if eta > (largest := SAMPLERS[name].largest_eta):
            raise UserError(f"--eta {eta:g}: {name} is defined up to {largest:g}; the nearest is {largest:g}")
    default = [name for name, row in SAMPLERS.items() if row.compared and eta <= row.largest_eta]
    sigmas = sigma_schedule(steps, shift)
    return [transition_table(sigmas, name, eta) for name in dict.fromkeys(samplers or default)]


def sde(options: argparse.Namespace) -> int:
    """Print the tables, draw them to `--figure`, and return the exit status.

    Raises:
        UserError: an invalid option; raised before anything is written.
    """
    if options.figure is not None and Path(options.figure).suffix not in KINDS:
        raise UserError(f"--figure {options.figure}: expected a name that ends with {' or '.join(KINDS)}")
    make_folder_of(options.figure, "--figure")
    steps, shift, eta = options.steps, options.shift, options.eta
    made = tables(steps, shift, eta, options.sampler)
    print(f"{steps} steps, shift {shift:g}, eta {eta:g}: x_next = a x + b v + c noise (docs/math.md)")
    for table in made:
        print("", *format_table(table), sep="\n")
    if options.figure is not None:
        _write(made, Path(options.figure))
        print(f"\n{options.figure}")
    return 0


def format_table(table: TransitionTable) -> list[str]:
    """Return a title, the column names, a line per step, a line of totals, and the table's notes."""
    columns = (
        table.sigmas[:-1], table.sigmas[1:], table.a, table.b, table.c, table.excess_noise(), table.gradient_scale(),
        table.equalizer(),
    )  # fmt: skip
    lines = [table.sampler, COLUMNS]
    for t, (s, n, a, b, c, excess, scale, weight) in enumerate(zip(*(column.tolist() for column in columns))):
        lines.append(f"{t:4d}{s:8.4f}{n:8.4f} {a:9.5f} {b:9.5f} {c:9.5f} {excess:8.4f} {scale:7.3f} {weight:7.3f}")
    total = float(table.c.square().sum().sqrt())
    left = float(table.excess_noise()[-1])
    lines.append(
        f"noise added: std {total:.3f} over all steps; excess noise predicted on the final sample: std {left:.4f}"
    )
    if table.extrapolation is not None:
        weights = " ".join(f"{w:.3f}" for w in table.extrapolation.tolist())
        lines.append(f"the step goes along v + w (v - v_before), w = {weights}")
    return lines + [f"note: {note}" for note in table.notes]


def _write(made: Sequence[TransitionTable], path: Path) -> None:
    from matplotlib.figure import Figure

    from sage_fast.report.charts import COLORS, picture

    def draw(figure: Figure) -> None:
        grid = figure.subplots(2, 3, sharex=True).flatten()
        titles = ("a", "b", "c, noise added", "excess noise predicted", "N_t = |b|/c", "S_t, equalizer")
        for axes, title in zip(grid, titles):
            axes.set_title(title)
            axes.set_xlabel("sigma")
        for color, table in zip(COLORS, made):
            positive = (values.where(values > 0, math.nan) for values in (table.gradient_scale(), table.equalizer()))
            rows = (table.a, table.b, table.c, table.excess_noise(), *positive)
            for axes, values in zip(grid, rows):
                axes.plot(table.sigmas[:-1], values, color=color, label=table.sampler, marker="o", markersize=2.5)
        for axes in grid[4:] if any(table.stochastic_steps for table in made) else ():
            axes.set_yscale("log")
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(made))

    path.write_bytes(picture(draw, (9.5, 5.4), path.suffix[1:], "sde"))
