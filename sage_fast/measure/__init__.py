"""Measurements: operators, rollouts, iterations, the profile, the compile report, and the plan of a run."""
