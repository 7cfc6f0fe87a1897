"""The attention backends that this machine has, and the errors for those that it has not."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sage_fast import cli
from sage_fast.policy.attention import ATTENTION, check_attention, measure_attention, usable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


def exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", query.double(), key.double()) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", F.softmax(scores, dim=-1), value.double())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", usable(DEVICE, DTYPE))
def test_backends_compute_attention(backend: str, masked: bool) -> None:
    """Values and gradients, with and without a key mask."""
    shape = (2, 77, 4, 64)
    inputs = [torch.randn(shape, device=DEVICE, dtype=DTYPE, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(shape, device=DEVICE, dtype=DTYPE)
    mask = torch.arange(77, device=DEVICE)[None] < torch.tensor([[77], [50]], device=DEVICE) if masked else None
    out, expected = ATTENTION[backend](*inputs, mask), exact(*inputs, mask)
    assert out.shape == shape
    tolerance = 1e-5 if torch.float32 == DTYPE else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    for mine, reference in zip(
        torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(expected, inputs, upstream.double())
    ):
        assert (mine - reference).norm() <= tolerance * reference.norm()


def test_what_is_missing_is_an_error_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_attention("auto", torch.device("cpu"), torch.float32)
    check_attention("sdpa", torch.device("cpu"), torch.float32)
    with pytest.raises(
        ValueError, match="'flash' needs a CUDA device, and this is the cpu; expected one of auto, sdpa"
    ):
        check_attention("flash", torch.device("cpu"), torch.bfloat16)
    # What a GPU machine without the packages says; nothing below touches a GPU.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    gpu = torch.device("cuda")
    with pytest.raises(ValueError, match=r"'flash' is not installed: pip install 'sage-fast\[flash-attn\]'"):
        check_attention("flash", gpu, torch.bfloat16)
    with pytest.raises(ValueError, match=r"'xformers' is not installed: pip install 'sage-fast\[xformers\]'"):
        check_attention("xformers", gpu, torch.bfloat16)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match=r"'flash' needs model.dtype = bfloat16"):
        check_attention("flash", gpu, torch.float32)
    with pytest.raises(ValueError, match=r"'flash3' does not run on NVIDIA A100; expected one of auto, sdpa"):
        check_attention("flash3", gpu, torch.bfloat16)
    assert "flash" in usable(gpu, torch.bfloat16)
    assert "flash3" not in usable(gpu, torch.bfloat16)


def test_auto_measures_where_there_is_a_choice() -> None:
    measured = measure_attention((1, 64, 2, 64), DEVICE, DTYPE)
    names = usable(DEVICE, DTYPE)
    assert list(measured) == (names if len(names) > 1 else [])
    assert all(milliseconds > 0 for milliseconds in measured.values())


def test_the_choice_is_asked_for_by_name_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    command = ["train", "configs/demo.yaml", "--output", str(run), "--train.iterations", "1", "--eval.num_prompts", "1"]
    command += ["--train.prompts_per_iteration", "1", "--train.group_size", "2", "--eval.seeds_per_prompt", "1"]
    assert cli.main([*command, "--model.attention", "flsh"]) == 2
    assert "did you mean 'flash'?" in capsys.readouterr().err
    if DEVICE.type == "cpu":
        assert cli.main([*command, "--model.attention", "xformers"]) == 2
        assert "model.attention = 'xformers' needs a CUDA device" in capsys.readouterr().err
    assert not run.exists()
    assert cli.main([*command, "--model.attention", "sdpa"]) == 0
    assert "attention: sdpa" in capsys.readouterr().out
    assert json.loads((run / "run.json").read_text())["attention"] == "sdpa"
