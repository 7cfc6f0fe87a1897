"""The mathematics of SAGE-GRPO: transitions, objective, what a process scores, and the schedule of an iteration."""
