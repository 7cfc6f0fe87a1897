"""The mathematics of SAGE-GRPO, without a model: what an iteration computes and in which order.

From the settings to an update, in the order of reading:

- `transitions`: samplers as rows of three numbers, x_next = a x + b v + c noise.
- `objective`: surrogates, KL strategies, the loss and its gradient norms, on `[B]` tensors.
- `advantages`: from the rewards of a group; `kl_weight`: lambda_KL during a run.
- `rows`: finds a sampler, surrogate or strategy by its name, the user's own included.
- `resolved`: the settings of a run resolved once; `trainable`, `distilled`: checks that they can
  train.
- `iteration_plan`: which rank samples and trains what, as a pure function of seeds.
- `metrics`, `flops`: what an iteration records.
"""
