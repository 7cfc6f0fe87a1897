"""The mathematics of SAGE-GRPO: transitions, objective, advantages, the settings resolved, and the
plan of an iteration."""
