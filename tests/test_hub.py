"""A model on the hub: reachable, cached, or neither. The tests run without network (HF_HUB_OFFLINE in conftest.py)."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import RepositoryNotFoundError

from sage_fast.config.schema import ModelConfig, SamplingConfig
from sage_fast.models.load import find_spec, load_model, reachable
from sage_fast.testbed import BASE
from sage_fast.util.errors import UserError
from tests.tiny_checkpoint import write_tiny_checkpoint

REPOSITORY = "someone/tiny"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    reachable.cache_clear()
    return tmp_path


def downloaded(cache: Path, checkpoint: Path) -> None:
    """Put a checkpoint into the cache as `REPOSITORY`."""
    folder = cache / "models--someone--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / ("0" * 40)).symlink_to(checkpoint)


def test_without_network_the_message_says_what_to_do(cache: Path) -> None:
    with pytest.raises(UserError) as error:
        load_model(ModelConfig(path=REPOSITORY, dtype="float32"), SamplingConfig(), torch.device("cpu"), seed=0)
    for part in ("cannot be reached", str(cache), f"hf download {REPOSITORY} --local-dir", "--model.path", "HF_HOME"):
        assert part in str(error.value)


def test_without_network_a_downloaded_model_is_used(cache: Path) -> None:
    downloaded(cache, BASE)
    config = ModelConfig(path=REPOSITORY, dtype="float32", lora_rank=4)
    model = load_model(config, SamplingConfig(), torch.device("cpu"), seed=0)
    assert model.spec.path == REPOSITORY  # the key of its prompt embeddings, with network and without


def test_the_guider_of_a_downloaded_model_says_that_it_is_distilled(cache: Path, tmp_path: Path) -> None:
    """As that of a folder does; the name says nothing."""
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint")
    file = checkpoint / "guider" / "guider_config.json"
    file.write_text(file.read_text().replace('"enabled": true', '"enabled": false'))
    downloaded(cache, checkpoint)
    assert find_spec(REPOSITORY, fetch=True).distillation == find_spec(str(checkpoint)).distillation is not None


def test_what_the_hub_answers_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "model_info", lambda self, path, timeout: object())
    assert reachable(REPOSITORY) == REPOSITORY
    assert reachable(str(BASE)) == str(BASE)


def test_no_such_model(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RepositoryNotFoundError("404", response=Mock(headers={}))
    monkeypatch.setattr(HfApi, "model_info", Mock(side_effect=error))
    with pytest.raises(UserError, match="no such folder, and no such model on the hub"):
        reachable(REPOSITORY)
