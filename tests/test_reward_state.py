"""What the code of a reward or a model does to the process: settings of PyTorch, and videos that
others read."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sage_fast.config.schema import RewardConfig
from sage_fast.loading import load_setup, resolve
from sage_fast.rewards import CompositeReward, load_reward
from sage_fast.trainer import Trainer
from sage_fast.util import guard
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import UserError
from sage_fast.util.guard import SETTINGS, guarded
from sage_fast.util.plugins import import_plugin
from tests.tiny import keys_of, settings

REWARD = """
import torch
{module}
class Bright:
    def __init__(self):
        {constructor}
    def score(self, videos, prompts):
        {call}
        return {{"bright": videos.float().mean((1, 2, 3, 4))}}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with no modules yet; the process's settings are checked at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(guard, "_noted", set())
    before = {name: guard._value(name) for name in SETTINGS}
    yield tmp_path
    sys.modules.pop("bright", None)
    assert {name: guard._value(name) for name in SETTINGS} == before


def write(**lines: str) -> None:
    sys.modules.pop("bright", None)
    Path("bright.py").write_text(
        REWARD.format(**dict.fromkeys(("module", "constructor", "call"), "pass") | lines)
    )


def rows() -> list[dict[str, Any]]:
    config = settings(
        reward__name="bright:Bright", reward__weights={"bright": 1.0},
        train__prompts_per_iteration=1, train__group_size=2, sampling__steps=2,
    )  # fmt: skip
    setup = load_setup(resolve(config))
    setup.encode()
    trainer = Trainer(setup.resolved, setup.model, setup.reward, setup.prompts, setup.embeddings)
    done = [trainer.iteration(index) for index in range(2)]
    weights = {
        name: p.detach().double().sum().item() for name, p in trainer.policy.parameters().items()
    }
    return [
        weights,
        *({k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in done),
    ]


def test_a_run_is_that_of_a_reward_without_the_lines() -> None:
    write()
    expected = rows()
    write(
        module="torch.set_grad_enabled(False); torch.manual_seed(3); "
        "skip = lambda tensor, *_, **__: tensor\n"
        "torch.nn.init.kaiming_uniform_ = torch.nn.init.normal_ = torch.nn.init.zeros_ = "
        "torch.nn.init.uniform_ = skip",
        constructor=(
            "torch.set_default_dtype(torch.float64); torch.autocast('cpu', "
            "torch.bfloat16).__enter__()"
        ),
        call="torch.use_deterministic_algorithms(True); torch.set_default_device('meta'); "
        "torch.manual_seed(1); torch.nn.modules.module.register_module_forward_hook(lambda module, "
        "inputs, output: output * 2)",
    )
    assert rows() == expected


LINES = {
    "torch.set_grad_enabled": "torch.set_grad_enabled(False)",
    "torch.set_default_dtype": "torch.set_default_dtype(torch.bfloat16)",
    "torch.set_default_device": "torch.set_default_device('meta')",
    "torch.set_num_threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "torch.use_deterministic_algorithms": (
        "torch.use_deterministic_algorithms(True, warn_only=True)"
    ),
    "torch.autograd.set_detect_anomaly": "torch.autograd.set_detect_anomaly(True)",
    "torch.autocast('cpu', enabled)": "torch.set_autocast_enabled('cpu', True)",
    "torch.autocast('cuda', dtype)": "torch.set_autocast_dtype('cuda', torch.bfloat16)",
    "torch.set_float32_matmul_precision": "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.fp32_precision": (
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'"
    ),
    "torch.backends.fp32_precision": "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.cudnn.allow_tf32": "torch.backends.cudnn.allow_tf32 = False",
    "torch.backends.cudnn.benchmark": "torch.backends.cudnn.benchmark = True",
    "torch.backends.mkldnn.enabled": "torch.backends.mkldnn.enabled = False",
    "torch.backends.cuda.enable_flash_sdp": "torch.backends.cuda.enable_flash_sdp(False)",
    "torch.inference_mode": "torch.kept = torch.inference_mode(True); torch.kept.__enter__()",
    "os.chdir": "__import__('os').chdir('/')",
    "_global_forward_hooks": (
        "torch.nn.modules.module.register_module_forward_hook(lambda *_: 1 / 0)"
    ),
    "_global_forward_hooks_with_kwargs": (
        "torch.nn.modules.module.register_module_forward_hook(lambda *_: 1 / 0, with_kwargs=True, "
        "always_call=True)"
    ),
    "_global_forward_pre_hooks": (
        "torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: 1 / 0)"
    ),
    "_global_backward_hooks": (
        "torch.nn.modules.module.register_module_full_backward_hook(lambda *_: 1 / 0)"
    ),
    "_global_parameter_registration_hooks": (
        "torch.nn.modules.module.register_module_parameter_registration_hook(lambda *_: 1 / 0)"
    ),
    "torch.nn.init.kaiming_uniform_": (
        "torch.nn.init.kaiming_uniform_ = lambda tensor, *_, **__: tensor"
    ),
    "Linear.reset_parameters": "torch.nn.Linear.reset_parameters = lambda self: None",
    "LayerNorm.reset_parameters": "torch.nn.LayerNorm.reset_parameters = lambda self: None",
    "torch.nn.functional.scaled_dot_product_attention": (
        "torch.nn.functional.scaled_dot_product_attention = lambda q, k, v, **_: v"
    ),
    "logging": "__import__('logging').disable(50)",
    "logging of loggers": "__import__('logging.config').config.dictConfig({'version': 1})",
    "of loggers": "logging = __import__('logging'); "
    "[logging.getLogger(name).setLevel(50) for name in logging.root.manager.loggerDict if name[:9] "
    "== 'sage_fast']",
    "sys.stdout": "__import__('sys').stdout = open('/dev/null', 'w')",
    "sys.stderr": "__import__('sys').stderr = open('/dev/null', 'w')",
    "PIL.Image.MAX_IMAGE_PIXELS": "__import__('PIL.Image').Image.MAX_IMAGE_PIXELS = None",
    "signal.SIGTERM": "__import__('signal').signal(15, __import__('signal').SIG_IGN)",
    "signal.SIGINT": "__import__('signal').signal(2, __import__('signal').SIG_DFL)",
    "signal.SIGPIPE": "__import__('signal').signal(13, __import__('signal').SIG_DFL)",
    "signal.SIGCHLD": "__import__('signal').signal(17, __import__('signal').SIG_IGN)",
    "torch.nn.functional.gelu": "torch.nn.functional.gelu = lambda x, **_: x",
    "torch.nn.functional.layer_norm": "torch.nn.functional.layer_norm = lambda x, *_, **__: x",
    "torch.matmul": "torch.matmul = lambda a, b: a",
    "Tensor.add": "torch.Tensor.add = lambda self, *_: self",
    "torch.nn.modules.linear.Linear.forward": "torch.nn.Linear.forward = lambda self, x: x",
    "torch.nn.modules.linear.Linear.__call__": "torch.nn.Linear.__call__ = lambda self, x: x",
    "torch.nn.modules.normalization.LayerNorm.extra": "torch.nn.LayerNorm.extra = lambda self: 1",
    "os.environ of the launcher": "__import__('os').environ.update(RANK='3', LOCAL_RANK='3')",
    "sys.setrecursionlimit": "__import__('sys').setrecursionlimit(3000)",
    "socket.setdefaulttimeout": "__import__('socket').setdefaulttimeout(1)",
    "numpy.seterr": "__import__('numpy').seterr(all='raise')",
    "torch.backends.mha.set_fastpath_enabled": "torch.backends.mha.set_fastpath_enabled(False)",
    "torch.set_flush_denormal": "torch.set_flush_denormal(True)",
    "torch.autocast's blocks": "torch.autocast('cpu', enabled=False).__enter__()",
    "signal.set_wakeup_fd": "import asyncio, signal; loop = asyncio.new_event_loop(); "
    "loop.add_signal_handler(signal.SIGWINCH, print)",
    "signal.alarm": "__import__('signal').alarm(1000)",
    "signal.SIGALRM": "__import__('signal').signal(14, print)",
    "attention back end of diffusers": (
        "from diffusers.models import attention_dispatch as d; "
        "d._AttentionBackendRegistry._active_backend = d.AttentionBackendName._NATIVE_MATH"
    ),
    "torch.optim.adamw.AdamW.zero_grad": "torch.optim.AdamW.zero_grad = print",
    "torch.utils.checkpoint.checkpoint": "torch.utils.checkpoint.checkpoint = print",
    "torch.distributed.all_reduce": "torch.distributed.all_reduce = print",
    "torch.nn.utils.clip_grad_norm_": "torch.nn.utils.clip_grad_norm_ = print",
    "torch._C._nn.gelu": "torch._C._nn.gelu = print",
    "FeedForward.forward": (
        "__import__('diffusers.models.attention').models.attention.FeedForward.forward = print"
    ),
    "sage_fast.ops.transition_score.transition_score": (
        "__import__('sys').modules['sage_fast.ops.transition_score'].transition_score = print"
    ),
}


