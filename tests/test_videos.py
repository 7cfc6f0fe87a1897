"""MP4 files are read back; pictures are checked at places where a frame must be."""

import os
import re
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image

from sage_fast.cli import main
from sage_fast.commands.sample_videos import save_videos
from sage_fast.eval.playback import read_video
from sage_fast.eval.sheets import contact_sheet
from sage_fast.run import train
from sage_fast.tools.doctor import tools
from sage_fast.tools.dry_run import dry_run
from sage_fast.util.errors import UserError
from sage_fast.util.videos import check_encoder, numbered, save_mp4
from tests.tiny import settings


def ramp(frames=9, height=32, width=32):
    """Frame f is a flat grey of f / (frames - 1)."""
    return torch.linspace(0, 1, frames).view(-1, 1, 1, 1).expand(frames, 3, height, width)


@pytest.mark.parametrize(
    ("size", "written"),
    [
        pytest.param((32, 32), (128, 128), id="small: enlarged by a whole factor"),
        pytest.param((32, 50), (128, 200), id="the shorter side decides"),
        pytest.param((131, 201), (132, 202), id="odd sizes grow by one"),
        pytest.param((480, 832), (480, 832), id="480p as it is"),
    ],
)
def test_mp4_keeps_frames_and_size(tmp_path, size, written):
    path = tmp_path / "a.mp4"
    save_mp4(path, ramp(5, *size), fps=8)
    frames = iio.imread(path)
    assert frames.shape == (5, *written, 3)
    np.testing.assert_allclose(frames.mean((1, 2, 3)), np.linspace(0, 255, 5), atol=4)
    meta = iio.immeta(path)
    assert meta["codec"] == "h264"
    assert meta["pix_fmt"].startswith("yuv420p")
    assert meta["fps"] == 8


@pytest.mark.parametrize(
    "folder",
    [
        "2026-11-26T12:30",
        "-",
        "-version",
        "pipe:1",
        "concat:a|b",
        "data:,",
        "http:",
        "%02d",
        "a b'\"$HOME",
    ],
)
def test_any_folder_name_is_a_folder(tmp_path, monkeypatch, folder):
    """ffmpeg takes `NAME:` for a protocol and a dash for an option."""
    monkeypatch.chdir(tmp_path)
    path = Path(folder) / "a.mp4"
    path.parent.mkdir()
    save_mp4(path, ramp(5), fps=8)
    assert read_video(path).shape == (5, 3, 128, 128)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / folder, tmp_path / path]


def test_enlarging_is_nearest_neighbour(tmp_path):
    video = torch.zeros(4, 3, 32, 32)
    video[:, :, :, 16:] = 1
    save_mp4(tmp_path / "a.mp4", video, fps=8)
    row = iio.imread(tmp_path / "a.mp4")[0, 64, :, 1].astype(int)
    assert row[:60].max() < 20  # the edge stays where it was, and sharp
    assert row[68:].min() > 235


def test_the_same_video_gives_the_same_bytes(tmp_path):
    video = torch.rand(5, 3, 32, 32)
    for name in ("a.mp4", "b.mp4"):
        save_mp4(tmp_path / name, video, fps=8)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


@pytest.mark.parametrize(
    ("video", "message"),
    [
        (torch.rand(3, 5, 32, 32), r"expected shape \[F, 3, H, W\].*\[3, 5, 32, 32\]"),
        (torch.rand(0, 3, 32, 32), "without empty sides"),
        (torch.zeros(5, 3, 32, 32, dtype=torch.int16), "floating point"),
        (torch.full((5, 3, 32, 32), float("nan")), "not finite"),
    ],
)
def test_bad_videos_are_refused(tmp_path, video, message):
    with pytest.raises(ValueError, match=message):
        save_mp4(tmp_path / "a.mp4", video, fps=8)
    assert not (tmp_path / "a.mp4").exists()


@pytest.mark.fault(
    "the disk fills up within a video", "an error that names it; no torn video is left"
)
def test_a_video_that_cannot_be_written_whole_is_not_left(tmp_path):
    """ffmpeg may write no more than 50 kB to a file, as if the disk were full."""
    video, soft_and_hard = torch.rand(17, 3, 128, 128), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, soft_and_hard[1]))
    try:
        with pytest.raises(OSError, match=f"ffmpeg cannot write it: .*{tmp_path / 'a.mp4'}"):
            save_mp4(tmp_path / "a.mp4", video, fps=8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_and_hard)
    assert list(tmp_path.iterdir()) == []


