"""A model on the hub: reachable, cached, or neither.

The tests run without network (HF_HUB_OFFLINE in conftest.py).
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import RepositoryNotFoundError

from sage_fast.config.schema import ModelConfig, SamplingConfig
from sage_fast.models.find import find_spec
from sage_fast.models.hub import reachable
from sage_fast.models.load import load_model
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
        load_model(
            ModelConfig(path=REPOSITORY, dtype="float32"),
            SamplingConfig(),
            torch.device("cpu"),
            seed=0,
        )
    for part in (
        "cannot be reached",
        str(cache),
        f"hf download {REPOSITORY} --local-dir",
        "--model.path",
        "HF_HOME",
    ):
        assert part in str(error.value)


def test_without_network_a_downloaded_model_is_used(cache: Path) -> None:
    downloaded(cache, BASE)
    config = ModelConfig(path=REPOSITORY, dtype="float32", lora_rank=4)
    model = load_model(config, SamplingConfig(), torch.device("cpu"), seed=0)
    # the key of its prompt embeddings, with network and without
    assert model.spec.path == REPOSITORY


def test_the_guider_of_a_downloaded_model_says_that_it_is_distilled(
    cache: Path, tmp_path: Path
) -> None:
    """As that of a folder does; the name says nothing."""
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint")
    file = checkpoint / "guider" / "guider_config.json"
    file.write_text(file.read_text().replace('"enabled": true', '"enabled": false'))
    downloaded(cache, checkpoint)
    assert (
        find_spec(REPOSITORY, fetch=True).distillation
        == find_spec(str(checkpoint)).distillation
        is not None
    )


def test_what_the_hub_answers_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "model_info", lambda self, path, timeout: object())
    assert reachable(REPOSITORY) == REPOSITORY
    assert reachable(str(BASE)) == str(BASE)


def test_no_such_model(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RepositoryNotFoundError("404", response=Mock(headers={}))
    monkeypatch.setattr(HfApi, "model_info", Mock(side_effect=error))
    with pytest.raises(UserError, match="no such folder, and no such model on the hub"):
        reachable(REPOSITORY)


@pytest.mark.parametrize("stray", [".DS_Store", "README.md", "link"])
def test_a_stray_entry_does_not_hide_a_cached_model(cache: Path, stray: str) -> None:
    downloaded(cache, BASE)
    snapshots = cache / "models--someone--tiny" / "snapshots"
    (snapshots / stray).symlink_to("nowhere") if stray == "link" else (snapshots / stray).touch()
    (cache / "models--someone--tiny" / "refs" / "main").write_text("0" * 40 + "\n")
    assert reachable(REPOSITORY) == str(snapshots / ("0" * 40))


def test_a_cache_pinned_by_commit_says_how_to_name_it(cache: Path) -> None:
    downloaded(cache, BASE)
    (cache / "models--someone--tiny" / "refs" / "main").unlink()
    with pytest.raises(
        UserError,
        match=rf"by its commit alone: --model.path {cache}/models--someone--tiny/snapshots/0",
    ):
        reachable(REPOSITORY)


@pytest.mark.parametrize("name", ["model.safetensors", "hunyuan/model.gguf", "lora.ckpt"])
def test_a_single_file_is_called_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(b"GGUF")
    for path in (name, str(tmp_path / name)):
        with pytest.raises(UserError, match="a single file; expected a folder"):
            find_spec(path, fetch=True)
    Path(name).unlink()
    with pytest.raises(UserError, match="a single file; expected a folder"):
        find_spec(name)


class Hub(BaseHTTPRequestHandler):
    """The hub's answers for one model, whose files lie in `folder`."""

    folder: ClassVar[Path]
    commit = "1" * 40

    def files(self) -> dict[str, Path]:
        found = {
            p.relative_to(self.folder).as_posix(): p for p in self.folder.rglob("*") if p.is_file()
        }
        return {"README.md": self.folder / "model_index.json", **found}

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.wfile.write(self.answer())

    def answer(self) -> bytes:
        path, files = urlsplit(self.path).path, self.files()
        body, headers = b"", {"X-Repo-Commit": self.commit}
        if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            body = json.dumps([
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": self.etag(file)}
                for name, file in files.items()
            ]).encode()  # fmt: skip
        elif path.startswith(f"/api/models/{REPOSITORY}"):
            siblings = [
                {"rfilename": name, "blobId": self.etag(file)} for name, file in files.items()
            ]
            body = json.dumps(
                {"id": REPOSITORY, "sha": self.commit, "siblings": siblings, "tags": []}
            ).encode()
        elif (name := path.removeprefix(f"/{REPOSITORY}/resolve/").partition("/")[2]) in files:
            body, headers["ETag"] = files[name].read_bytes(), f'"{self.etag(files[name])}"'
        else:
            headers["X-Error-Code"] = "EntryNotFound"
        self.send_response(404 if "X-Error-Code" in headers else 200)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        return body

    def etag(self, file: Path) -> str:
        return hashlib.sha1(file.read_bytes()).hexdigest()

    def log_message(self, *_: Any) -> None:
        pass


LOAD = """
import sys
import torch
from huggingface_hub import constants
from sage_fast.config.schema import ModelConfig, SamplingConfig
from sage_fast.models.hub import reachable
from sage_fast.models.load import load_model
config = ModelConfig(path="someone/tiny", dtype="float32", lora_rank=4)
for line in sys.stdin:
    constants.HF_HUB_OFFLINE = line == "offline\\n"
    reachable.cache_clear()
    model = load_model(config, SamplingConfig(), torch.device("cpu"), 0)
    model.load_encoder(SamplingConfig())
    print(model.spec.encoder_version(), flush=True)
"""


def test_what_a_first_run_has_cached_works_offline(tmp_path: Path) -> None:
    """Against a local hub, which lists a README.md that no run reads.

    Its address is read when a process starts.
    """
    Hub.folder = write_tiny_checkpoint(tmp_path / "checkpoint")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        given = os.environ | {
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_CACHE": str(tmp_path / "home" / "hub"),
        }
        given |= {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
            "HF_HUB_DISABLE_XET": "1",
        }
        command, root, pipe = (
            [sys.executable, "-c", LOAD],
            Path(__file__).parents[1],
            subprocess.PIPE,
        )
        with subprocess.Popen(
            command, env=given, cwd=root, stdin=pipe, stdout=pipe, text=True, bufsize=1
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("online\n")
            first = process.stdout.readline()
            assert len(first) > 16
            assert not list((tmp_path / "home").rglob("README.md"))
            process.stdin.write("offline\n")
            assert process.stdout.readline() == first
            server.shutdown()
            server.server_close()
            process.stdin.write("online\n")
            assert process.stdout.readline() == first