@pytest.mark.parametrize("place", ["module", "constructor", "call"])
@pytest.mark.parametrize("setting", LINES)
def test_a_setting_is_put_back_and_named_once(
    setting: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    write(**{place: LINES[setting]})
    reward = CompositeReward.of(RewardConfig(name="bright:Bright", weights={"bright": 1.0}))
    for _ in range(2):
        reward(torch.rand(1, 2, 3, 8, 8), [PromptKey("a")])
    if (setting, place) == ("torch.set_grad_enabled", "call"):
        return  # a call is without gradients anyway
    (note,) = (" ".join(record.getMessage().split()) for record in caplog.records)
    assert note.startswith("note: reward 'bright:Bright' changes ")
    assert setting in note


def test_a_call_that_is_overdue_puts_back_no_folder(here: Path) -> None:
    """It ends on its thread, when the run, or what follows it, is elsewhere."""
    (here / "elsewhere").mkdir()

    def overdue() -> None:
        with guarded("reward 'slow'"):
            os.chdir(here / "elsewhere")

    thread = threading.Thread(target=overdue)
    thread.start()
    thread.join()
    assert Path.cwd() == here / "elsewhere"
    with guarded("reward 'quick'"):
        os.chdir(here)
    assert Path.cwd() == here / "elsewhere"
    os.chdir(here)


def test_what_cannot_be_put_back_ends_the_run() -> None:
    write(module="entered = torch.device('meta'); entered.__enter__()")
    with pytest.raises(
        UserError, match=r"changes torch\.set_default_device, torch's modes for the whole process"
    ):
        load_reward(RewardConfig(name="bright:Bright"))
    sys.modules["bright"].entered.__exit__(None, None, None)


def test_what_a_call_changes_for_good_ends_the_run_and_drops_nothing() -> None:
    write(call="self.entered = torch.device('meta'); self.entered.__enter__()")
    reward = CompositeReward.of(RewardConfig(name="bright:Bright", weights={"bright": 1.0}))
    with pytest.raises(
        UserError, match=r"reward 'bright:Bright' changes torch\.set_default_device"
    ):
        reward(torch.rand(1, 2, 3, 8, 8), [PromptKey("a")])
    reward.callers[0]._backends[0].reward.entered.__exit__(None, None, None)  # type: ignore[attr-defined]


HARMLESS = {
    "import": (
        "import transformers.models.vit.modeling_vit, diffusers.pipelines, torchvision, cv2, "
        "deepspeed, peft"
    ),
    "compile": "torch.compile(torch.nn.Linear(2, 2), backend='eager')(torch.rand(1, 2))",
    "train": "layer = torch.nn.Linear(2, 2); rule = torch.optim.AdamW(layer.parameters()); "
    "torch.enable_grad()(lambda: layer(torch.rand(1, 2)).sum().backward())(); rule.step()",
    "event loop": "import asyncio; asyncio.run(asyncio.sleep(0))",
    "script": "torch.jit.script(torch.nn.Linear(2, 2).eval())(torch.rand(1, 2))",
    "trace": "import torch.fx; torch.fx.symbolic_trace(torch.nn.Linear(2, 2))",
    "path": "import sys; sys.path.insert(0, '/nowhere')",
}


@pytest.mark.parametrize("place", ["module", "constructor", "call"])
@pytest.mark.parametrize("what", HARMLESS)
def test_what_harms_no_run_is_not_noted(
    what: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = HARMLESS[what]
    if what == "import":
        line = "; ".join(
            f"import {name}"
            for name in line[7:].split(", ")
            if importlib.util.find_spec(name.partition(".")[0])
        )
    write(**{place: line})
    reward = CompositeReward.of(
        RewardConfig(name="bright:Bright", weights={"bright": 1.0}, retries=0)
    )
    scores = reward(torch.rand(1, 2, 3, 8, 8), [PromptKey("a")])
    assert scores.notes == ()
    assert [
        record.getMessage() for record in caplog.records if "changes" in record.getMessage()
    ] == []


def test_a_failing_module_and_a_model_are_cleaned_up_after(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Path("bright.py").write_text("import torch\ntorch.set_default_dtype(torch.float64)\n1 / 0\n")
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        load_reward(RewardConfig(name="bright:Bright"))
    with guarded("model.path = 'bright:Model:x'"), pytest.raises(ZeroDivisionError):
        import_plugin("bright:Model", "model.path")
    assert [record.getMessage()[:20] for record in caplog.records] == [
        "note: reward 'bright",
        "note: model.path = '",
    ]


# -- the videos ------------------------------------------------------------------------------------


def in_place(videos: Tensor) -> None:
    videos.mul_(2).sub_(1)


def by_data(videos: Tensor) -> None:
    videos.data[:] = 0


def by_numpy(videos: Tensor) -> None:
    np.subtract(1, videos.numpy(), out=videos.numpy())


def by_resize(videos: Tensor) -> None:
    videos.resize_(1).fill_(7)


def by_freeing(videos: Tensor) -> None:
    videos.untyped_storage().resize_(0)


def one_pixel(videos: Tensor) -> None:
    videos.numpy().reshape(-1)[-1] += 1


@pytest.mark.parametrize(
    "write_into", [in_place, by_data, by_numpy, by_resize, by_freeing, one_pixel]
)
def test_each_reader_gets_what_was_decoded(
    write_into: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def reward(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        mean = videos.mean((1, 2, 3, 4))
        write_into(videos)
        return {"a": mean}

    videos = torch.rand(2, 3, 3, 8, 8)
    before = videos.clone()
    composite = CompositeReward(reward, RewardConfig(name="writes", weights={"a": 1.0}))
    keys = keys_of(["a", "b"])
    for _ in range(2):
        assert composite(videos, keys).rewards.tolist() == before.mean((1, 2, 3, 4)).tolist()
    assert torch.equal(videos, before)
    (note,) = (" ".join(record.getMessage().split()) for record in caplog.records)
    assert note == "note: reward 'writes' writes into the videos, of which it has a copy"


def test_a_reward_that_only_reads_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    videos = torch.rand(2, 3, 8, 8, 3).permute(0, 1, 4, 2, 3)
    videos[0, 0, 0, 0, 0] = torch.nan
    composite = CompositeReward(
        lambda v, p: {"a": v[:, 0, 0, 0, 1]}, RewardConfig(name="reads", weights={"a": 1.0})
    )
    assert composite(videos, keys_of(["a", "b"])).dropped == 0
    assert not caplog.records


def test_metadata_are_a_copy_as_well() -> None:
    def reward(
        videos: Tensor, prompts: list[str], metadata: list[dict[str, Any]]
    ) -> dict[str, Tensor]:
        return {
            "a": torch.tensor(
                [float(len(of_one["tags"].append(1) or of_one["tags"])) for of_one in metadata]
            )
        }

    key = PromptKey("a")
    known = {key: {"tags": []}}
    composite = CompositeReward(reward, RewardConfig(name="r", weights={"a": 1.0}), known)  # type: ignore[arg-type]
    assert [
        composite(torch.rand(1, 1, 3, 8, 8), [PromptKey("a")]).rewards.item() for _ in range(2)
    ] == [1, 1]
