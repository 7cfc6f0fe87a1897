"""Sampling: the denoising loop and its CUDA graphs, the trajectories that it leaves, and what an iteration draws."""
