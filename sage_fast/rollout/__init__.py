"""Sampling: the denoising loop, its CUDA graphs, the stored trajectories, and the schedule of an iteration."""
