"""Rollouts: the denoising loop, its CUDA graphs, the stored trajectories, their scoring and replay,
and the gate that compares both."""
