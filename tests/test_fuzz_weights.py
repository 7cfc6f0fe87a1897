"""Damaged checkpoints and odd LoRA files: a result, or one of our own errors; see
tests/test_fuzz.py."""

from __future__ import annotations

import functools
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from sage_fast.models.lora.adapter import LORA_FILE, add_lora, load_lora
from sage_fast.run.checkpoint import load_checkpoint, save_checkpoint
from sage_fast.testbed.tiny_model import TestbedTransformer
from sage_fast.trainer import Trainer
from tests.test_fuzz import cases, damaged, ours, scratch
from tests.tiny import settings, tiny_trainer


@functools.cache
def checkpointed() -> tuple[Trainer, Path]:
    """A trainer and the run folder that holds its checkpoint."""
    trainer = tiny_trainer(settings(train__ema_decay=0.9))
    trainer.iteration(0)
    run = Path(tempfile.mkdtemp())
    save_checkpoint(run, 1, trainer.engine, trainer.state_dict(), trainer.anchor)
    return trainer, run


@pytest.fixture(scope="module", autouse=True)
def _no_checkpoint_stays() -> Iterator[None]:
    yield
    if checkpointed.cache_info().currsize:
        shutil.rmtree(checkpointed()[1])


CHECKPOINT = (
    "manifest.json",
    "training/state.json",
    "training/optimizer.json",
    *(
        f"training/{kind}-00001-of-00001.safetensors"
        for kind in ("trainable", "ema", "anchor", "optimizer-exp_avg")
    ),
)


@pytest.mark.fault("damaged checkpoints", "a result, or one line that says what is wrong")
@cases(120)
@given(st.data())
def test_checkpoints(data: Any) -> None:
    trainer, whole = checkpointed()
    with scratch() as run:
        folder = (
            Path(shutil.copytree(whole, run, dirs_exist_ok=True))
            / "checkpoints"
            / "iteration-000001"
        )
        file = folder / data.draw(st.sampled_from(CHECKPOINT))
        content = data.draw(st.one_of(st.none(), damaged(file.read_bytes())))
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        with ours():
            found = load_checkpoint(run, trainer.engine)
            if found is not None:
                trainer.load_state_dict(found[1], found[2])


# -- LoRA files ------------------------------------------------------------------------------------


@functools.cache
def adapter() -> dict[str, torch.Tensor]:
    """A LoRA of two layers, as a run leaves it."""
    transformer = TestbedTransformer()
    add_lora(transformer, rank=4, alpha=4, targets=r"transformer_blocks\.0\.attn\.to_[qk]", seed=0)
    return {
        f"{name.replace('.default', '')}": p.detach()
        for name, p in transformer.named_parameters()
        if ".lora_" in name
    }


@st.composite
def adapters(draw: Any) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.clone() for name, tensor in adapter().items()}
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(tensors)))
        tensor = tensors[name]
        change = draw(st.sampled_from(["lost", "rank", "value", "type", "shape", "name", "more"]))
        if change == "lost" and len(tensors) > 1:
            del tensors[name]
        elif change == "rank":
            size = draw(st.integers(0, 6))
            tensors[name] = torch.zeros(
                (size, tensor.shape[1]) if "lora_A" in name else (tensor.shape[0], size)
            )
        elif change == "value":
            tensors[name] = tensor.fill_(draw(st.sampled_from([math.nan, math.inf, 0.0, 1e30])))
        elif change == "type":
            types = [
                torch.int8,
                torch.bool,
                torch.float16,
                torch.float64,
                torch.float8_e4m3fn,
                torch.complex64,
            ]
            tensors[name] = tensor.to(draw(st.sampled_from(types)))
        elif change == "shape":
            tensors[name] = torch.zeros(draw(st.lists(st.integers(0, 5), max_size=4)))
        elif change == "name":
            new = st.sampled_from(
                [
                    f"transformer.{name}",
                    name.replace("to_", "no_"),
                    name + ".x",
                    name[:-7],
                    "a",
                    ".",
                ]
            )
            tensors[draw(new)] = tensors.pop(name)
        else:
            key = draw(
                st.sampled_from(["alpha", "lora_A.bias", "lora_magnitude_vector", "diff", "weight"])
            )
            tensors[f"transformer_blocks.0.attn.to_q.{key}"] = torch.ones(draw(st.integers(0, 4)))
    return tensors


METADATA = st.sampled_from(
    [None, "", "{}", "[]", "x", '{"r": 8}', '{"r": "x"}', '{"r": 4, "lora_alpha": 8, "y": 1}']
)


@pytest.mark.fault(
    "LoRA files that are damaged, of mixed ranks or types, or not finite",
    "a result, or one line that says what is wrong",
)
@cases(120)
@given(adapters(), METADATA)
def test_lora_files(tensors: dict[str, torch.Tensor], metadata: str | None) -> None:
    """What is accepted is finite, whole and all used."""
    transformer = TestbedTransformer()
    with scratch() as folder, ours():
        save_file(
            tensors,
            folder / LORA_FILE,
            {"lora_adapter_metadata": metadata} if metadata is not None else None,
        )
        load_lora(transformer, folder, "transformer")
        loaded = {
            n.replace(".default", ""): p for n, p in transformer.named_parameters() if ".lora_" in n
        }
        factors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")}
        given_tensors = {
            name.removeprefix("transformer."): tensor for name, tensor in factors.items()
        }
        assert loaded.keys() == given_tensors.keys()
        for name, p in loaded.items():
            assert torch.equal(p, given_tensors[name].float()), name
            assert p.isfinite().all(), name


@pytest.mark.fault(
    "LoRA files that are damaged, of mixed ranks or types, or not finite",
    "a result, or one line that says what is wrong",
)
@cases(60)
@given(st.data())
def test_broken_lora_files(data: Any) -> None:
    with scratch() as folder, ours():
        save_file(adapter(), folder / LORA_FILE)
        (folder / LORA_FILE).write_bytes(data.draw(damaged((folder / LORA_FILE).read_bytes())))
        load_lora(TestbedTransformer(), folder, "transformer")
