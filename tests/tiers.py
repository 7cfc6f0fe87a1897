"""Which tests `make test` leaves to `make test-all`, by the marker `full`.

A test is in `make test` unless it, its file below or `soak` says otherwise. There belongs what
tells within minutes that the trainer still trains: operators, algorithm, rollout, engines, models,
trainer, resumes, three kills and one walk of a new user. `.ci/run` runs both.
"""

from pathlib import Path

import pytest

FULL = {
    # what surrounds training: judging, pages, exports, other people's files, machines
    "test_before_torch.py",
    "test_bench.py",
    "test_blind_study.py",
    "test_chain.py",
    "test_cli.py",
    "test_clip_rewards.py",
    "test_cluster.py",
    "test_console.py",
    "test_container.py",
    "test_contents.py",
    "test_cost.py",
    "test_demo_pictures.py",
    "test_demo_study.py",
    "test_docs.py",
    "test_doctor.py",
    "test_eight_gpus.py",
    "test_encoders.py",
    "test_environment.py",
    "test_examples.py",
    "test_export.py",
    "test_first_real_run.py",
    "test_flash4_kit.py",
    "test_flops.py",
    "test_frame_rate.py",
    "test_fuzz.py",
    "test_fuzz_weights.py",
    "test_gpu_script.py",
    "test_grid.py",
    "test_hpsv3_page.py",
    "test_hub.py",
    "test_images.py",
    "test_judging.py",
    "test_launchers.py",
    "test_lora_files.py",
    "test_method_in_words.py",
    "test_ocr.py",
    "test_others_checkpoints.py",
    "test_others_videos.py",
    "test_package.py",
    "test_pages.py",
    "test_pairs.py",
    "test_passes.py",
    "test_places.py",
    "test_plan.py",
    "test_plan_of_many_samples.py",
    "test_profiler.py",
    "test_profiling.py",
    "test_prompt_habits.py",
    "test_race.py",
    "test_random_weights.py",
    "test_read_metrics.py",
    "test_readme.py",
    "test_report.py",
    "test_reward_kinds.py",
    "test_reward_objects.py",
    "test_reward_runs.py",
    "test_reward_state.py",
    "test_reward_workers.py",
    "test_scaling.py",
    "test_scores.py",
    "test_seams.py",
    "test_search_study.py",
    "test_secrets.py",
    "test_shapes.py",
    "test_signal.py",
    "test_study.py",
    "test_study_manifold.py",
    "test_study_samplers.py",
    "test_text.py",
    "test_trackers.py",
    "test_training_videos.py",
    "test_videoalign.py",
    "test_vlm.py",
    "testbed/test_i2v.py",
    "testbed/test_judge.py",
    "testbed/test_testbed.py",
    # what stops a run, at every moment and on several ranks
    "test_fail_fast.py",
    "test_resume_losses.py",
    "test_stop.py",
    "test_survive.py",
    "test_system_calls.py",
    "test_time_limit.py",
    "test_two_nodes.py",
    # what takes minutes, or is another instance of what stands elsewhere
    "ops/test_compile.py",
    "test_idle_ranks.py",
    "test_image_to_video.py",
    "test_pretend_cuda.py",
    "test_ratio.py",
    "test_second_model.py",
    "test_shared_prefix.py",
    "test_wan_commands.py",
}
"""Files of which every test is `full`."""

STILL_QUICK = {"test_survive.py": ["test_three_kills"]}
"""Tests of these files that `make test` has all the same."""

TESTS = Path(__file__).parent


def check_names() -> None:
    """Refuse a name that is no file, as after a renaming."""
    gone = [name for name in FULL | STILL_QUICK.keys() if not (TESTS / name).is_file()]
    if gone:
        raise pytest.UsageError(f"tests/tiers.py names files that are not there: {sorted(gone)}")


def _name(file: Path) -> str:
    """The file as the tables name it; "" for one of another folder."""
    return str(file.relative_to(TESTS)) if file.is_relative_to(TESTS) else ""


def mark(item: pytest.Item) -> None:
    """Mark a test of a file that is `full`."""
    file = _name(item.path)
    function = getattr(item, "originalname", item.name)
    if file in FULL and function not in STILL_QUICK.get(file, ()):
        item.add_marker("full")


def is_left_out(file: Path, markers: str) -> bool:
    """Whether nothing of the file is wanted by `-m MARKERS`, so that it need not be imported."""
    return markers == "not full" and _name(file) in FULL - STILL_QUICK.keys()