def grey(sheet: Image.Image, x: int, y: int) -> int:
    pixel = sheet.getpixel((x, y))
    assert isinstance(pixel, tuple)
    return pixel[0]


def test_contact_sheet_shows_the_first_and_the_last_frame():
    sheet = contact_sheet([ramp(9), 1 - ramp(9)], ["up", "down"], num_frames=3)
    left, step = 20 + 200 + 24, 128 + 3
    top, bottom = 20 + 64, 20 + 128 + 14 + 64
    assert [grey(sheet, left + 64 + i * step, top) for i in range(3)] == [0, 128, 255]
    assert [grey(sheet, left + 64 + i * step, bottom) for i in range(3)] == [255, 128, 0]
    assert sheet.width == left + 3 * 128 + 2 * 3 + 20
    caption = np.asarray(sheet.convert("L"))[20:148, 20:220]
    assert caption.min() < 150  # some text is drawn


def test_contact_sheet_of_videos_with_fewer_frames_than_cells():
    sheet = contact_sheet([ramp(1), ramp(9)], ["one", "nine"], num_frames=4)
    assert sheet.width == 20 + 200 + 24 + 4 * 128 + 3 * 3 + 20


@pytest.mark.parametrize("letter", ["a", "ä", "猫", "\U00020000"])
def test_names_of_videos_are_limited_in_bytes(letter, tmp_path):
    (file,) = save_videos([ramp()], [letter * 100], tmp_path, 8)
    assert len(file.name.encode()) < 150
    assert letter.lower() * 20 in file.name


def test_mp4_is_read_back(tmp_path):
    save_mp4(tmp_path / "a.mp4", ramp(9, 128, 192), fps=8)
    whole = read_video(tmp_path / "a.mp4")
    assert whole.shape == (9, 3, 128, 192)
    torch.testing.assert_close(whole.mean((1, 2, 3)), torch.linspace(0, 1, 9), atol=0.02, rtol=0)


