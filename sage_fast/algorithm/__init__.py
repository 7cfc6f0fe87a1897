"""The mathematics of SAGE-GRPO: transitions, objective, scored processes, and the schedule of an
iteration."""
