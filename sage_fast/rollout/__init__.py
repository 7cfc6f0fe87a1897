"""Rollouts: the denoising loop, its CUDA graphs, the stored trajectories, and their scoring and
replay."""
