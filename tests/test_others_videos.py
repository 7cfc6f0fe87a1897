"""Video files of other programs: each frame once, the picture's own rate, and what is refused."""

from __future__ import annotations

import logging
import re
import subprocess
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import pytest
import torch

from sage_fast.eval import playback
from sage_fast.eval.playback import for_browser, read_clip, read_video
from sage_fast.eval.video_folder import read_folder
from sage_fast.util.errors import UserError
from sage_fast.util.videos import save_mp4

FRAMES = 24
H264 = ["-c:v", "libx264", "-crf", "10", "-bf", "0", "-pix_fmt", "yuv420p"]


def ffmpeg(*arguments: str | Path) -> None:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]


def ramp(rate: str = "24", size: str = "64x48") -> list[str]:
    """Frame f is a flat grey of 16 + 9 f, so that each frame of a file tells its number."""
    grey = f"nullsrc=s={size}:r={rate},geq=lum='16+9*N':cb=128:cr=128,trim=end_frame={FRAMES}"
    return ["-f", "lavfi", "-i", grey]


def numbers(path: Path) -> list[int]:
    """Which of the frames of `ramp` a file shows, in order."""
    grey = 255 * read_clip(path).frames.mean((1, 2, 3))
    return [round(level) for level in (grey / (9 * 255 / 219)).tolist()]


EACH_ONCE = [*range(FRAMES)]

