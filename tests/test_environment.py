"""What a run records about its machine: free memory, device, commit, versions."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.ops import implementation
from sage_fast.parallel.stored_rollouts import check_trajectories
from sage_fast.util.environment import command_line, commit, environment, format_bytes, free_bytes
from sage_fast.util.errors import UserError
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import local_device
from tests.tiny import settings, tiny_model

CPU = torch.device("cpu")


def meminfo(field: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def test_free_memory_counts_the_page_cache() -> None:
    """MemAvailable counts it, MemFree does not: after many reads MemFree is near zero, but the
    cache can be freed."""
    assert free_bytes(CPU) == pytest.approx(meminfo("MemAvailable"), rel=0.2)


def test_rollouts_and_decode_ask_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = ResolvedConfig(settings())
    model = tiny_model(resolved.config)
    assert "host memory" in check_trajectories(resolved, model)
    monkeypatch.setattr("sage_fast.parallel.stored_rollouts.free_bytes", lambda device: 1000)
    with pytest.raises(UserError, match=r"1000 B are free; lower train.group_size"):
        check_trajectories(resolved, model)
    monkeypatch.setattr("sage_fast.models.hunyuan15.decode.free_bytes", lambda device: 1000)
    with pytest.raises(UserError, match="of the free memory is 0 MiB"):
        model.decoder.plan((32, 5, 4, 4))


@pytest.mark.parametrize("start", [initialize, local_device])
def test_a_process_starts_with_float32_sums_in_split_matmuls(
    start: Callable[[], torch.device],
) -> None:
    """Runs, tools and benchmarks choose their device by one of these."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True  # PyTorch's default
    assert start() == CPU
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def test_environment_is_enough_to_repeat_a_result() -> None:
    facts = environment(CPU, implementation(CPU))
    assert {
        "commit",
        "date",
        "device",
        "threads",
        "operators",
        "python",
        "torch",
        "diffusers",
        "peft",
    } <= facts.keys()
    assert facts["device"] not in ("x86_64", "")  # the model of the CPU, not its instruction set
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    if head.returncode == 0:
        found = commit()
        assert found is not None
        assert found.removesuffix("+changes") == head.stdout.strip()


def test_a_copy_without_git_is_told_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy without `.git` takes it from $COMMIT; a checkout asks git."""
    monkeypatch.setenv("COMMIT", "0123abc")
    if (Path(__file__).parents[1] / ".git").exists():
        assert commit() != "0123abc"
    monkeypatch.setattr(
        "sage_fast.util.environment.__file__", str(tmp_path / "sage_fast" / "environment.py")
    )
    assert commit() == "0123abc"
    monkeypatch.delenv("COMMIT")
    assert commit() is None


def test_the_command_can_be_typed_again() -> None:
    assert (
        command_line(["/a/sage_fast/__main__.py", "train", "my config.yaml"])
        == "python -m sage_fast train 'my config.yaml'"
    )
    assert command_line(["bin/sage-fast", "train"]) == "bin/sage-fast train"


def test_sizes_in_words() -> None:
    assert [format_bytes(n) for n in (12, 2048, 3 * 2**20, 15.5 * 2**30)] == [
        "12 B",
        "2.00 KiB",
        "3.00 MiB",
        "15.50 GiB",
    ]
