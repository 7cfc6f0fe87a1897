"""What other trainers call our settings: one table for the hint after an unknown option and for
docs/how-to/from-another-trainer.md.

Imports nothing heavy.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Counterpart(NamedTuple):
    """A setting of ours, and what has its role elsewhere.

    Each cell is Markdown for the page. Where it begins with names in code, `a`, `b`, the hint knows
    these names too, by their last part: `sample.noise_level` and `--noise_level` are one name. Any
    other cell, such as a formula, is only for the page.

    Attributes:
        setting: dotted name of ours.
        flow_grpo, dancegrpo, unirl, official: its name in that trainer; `official` is the code of
            the paper's authors. Empty if we found none.
        elsewhere: other names, most of TRL, transformers, diffusers and peft, separated by spaces.
        value: the value of ours that does what the others do, if one does.
        also: another setting of the same section that belongs to it.
    """

    setting: str
    flow_grpo: str = ""
    dancegrpo: str = ""
    unirl: str = ""
    official: str = ""
    elsewhere: str = ""
    value: str = ""
    also: str = ""


COUNTERPARTS = (
    Counterpart(
        "model.path",
        flow_grpo="`pretrained.model`",
        dancegrpo="`--pretrained_model_name_or_path`",
        unirl="`bundle.config.pretrained_model_ckpt_path`",
        official="`--pretrained_model_root`",
        elsewhere="model_name_or_path pretrained_model model_id checkpoint ckpt",
    ),
    Counterpart("model.weights", elsewhere="lora_path adapter resume_from_lora"),
    Counterpart(
        "model.tuning",
        flow_grpo="`use_lora`",
        dancegrpo="all weights",
        unirl="`backend.lora_cfg`",
        official="`--use_lora`",
        elsewhere="use_peft",
    ),
    Counterpart("model.lora_rank", official="`lora_r`", elsewhere="rank r"),
    Counterpart("model.lora_alpha", elsewhere="alpha"),
    Counterpart("model.lora_targets", elsewhere="target_modules lora_target_modules"),
    Counterpart("model.dtype", elsewhere="mixed_precision torch_dtype precision bf16 fp16"),
    Counterpart("model.attention", elsewhere="attn_implementation attn_backend attention_backend"),
    Counterpart(
        "model.sequence_parallel",
        dancegrpo="`--sp_size`",
        official="`--sp_size`",
        elsewhere="ulysses_degree context_parallel",
    ),
    Counterpart(
        "data.prompts",
        flow_grpo="`dataset`, a folder",
        dancegrpo="`--data_json_path`, encoded",
        unirl="`data_source.args.run.data_path`",
        official="`--train_video_csv`",
        elsewhere="dataset_name train_file prompt_file",
    ),
    Counterpart(
        "sampling.sampler",
        flow_grpo="`sample.sde_type`",
        dancegrpo="always `dance`",
        unirl="`pipeline.strategy`",
        official="`--sde_type`",
        elsewhere="scheduler solver",
    ),
    Counterpart(
        "sampling.eta",
        flow_grpo="`sample.noise_level`",
        dancegrpo="`--eta`",
        unirl="`sampling.eta`",
        official="`eta`",
        elsewhere="noise_scale",
    ),
    Counterpart(
        "sampling.steps",
        flow_grpo="`sample.num_steps`",
        dancegrpo="`--sampling_steps`",
        unirl="`sampling.num_inference_steps`",
        official="`grpo_sampling_steps`",
        elsewhere="inference_steps",
    ),
    Counterpart(
        "sampling.shift",
        flow_grpo="the scheduler's",
        dancegrpo="`--shift`",
        unirl="`pipeline.shift`",
        official="`infer_flow_shift_video`",
        elsewhere="flow_shift timestep_shift time_shift",
    ),
    Counterpart(
        "sampling.guidance_scale",
        flow_grpo="`sample.guidance_scale`, `train.cfg`",
        unirl="`sampling.guidance_scale`",
        official="`cfg_scale`",
        elsewhere="guidance cfg_infer",
    ),
    Counterpart(
        "sampling.num_frames",
        flow_grpo="`frames`",
        dancegrpo="`--t`",
        unirl="`sampling.num_frames`",
        official="`sample_n_frames`",
        elsewhere="frame_number video_length",
    ),
    Counterpart(
        "sampling.height",
        flow_grpo="`height`",
        dancegrpo="`--h`",
        unirl="`sampling.height`",
        official="`video_bucket_hw_base_size`",
    ),
    Counterpart(
        "sampling.width",
        flow_grpo="`width`",
        dancegrpo="`--w`",
        unirl="`sampling.width`",
        official="`video_bucket_hw_base_size`",
    ),
    Counterpart(
        "sampling.sde_window",
        flow_grpo="`sample.sde_window_size`",
        unirl="with `sampling.scheduler`: `WindowScheduler`",
        elsewhere="window_size",
    ),
    Counterpart(
        "sampling.shared_initial_noise",
        flow_grpo="`sample.same_latent`",
        dancegrpo="`--use_same_noise`",
        unirl="`sampling.init_same_noise`",
        official="`use_same_noise`",
        elsewhere="same_noise",
    ),
    Counterpart(
        "train.group_size",
        flow_grpo="`sample.num_image_per_prompt`",
        dancegrpo="`--num_generations`",
        unirl="`sampling.samples_per_prompt`",
        official="`--num_generations`",
        elsewhere="num_videos_per_prompt",
    ),
    Counterpart(
        "train.prompts_per_iteration",
        flow_grpo="GPUs x `sample.train_batch_size` x `num_batches_per_epoch` / "
        "`num_image_per_prompt`",
        dancegrpo="GPUs / `--sp_size` x `--train_batch_size`",
        unirl="`batch_size`",
        official="GPUs / `--sp_size` x `--batch_size` / `--num_generations`",
    ),
    Counterpart("train.batch_size", elsewhere="per_device_train_batch_size train_batch_size"),
    Counterpart(
        "train.optimizer_steps",
        flow_grpo="`num_batches_per_epoch` / `gradient_accumulation_steps`",
        dancegrpo="`--bestofn` / `--gradient_accumulation_steps`",
        unirl="`stack.num_updates_per_batch`",
        official="1",
        elsewhere="num_iterations num_inner_epochs ppo_epochs",
    ),
    Counterpart(
        "train.timestep_fraction",
        flow_grpo="`train.timestep_fraction`",
        dancegrpo="`--timestep_fraction`",
        unirl="`sampling.scheduler.timestep_fraction`, `num_sde_steps`",
        official="`timestep_fraction`",
    ),
    Counterpart(
        "train.iterations",
        flow_grpo="`num_epochs`",
        dancegrpo="`--max_train_steps`",
        official="`--max_steps`",
        elsewhere="epochs num_train_epochs",
    ),
    Counterpart(
        "train.learning_rate",
        flow_grpo="`train.learning_rate`",
        dancegrpo="`--learning_rate`",
        unirl="`backend.optimizer_cfg.learning_rate`",
        official="`--learning_rate`",
        elsewhere="lr",
    ),
    Counterpart("train.schedule", elsewhere="lr_scheduler lr_scheduler_type lr_schedule"),
    Counterpart("train.warmup_steps", elsewhere="lr_warmup_steps num_warmup_steps"),
    Counterpart(
        "train.optimizer",
        flow_grpo="AdamW",
        dancegrpo="AdamW",
        unirl="AdamW",
        official="`--use_muon`",
        elsewhere="optim optimizer_type",
    ),
    Counterpart("train.weight_decay", elsewhere="adam_weight_decay wd"),
    Counterpart("train.eps", elsewhere="adam_epsilon epsilon_adam"),
    Counterpart("train.max_grad_norm", elsewhere="clip_grad max_norm gradient_clip"),
    Counterpart("train.ema_decay", elsewhere="ema use_ema"),
    Counterpart(
        "train.engine",
        dancegrpo="FSDP",
        unirl="`backend.fsdp_cfg`",
        official="`--enable_fsdp`",
        elsewhere="fsdp deepspeed zero_stage zero",
        value="zero3",
    ),
    Counterpart(
        "reward.name",
        flow_grpo="`reward_fn`",
        dancegrpo="`--use_videoalign`",
        unirl="`reward.backend`",
        official="`--reward_model`",
        elsewhere="reward_funcs reward_func",
    ),
    Counterpart(
        "reward.weights",
        flow_grpo="in `reward_fn`",
        dancegrpo="`--vq_coef`, `--mq_coef`",
        official="`--reward_weights`",
    ),
    Counterpart(
        "objective.clip_range",
        flow_grpo="`train.clip_range`",
        dancegrpo="1e-4",
        unirl="`algorithm.clip_range`",
        official="`clip_range`",
        elsewhere="cliprange clip_eps clip_epsilon epsilon",
    ),
    Counterpart("objective.advantage_clamp", elsewhere="adv_clip_max advantage_clip"),
    Counterpart(
        "objective.advantage_std",
        flow_grpo="`sample.global_std`",
        unirl="`adv_use_global_std`",
        elsewhere="scale_rewards",
        value="batch",
    ),
    Counterpart("objective.surrogate", elsewhere="loss_type loss"),
    Counterpart("objective.equalizer", official="`--use_grad_balancing`"),
    Counterpart(
        "kl.strategy",
        flow_grpo="with `train.beta` > 0: `fixed`",
        dancegrpo="always `none`",
        unirl="with `algorithm.beta` > 0: `fixed`",
        official="`--use_moving_KL`, `--use_dual_kl`",
    ),
    Counterpart(
        "kl.lambda_max",
        flow_grpo="`train.beta`",
        unirl="`algorithm.beta`",
        official="`--kl_coef`, `--kl_weight`",
        elsewhere="kl_beta init_kl_coef",
        also="lambda_min",
    ),
    Counterpart("kl.anchor_interval", official="`--update_ref_model_step`"),
    Counterpart("kl.beta_pos", official="`--dual_kl_moving_weight`"),
    Counterpart("kl.beta_vel", official="`--dual_kl_step_weight`"),
    Counterpart(
        "train.checkpoint_interval",
        flow_grpo="`save_freq`",
        dancegrpo="`--checkpointing_steps`",
        official="`--save_interval`",
        elsewhere="save_steps",
    ),
    Counterpart(
        "train.keep_checkpoints",
        elsewhere="save_total_limit checkpoints_total_limit num_checkpoint_limit",
    ),
    Counterpart(
        "eval.interval",
        flow_grpo="`eval_freq`",
        official="`--validation_interval`",
        elsewhere="eval_steps eval_every validation_steps",
    ),
    Counterpart("output", elsewhere="output_dir save_dir logdir logging_dir"),
    Counterpart("tracking.trackers", elsewhere="report_to log_with wandb use_wandb"),
    Counterpart("tracking.project", elsewhere="project_name wandb_project"),
)
"""Our settings in the order of the page; several may have the same name elsewhere."""

INSTEAD = {
    "config": "the YAML file comes first, without an option: `sage-fast train config.yaml`",
    "config_file": "the YAML file comes first, without an option: `sage-fast train config.yaml`",
    "resume_from_checkpoint": "`sage-fast train RUN --resume` continues a run from its last "
    "checkpoint",
    "resume_from": "`sage-fast train RUN --resume` continues a run from its last checkpoint",
    "gradient_accumulation_steps": "it follows: an update has all samples of an iteration, in "
    "forwards of `--train.batch_size`; `--train.optimizer_steps` says how many updates there are",
    "num_processes": "`torchrun --nproc-per-node N -m sage_fast train config.yaml` starts N ranks",
    "num_gpus": "`torchrun --nproc-per-node N -m sage_fast train config.yaml` starts N ranks",
    "debug": "`--dry-run` checks without training; each rank writes everything into its file in "
    "`logs/` of the run",
    "verbose": "each rank writes everything into its file in `logs/` of the run",
}
"""Name elsewhere -> what there is here instead of a setting, as Markdown."""

FORMER = {"target_share": "kl.lambda_max", "lambda_limit": "kl.lambda_max"}
"""Last part of a setting that is not offered any more -> the setting meant."""

AMBIGUOUS = {"backend", "batch_size", "strategy", "model"}
"""Last parts of names above that mean too many things: a wrong hint is worse than none."""

_LEADING_NAMES = re.compile(r"((?:`[^`]+`)(?:, `[^`]+`)*)(?:, [^`]*)?")
"""A cell that begins with names in code and has nothing after them, or words."""


def names_elsewhere(row: Counterpart) -> list[str]:
    """Return the last parts of the names that a row has, without dashes and ambiguous ones."""
    names = row.elsewhere.split()
    for cell in (row.flow_grpo, row.dancegrpo, row.unirl, row.official):
        found = _LEADING_NAMES.fullmatch(cell)
        if found is not None:
            names += re.findall(r"`([^`]+)`", found[1])
    last_parts = [name.removeprefix("--").rpartition(".")[2] for name in names]
    unique = dict.fromkeys(last_parts)
    return [name for name in unique if name not in AMBIGUOUS]


def _meanings() -> dict[str, list[str]]:
    meant = {name: [setting] for name, setting in FORMER.items()}
    for row in COUNTERPARTS:
        for name in names_elsewhere(row):
            meant.setdefault(name, []).append(row.setting)
    return meant


MEANINGS = _meanings()
"""Last part of a name in other trainers, or of a setting that is not offered any more -> the
settings meant. It may also be the name of a setting of ours, which then wins."""