@pytest.mark.parametrize("size", [(128, 192), (480, 832), (720, 1280)])
@pytest.mark.parametrize("color", [(0, 255, 0), (255, 0, 0), (20, 60, 250), (128, 128, 128)])
def test_colours_are_those_of_bt709_and_say_so(tmp_path, size, color):
    video = (torch.tensor(color) / 255)[None, :, None, None].expand(2, 3, *size)
    save_mp4(tmp_path / "a.mp4", video, fps=8)
    read = (255 * read_video(tmp_path / "a.mp4").mean((0, 2, 3))).tolist()
    assert read == pytest.approx(color, abs=3)
    program = imageio_ffmpeg.get_ffmpeg_exe()
    about = subprocess.run(
        [program, "-i", tmp_path / "a.mp4"], capture_output=True, text=True
    ).stderr
    assert "yuv420p(tv, bt709" in about
    # A player that knows the tags alone: the matrix of BT.709 in floats, from the stored planes.
    raw = subprocess.run(
        [program, "-v", "error", "-i", tmp_path / "a.mp4", "-f", "rawvideo", "-"],
        capture_output=True,
    )
    count = size[0] * size[1]
    y, u, v = (
        raw.stdout[count // 2] - 16,
        raw.stdout[count + 5] - 128,
        raw.stdout[count + count // 4 + 5] - 128,
    )
    shown = [1.164 * y + 1.793 * v, 1.164 * y - 0.213 * u - 0.533 * v, 1.164 * y + 2.112 * u]
    assert shown == pytest.approx(color, abs=4)


def test_only_files_are_videos(tmp_path):
    """ffmpeg would wait for a pipe, and says nothing of a folder or of a link to itself."""
    (tmp_path / "00-folder.mp4").mkdir()
    (tmp_path / "01-link.mp4").symlink_to("01-link.mp4")
    os.mkfifo(tmp_path / "02-pipe.mp4")
    (tmp_path / "03-file.mp4").touch()
    assert numbered(tmp_path) == {3: tmp_path / "03-file.mp4"}
    for name in ("00-folder", "01-link", "04-nothing"):
        with pytest.raises(UserError, match=f"{name}.mp4: cannot be read as a video"):
            read_video(tmp_path / f"{name}.mp4")


def test_saved_videos_go_on_numbering_inside_their_folder(tmp_path):
    """Numbers continue past gaps and past 99; earlier contact sheets stay."""
    folder = tmp_path / "out"
    first = save_videos([ramp(), ramp()], ["A small red ball!", "a big blue ball"], folder, 8)
    assert [path.name for path in first] == ["00-a-small-red-ball.mp4", "01-a-big-blue-ball.mp4"]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    second = save_videos([1 - ramp()], ["a small red ball"], folder, 8)
    assert [path.name for path in second] == ["02-a-small-red-ball.mp4"]
    assert {path: path.read_bytes() for path in before} == before
    second[0].rename(folder / "102-moved.mp4")
    assert save_videos([ramp()], ["last"], folder, 8)[0].name == "103-last.mp4"
    assert (
        save_videos([ramp()], ["一只猫 / Öl_1"], folder / "new", 8)[0].name == "00-一只猫-öl-1.mp4"
    )
    assert {path.name for path in folder.glob("*.png")} == {
        f"contact-sheet-{n}.png" for n in ("00", "02", "103")
    }
    assert list(tmp_path.iterdir()) == [folder]


# -- an ffmpeg that cannot write videos ------------------------------------------------------------


@pytest.fixture
def without_libx264(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The installed ffmpeg, built without libx264 as some distributions do: it does everything
    else."""
    program = tmp_path / "ffmpeg"
    real = imageio_ffmpeg.get_ffmpeg_exe()
    refuses = """case "$*" in *libx264*) echo "Unknown encoder 'libx264'" >&2; exit 1;; esac"""
    program.write_text(f"#!/bin/sh\n{refuses}\nexec '{real}' \"$@\"\n")
    program.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
    check_encoder.cache_clear()
    yield program
    check_encoder.cache_clear()


CANNOT = (
    r"ffmpeg .*/ffmpeg cannot write H.264 \(Unknown encoder 'libx264'\); expected one with libx264"
)


def test_an_encoder_that_works_is_found() -> None:
    check_encoder.cache_clear()
    assert check_encoder() == imageio_ffmpeg.get_ffmpeg_exe()


def test_an_ffmpeg_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/nowhere/ffmpeg")
    check_encoder.cache_clear()
    with pytest.raises(UserError, match=r"ffmpeg cannot be run \(.*/nowhere/ffmpeg"):
        check_encoder()
    check_encoder.cache_clear()


def test_the_doctor_names_it(without_libx264: Path) -> None:
    (check,) = (
        check for check in tools(torch.device("cpu")) if check.name == "ffmpeg with libx264"
    )
    assert check.verdict == "wrong"
    assert check.found == f"ffmpeg {without_libx264} cannot write H.264 (Unknown encoder 'libx264')"
    assert "IMAGEIO_FFMPEG_EXE" in check.advice


def test_the_dry_run_names_it(without_libx264: Path) -> None:
    with pytest.raises(UserError, match=CANNOT):
        dry_run(settings(), 1, 80e9)


def test_a_run_ends_before_anything_is_loaded_or_written(
    without_libx264: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*about: object, **more: object) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(train, "load_setup", load)
    config = settings(output=str(tmp_path / "run"))
    with pytest.raises(UserError, match=CANNOT):
        train.train(config)
    assert not (tmp_path / "run").exists()


def test_sample_and_eval_end_before_a_model_is_loaded(
    without_libx264: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*about: object, **more: object) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("sage_fast.loading.load_setup", load)
    monkeypatch.setattr("sage_fast.eval.candidates.load_setup", load)
    paper = str(Path(__file__).parent.parent / "configs" / "recipes" / "paper.yaml")
    folder = tmp_path / "videos"
    assert (
        main(
            [
                *("sample", paper, "--prompt", "a small red ball moves left slowly"),
                *("--folder", str(folder)),
            ]
        )
        == 2
    )
    assert main(["eval", paper, "--folder", str(tmp_path / "evaluation")]) == 2
    said = capsys.readouterr().err
    assert len(re.findall(CANNOT, said)) == 2
    assert not folder.exists()