# name -> file, arguments of ffmpeg, frames a second
WHOLE = {
    "constant": ("a.mp4", [*ramp(), *H264], 24.0),
    "with B frames": ("a.mp4", [*ramp(), "-c:v", "libx264", "-crf", "10", "-bf", "3", "-pix_fmt",
        "yuv420p"], 24.0),
    # 12 frames, a second of nothing new, 12 frames: 24 frames in 2 s
    "a gap": ("a.mp4", [*ramp(), "-vf", "setpts='if(lt(N,12),N,N+24)/24/TB'", "-fps_mode",
        "passthrough", *H264], 12.0),
    # frame n at n^2 / 240 s, 2.2 s for 23 intervals, and the last as long as ffmpeg makes it
    "slowing": (
        "a.mkv",
        [*ramp("240"), "-vf", "settb=1/240,setpts=N*N+N", "-fps_mode", "passthrough", *H264],
        None,
    ),
    "quickening": (
        "a.mkv",
        [*ramp("240"), "-vf", "settb=1/240,setpts=-(25-N)*(25-N)+700", "-fps_mode", "passthrough",
         *H264],
        None,
    ),
    "sound longer than the picture": ("a.mp4", [*ramp(), "-f", "lavfi", "-i", "sine=d=4", *H264],
        24.0),
    "sound longer, mkv": ("a.mkv", [*ramp(), "-f", "lavfi", "-i", "sine=d=4", *H264], 24.0),
    "sound shorter": ("a.mp4", [*ramp(), "-f", "lavfi", "-i", "sine=d=0.2", *H264], 24.0),
    "sound that begins earlier": ("a.mp4", ["-itsoffset", "1", *ramp(), "-f", "lavfi", "-i",
        "sine=d=2", *H264], 24.0),
    "webm": ("a.webm", [*ramp("30"), "-c:v", "libvpx-vp9", "-crf", "10", "-b:v", "0"], 30.0),
    "ntsc": ("a.webm", [*ramp("24000/1001"), "-c:v", "libvpx-vp9", "-crf", "10", "-b:v", "0"],
        24000 / 1001),
    "mkv": ("a.mkv", [*ramp("16"), *H264], 16.0),
    "avi": ("a.avi", [*ramp("12"), "-c:v", "mjpeg", "-q:v", "2"], 12.0),
    "mov": ("a.mov", [*ramp("25"), *H264], 25.0),
    "gif": ("a.gif", [*ramp("10")], 10.0),
    "in a transport stream": ("a.ts", [*ramp("25"), *H264], 25.0),
    "fragments": ("a.mp4", [*ramp(), *H264, "-g", "6", "-movflags", "frag_keyframe+empty_moov"],
        24.0),
    "10 bits": ("a.mp4", [*ramp(), "-c:v", "libx264", "-crf", "10", "-pix_fmt", "yuv420p10le"],
        24.0),
    "grey": ("a.mkv", [*ramp(), "-c:v", "ffv1", "-pix_fmt", "gray"], 24.0),
    "no sub-sampling": ("a.mp4", [*ramp(), "-c:v", "libx264", "-crf", "10", "-pix_fmt", "yuv444p"],
        24.0),
    "odd size": ("a.mkv", [*ramp(size="63x47"), "-c:v", "ffv1", "-pix_fmt", "yuv444p"], 24.0),
    "alpha that is opaque": ("a.mov", [*ramp(), "-c:v", "qtrle", "-pix_fmt", "argb"], 24.0),
    "a slow rate": ("a.mp4", [*ramp("0.5"), *H264], 0.5),
    "a high rate": ("a.mp4", [*ramp("1000"), *H264], 1000.0),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_each_frame_is_read_once_at_the_rate_of_the_picture(name: str, tmp_path: Path) -> None:
    file, arguments, fps = WHOLE[name]
    path = tmp_path / file
    ffmpeg(*arguments, path)
    assert numbers(path) == EACH_ONCE
    found = read_clip(path).fps
    if fps is not None:
        assert found == pytest.approx(fps, rel=1e-6)
    else:
        assert FRAMES / found == pytest.approx(576 / 240, rel=0.1)
    kind, content = for_browser(path)
    played = tmp_path / f"played.{kind.removeprefix('video/')}"
    played.write_bytes(content)
    assert numbers(played) == EACH_ONCE
    assert read_clip(played).fps == pytest.approx(found, rel=1e-3)


def test_a_file_is_shown_upright_with_square_pixels_and_without_its_cover(tmp_path: Path) -> None:
    ffmpeg("-f", "lavfi", "-i", "color=red:s=64x48:r=24:d=0.2", *H264, tmp_path / "a.mp4")
    ffmpeg(
        "-display_rotation", "90", "-i", tmp_path / "a.mp4", "-c", "copy", tmp_path / "turned.mp4"
    )
    assert read_video(tmp_path / "turned.mp4").shape[-2:] == (64, 48)
    ffmpeg("-i", tmp_path / "a.mp4", "-vf", "setsar=2", *H264, tmp_path / "wide.mp4")
    assert read_video(tmp_path / "wide.mp4").shape[-2:] == (48, 128)
    ffmpeg("-f", "lavfi", "-i", "color=blue:s=320x240", "-frames:v", "1", tmp_path / "cover.png")
    covered = ["-map", "1", "-map", "0", "-c", "copy", "-disposition:v:0", "attached_pic"]
    ffmpeg(
        "-i", tmp_path / "a.mp4", "-i", tmp_path / "cover.png", *covered, tmp_path / "covered.mp4"
    )
    found = read_video(tmp_path / "covered.mp4")
    assert found.shape == read_video(tmp_path / "a.mp4").shape
    assert found[:, 0].mean() > 0.9
    assert found[:, 2].mean() < 0.1


def test_an_edit_list_chooses_the_frames(tmp_path: Path) -> None:
    ffmpeg(*ramp(), *H264, "-g", "24", tmp_path / "a.mp4")
    ffmpeg("-ss", "0.5", "-i", tmp_path / "a.mp4", "-c", "copy", tmp_path / "later.mp4")
    assert numbers(tmp_path / "later.mp4") == EACH_ONCE[12:]
    assert read_clip(tmp_path / "later.mp4").fps == pytest.approx(24)


def test_one_frame_has_a_rate(tmp_path: Path) -> None:
    save_mp4(tmp_path / "a.mp4", torch.rand(1, 3, 128, 128), 12)
    clip = read_clip(tmp_path / "a.mp4")
    assert clip.frames.shape == (1, 3, 128, 128)
    assert clip.fps == 12


@pytest.mark.parametrize("fps", [8, 12.5, 16, 23.976, 24, 29.97, 60])
def test_our_own_files_have_the_rate_that_they_were_saved_at(fps: float, tmp_path: Path) -> None:
    save_mp4(tmp_path / "a.mp4", torch.rand(9, 3, 128, 128), fps)
    assert read_clip(tmp_path / "a.mp4").fps == pytest.approx(fps, rel=1e-4)


@pytest.mark.parametrize(
    ("file", "arguments", "why"),
    [
        (
            "a.mp4",
            ["-vf", "format=yuv420p10le", "-c:v", "libx264", "-x264-params", "transfer=smpte2084"],
            "is HDR",
        ),
        (
            "a.mp4",
            [
                "-vf",
                "format=yuv420p10le",
                "-c:v",
                "libx264",
                "-x264-params",
                "transfer=arib-std-b67",
            ],
            "is HDR",
        ),
        (
            "a.mov",
            ["-vf", "format=rgba,colorchannelmixer=aa=0.5", "-c:v", "qtrle"],
            "frame 0 has transparent pixels",
        ),
        ("a.webm", ["-vf", "drawbox=t=fill", "-vn", "-f", "lavfi", "-i", "sine=d=1"], None),
    ],
)
def test_what_has_no_one_appearance_is_refused(
    file: str, arguments: list[str], why: str | None, tmp_path: Path
) -> None:
    if why is None:
        ffmpeg("-f", "lavfi", "-i", "sine=d=1", tmp_path / file)
        why = "cannot be read as a video"
    else:
        ffmpeg(*ramp(), *arguments, tmp_path / file)
    with pytest.raises(UserError, match=f"{re.escape(file)}: {why}") as error:
        read_clip(tmp_path / file)
    assert len(str(error.value).splitlines()) == 1


def test_interlaced_lines_are_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ffmpeg(*ramp(), "-flags", "+ilme+ildct", "-vf", "setfield=tff", *H264, tmp_path / "a.mp4")
    assert numbers(tmp_path / "a.mp4") == EACH_ONCE
    assert "a.mp4 is interlaced" in caplog.text


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("name", ["constant", "webm", "avi", "sound shorter", "gif"])
def test_a_file_that_is_cut_off_is_no_video(name: str, share: float, tmp_path: Path) -> None:
    file, arguments, _ = WHOLE[name]
    ffmpeg(*arguments, tmp_path / file)
    content = (tmp_path / file).read_bytes()
    if name == "constant":  # its index at the front, as in a download that was stopped
        ffmpeg(
            "-i", tmp_path / file, "-c", "copy", "-movflags", "+faststart", tmp_path / "front.mp4"
        )
        content = (tmp_path / "front.mp4").read_bytes()
    (tmp_path / file).write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match=rf"{file}: cannot be read as a video: .*"):
        read_clip(tmp_path / file)


def test_a_file_that_is_gone_before_its_times_are_read_is_no_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ffmpeg(*ramp(), *H264, tmp_path / "a.mp4")
    read_times = playback._read_times

    def gone(path: Path, told: Any) -> None:
        path.unlink()
        read_times(path, told)

    monkeypatch.setattr(playback, "_read_times", gone)
    with pytest.raises(UserError, match=r"a\.mp4: cannot be read as a video: ffmpeg told of 0 fra"):
        read_clip(tmp_path / "a.mp4")


def test_a_damaged_picture_is_no_video(tmp_path: Path) -> None:
    ffmpeg("-f", "lavfi", "-i", "testsrc=s=64x48:r=24:d=1", *H264, tmp_path / "a.mp4")
    content = bytearray((tmp_path / "a.mp4").read_bytes())
    start = content.index(b"mdat")
    middle = (start + len(content)) // 2
    content[middle : middle + 400] = b"\xa5" * 400
    (tmp_path / "a.mp4").write_bytes(content)
    with pytest.raises(UserError, match=r"a.mp4: cannot be read as a video: "):
        read_clip(tmp_path / "a.mp4")


def test_a_list_of_other_files_is_no_video(tmp_path: Path) -> None:
    """A playlist or a script of ffmpeg could name any address."""
    save_mp4(tmp_path / "a.mp4", torch.rand(5, 3, 128, 128), 8)
    (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile a.mp4\n")
    (tmp_path / "play.m3u8").write_text(
        "#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:1/a.ts\n#EXT-X-ENDLIST\n"
    )
    for name in ("list.mp4", "play.m3u8"):
        with pytest.raises(UserError, match=f"{name}: cannot be read as a video"):
            read_clip(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["50%03d.mp4", "a:b.mp4", "-i.mp4", "a b'\"$HOME.mp4", "\u732b e\u0301.mp4", "[x].mp4"]
)
def test_any_name_is_a_name(name: str, tmp_path: Path) -> None:
    save_mp4(tmp_path / name, torch.rand(5, 3, 128, 128), 8)
    assert read_clip(tmp_path / name).frames.shape == (5, 3, 128, 128)


# -- videos.csv ------------------------------------------------------------------------------------


def folder_with(folder: Path, table: bytes | str, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names or ("a.mp4", "b.mp4"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "videos.csv").write_bytes(table if isinstance(table, bytes) else table.encode())
    return folder


@pytest.mark.parametrize(
    "table",
    [
        "file,prompt,score\na.mp4,one,0.5\nb.mp4,two,1\n",
        "\ufefffile,prompt,score\r\na.mp4,one,0.5\r\nb.mp4,two,1\r\n",
        "file;prompt;score\r\na.mp4;one;0.5\r\nb.mp4;two;1\r\n",
        "sep=;\r\nfile;prompt;score\r\na.mp4;one;0.5\r\nb.mp4;two;1\r\n",
        "file\tprompt\tscore\na.mp4\tone\t0.5\nb.mp4\ttwo\t1\n",
        '"prompt","file","score"\n"one","a.mp4","0.5"\n"two","b.mp4","1"\n',
        "file,prompt,score\na.mp4,one,0.5\n\nb.mp4,two,1\n\n",
        "#,file,prompt,score\nx,a.mp4,one,0.5\ny,b.mp4,two,1\n",
    ],
)
def test_tables_of_spreadsheets_are_read(table: str, tmp_path: Path) -> None:
    found = read_folder("x", folder_with(tmp_path / "x", table))
    assert (found.prompts, found.scores) == (["one", "two"], {"score": [0.5, 1.0]})
    assert [file.name for file in found.shown.values()] == ["a.mp4", "b.mp4"]


def test_commas_in_prompts_do_not_decide_what_separates(tmp_path: Path) -> None:
    table = 'file;prompt\na.mp4;"a cat, asleep; on a mat"\nb.mp4;one, two, three, four\n'
    found = read_folder("x", folder_with(tmp_path / "x", table))
    assert found.prompts == ["a cat, asleep; on a mat", "one, two, three, four"]


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("File,Prompt\na.mp4,one\n", "column 'File': did you mean 'file'?"),
        ("file, prompt\na.mp4,one\n", "column ' prompt': did you mean 'prompt'?"),
        ("file,prompt,Seed\na.mp4,one,1\n", "column 'Seed': did you mean 'seed'?"),
        ("file,prompt,IMAGE\na.mp4,one,1\n", "column 'IMAGE': did you mean 'image'?"),
        ("filename,prompt\na.mp4,one\n", "column 'filename': did you mean 'file'?"),
        ("file,prompt,r,r\na.mp4,one,1,2\n", "column 'r' stands there twice"),
        (
            "file;prompt;r\na.mp4;one;0,5\n",
            "video 1: r = '0,5': expected a decimal point, as '0.5'",
        ),
        (
            "file,prompt\na.mp4,one\na.mp4,one\n",
            "video 2: 'a.mp4' with this prompt is video 1 already",
        ),
        ("file|prompt\na.mp4|one\n", "column 'file' is missing; expected one of file|prompt"),
        ("file,prompt\n" + 5000 * "x" + ".mp4,one\n", "no such file"),
        ("file,prompt\nC.mp4,one\n", "'C.mp4': no such file"),
        ("file,prompt\na.mp4,caf\xe9\n".encode("latin-1"), "not a CSV file in UTF-8"),
        ("file,prompt\na.mp4,one\n".encode("utf-16"), "not a CSV file in UTF-8"),
    ],
)
def test_a_table_that_means_something_else_is_refused(
    table: bytes | str, why: str, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path / "x", table)
    with pytest.raises(UserError, match=re.escape(why)) as error:
        read_folder("x", folder)
    assert str(folder / "videos.csv") in str(error.value)


def test_names_of_another_system_are_found(tmp_path: Path) -> None:
    table = "file,prompt\nsub\\a.mp4,one\ncaf\u00e9.mp4,two\n b.mp4 ,three\n"
    found = read_folder(
        "x", folder_with(tmp_path / "x", table, "sub/a.mp4", "cafe\u0301.mp4", "b.mp4")
    )
    assert all(file.is_file() for file in found.shown.values())
    assert len(found.shown) == 3


def test_what_is_left_out_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    table = "file,prompt,seed,r,kind\na.mp4,one,4.61169E+18,1,x\nb.mp4,two,7,broken,y\n"
    found = read_folder(
        "x", folder_with(tmp_path / "x", table, "a.mp4", "b.mp4", "c.mp4", "d.WEBM")
    )
    assert found.seeds is None
    assert found.scores == {}
    assert "does not name 2 videos beside it, such as 'c.mp4'" in caplog.text
    assert "r is no score, as video 2 has 'broken'" in caplog.text
    assert "seeds are left out, as video 1 has '4.61169E+18'" in caplog.text
    assert "kind" not in caplog.text
