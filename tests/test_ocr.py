"""The reward `ocr` with its published weights, on rendered text; and the rule of quoted text."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import matplotlib
import numpy as np
import pytest
import torch
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from sage_fast.cli import main
from sage_fast.config.loader import dump
from sage_fast.config.schema import RewardConfig, SamplingConfig
from sage_fast.data.prompts import read_prompts
from sage_fast.rewards import CompositeReward
from sage_fast.rewards.shipped import ocr as ocr_module
from sage_fast.rewards.shipped.ocr import OCRReward, quoted, similarity
from sage_fast.run import read_metrics
from sage_fast.util.errors import UserError
from tests.tiny import keys_of, settings

REPOSITORY = Path(__file__).parents[1]
FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
SIZE = (320, 160)


@pytest.fixture(scope="module")
def reward() -> OCRReward:
    return OCRReward(num_frames=3)


def frame(
    text: str = "", *, font: str = "DejaVuSans", size: int = 30, x: int = 20, y: int = 60
) -> Tensor:
    """Black text on white, float32 `[3, H, W]`; lines are split at line breaks."""
    image = Image.new("RGB", SIZE, "white")
    ImageDraw.Draw(image).text(
        (x, y), text, fill="black", font=ImageFont.truetype(FONTS / f"{font}.ttf", size)
    )
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def chinese(text: str) -> Tensor:
    image = np.full((SIZE[1], SIZE[0], 3), 255, np.uint8)
    cv2.putText(image, text, (20, 100), (0, 0, 0), cv2.FontFace("uni"), 32, weight=400)  # type: ignore[attr-defined]
    return torch.from_numpy(image).permute(2, 0, 1) / 255


def scores(
    reward: OCRReward, frames: Sequence[Tensor], prompt: str, **metadata: Any
) -> dict[str, float]:
    parts = reward.score(torch.stack([*frames])[None], [prompt], [metadata])
    return {part: round(float(value), 5) for part, value in parts.items()}


def of(value: float, share: float = 0.0) -> dict[str, float]:
    # of frames that are alike
    return {"ocr": value, "ocr_best": value, "ocr_stays": value, "ocr_share": share}


# -- rendered text ---------------------------------------------------------------------------------


def test_right_text_one_wrong_letter_and_none(reward: OCRReward) -> None:
    prompt = 'a shop with a sign "OPEN DOOR" above its window'
    videos = torch.stack(
        [frame(text).expand(3, -1, -1, -1) for text in ("OPEN DOOR", "OPEN DOOB", "", "MILK")]
    )
    parts = reward.score(videos, [prompt] * 4)
    assert parts["ocr"].tolist() == [1, 7 / 8, 0, 0]
    assert parts["ocr_share"].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    "font", ["DejaVuSans", "DejaVuSerif-Bold", "DejaVuSansMono", "DejaVuSerif-Italic"]
)
@pytest.mark.parametrize("size", [14, 30, 52])
def test_other_fonts_and_sizes(font: str, size: int, reward: OCRReward) -> None:
    found = reward.score(
        frame("Fresh Fish", font=font, size=size, x=5)[None, None], ['a stall: "FRESH FISH"']
    )
    assert found["ocr"].tolist() == [1]


def test_text_that_moves_is_read_in_every_frame(reward: OCRReward) -> None:
    frames = [frame("KITE 7", x=x, y=y) for x, y in ((10, 10), (90, 60), (180, 110))]
    assert scores(reward, frames, 'a kite with "KITE 7"') == of(1, 1)


def test_text_that_flickers_does_not_stay(reward: OCRReward) -> None:
    """The best frame is right, a third of them too, and no two that follow each other."""
    found = scores(reward, [frame(), frame("READY"), frame()], 'a robot shows "READY"')
    assert found == {"ocr": 0.33333, "ocr_best": 1, "ocr_stays": 0, "ocr_share": 0.33333}
    found = scores(reward, [frame("READY"), frame("READY"), frame()], 'a robot shows "READY"')
    assert found == {"ocr": 0.66667, "ocr_best": 1, "ocr_stays": 0.5, "ocr_share": 0.66667}


def test_several_texts_count_alike_in_any_order_and_on_several_lines(reward: OCRReward) -> None:
    prompt = 'two signs, "NORTH" and "SOUTH"'
    assert scores(reward, [frame("SOUTH\n\nNORTH", y=20)], prompt) == of(1, 1)
    assert scores(reward, [frame("NORTH")], prompt) == of((1 + 3 / 5) / 2), (
        "south is two letters from north"
    )
    assert scores(reward, [frame("OPEN\nLATE", y=20)], 'a sign "OPEN LATE"') == of(1, 1)
    assert scores(reward, [frame("OPEN LATE\n\n24 hours", y=20)], 'a sign "OPEN LATE"') == of(
        1, 1
    ), "more than asked"


def test_chinese(reward: OCRReward) -> None:
    prompt = "餐馆的招牌上写着“欢迎光临”"
    assert scores(reward, [chinese("欢迎光临")], prompt) == of(1, 1)
    assert scores(reward, [chinese("欢迎光顾")], prompt) == of(3 / 4)
    assert scores(reward, [frame("WELCOME")], prompt) == of(0)


def test_colours_are_those_of_the_video(reward: OCRReward, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader takes blue first."""
    seen: list[np.ndarray] = []
    read: Callable[[np.ndarray], Any] = reward.reader
    monkeypatch.setattr(reward, "reader", lambda image: (seen.append(image), read(image))[1])
    red = frame().clone()
    red[1:] = 0
    reward.score(red[None, None], ['"RED"'])
    assert seen[0].shape == (160, 320, 3)
    assert seen[0][0, 0].tolist() == [0, 0, 255]


def test_what_it_is_fooled_by(reward: OCRReward) -> None:
    """As the page says: huge letters and a subtitle are worth as much as a sign in the scene."""
    for where in ({"size": 90, "x": 0, "y": 20}, {"size": 14, "y": 140}):
        assert scores(reward, [frame("STOP", **where)], 'a stop sign with "STOP"') == of(1, 1)


def test_a_video_of_nan_has_no_score(reward: OCRReward) -> None:
    videos = torch.stack([frame("A1"), torch.full((3, 160, 320), torch.nan)])[:, None]
    found = reward.score(videos, ['"A1"', '"A1"'])["ocr"]
    assert found[0] == 1
    assert found[1].isnan()


def test_threads_are_bounded_and_nothing_is_printed(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    given: list[dict[str, Any]] = []
    made = ocr_module.RapidOCR

    def make(params: dict[str, Any]) -> Any:
        given.append(params)
        return made(params=params)

    monkeypatch.setattr(ocr_module, "RapidOCR", make)
    monkeypatch.setattr(ocr_module.torch, "get_num_threads", lambda: 1)
    with caplog.at_level(logging.DEBUG):
        one = OCRReward(num_frames=1)
        one.score(torch.stack([frame("A"), frame()])[:, None], ['"A"', '"A"'])
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert given[0]["EngineConfig.onnxruntime.intra_op_num_threads"] == 1
    for part in (one.reader.text_det, one.reader.text_rec):
        assert part.session.session.get_session_options().intra_op_num_threads == 1


@pytest.mark.parametrize(
    ("text", "read", "score"),
    [("open", "open", 1), ("open", "opem", 0.75), ("open", "pen", 0.75), ("open", "opens", 0.75),
     ("open", "", 0),
     ("open", "0123", 0), ("a", "aa", 0), ("a", "x" * 10_000, 0), ("kitten", "sitting", 0.5),
     ("open", "now open late", 1), ("open", "now op en late", 1), ("open", "reopened", 0)],
)  # fmt: skip
def test_similarity(text: str, read: str, score: float) -> None:
    assert similarity(text, read.split()) == pytest.approx(score)


@pytest.mark.parametrize("seed", range(20))
def test_similarity_is_that_of_the_nearest_run_of_lines(seed: int) -> None:
    draw = random.Random(seed)
    text, *lines = (
        "".join(draw.choices("abc", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 6))
    )
    runs = ["".join(lines[i:j]) for i, j in itertools.combinations(range(len(lines) + 1), 2)]
    assert similarity(text, lines) == max([0, *(similarity(text, [run]) for run in runs)])


# -- the text of a prompt --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    ['a sign "OPEN"', "写着“欢迎光临”", 'two, "A" and “B”', 'twice "A" and "A"', "none",
     'one " alone', '""',
     '“” and "x"', "it's 'single'", '"a“b”c"', 'line\n"b"', '"a\nb"'],
)  # fmt: skip
def test_the_rule_of_quoted_text_is_that_of_the_published_encoder(prompt: str) -> None:
    texts = "".join(f'Text "{text}". ' for text in quoted(prompt))
    assert texts == (extract_glyph_texts(prompt) or "")


def test_metadata_may_name_the_text() -> None:
    check = OCRReward.check_prompt
    assert check('a sign "OPEN Door"', {}) == ["opendoor"]
    assert check("a sign \u201cDON\u2019T A\u2014Z\u201d", {}) == ["don'ta-z"], (
        "as the reader spells them"
    )
    assert check("a shop", {"text": "\uff2f\uff30\uff25\uff2e"}) == ["open"]
    assert check('a "shop"', {"text": ["A", "b c"]}) == ["a", "bc"]
    for metadata in ({}, {"text": ""}, {"text": []}, {"text": [" "]}):
        with pytest.raises(ValueError, match="no text in quotation marks; the key 'text'"):
            check('a cat ""', metadata)
    for wrong in (3, None, [1], {"a": 1}):
        with pytest.raises(ValueError, match=r"text = .*: expected a text, or a list of them"):
            check("a cat", {"text": wrong})


@pytest.mark.parametrize("held_out", [False, True])
def test_a_prompt_without_a_text_is_refused_before_a_run(
    held_out: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, wrong in (("p.jsonl", not held_out), ("h.jsonl", held_out)):
        rows = [{"prompt": "a small red ball moves left quickly", "text": "O"}]
        rows += [{"prompt": "a big blue ball moves up slowly"}] if wrong else []
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("c.yaml").write_text(
        "model: {dtype: float32}\nreward: {name: ocr, weights: {ocr: 1}}\noutput: run\n"
    )
    own = ["--data.prompts", "p.jsonl", "--data.eval_prompts", "h.jsonl"]
    for dry in ([], ["--dry-run"]):
        assert main(["train", "c.yaml", *own, *dry]) == 2
        error = capsys.readouterr().err
        assert (
            "reward.name = 'ocr': prompt 'a big blue ball moves up slowly': no text in quotation "
            "marks" in error
        )
    assert not Path("run").exists()
    if held_out:  # a judge sees these alone
        assert (
            main(
                [
                    "train",
                    "c.yaml",
                    *own,
                    "--dry-run",
                    "--reward.name",
                    "testbed",
                    "--eval.judge",
                    "ocr",
                ]
            )
            == 2
        )
        assert "eval.judge = 'ocr': prompt 'a big blue ball" in capsys.readouterr().err


def test_the_shipped_prompts_have_texts() -> None:
    sets = [
        read_prompts(str(REPOSITORY / "configs" / "prompts" / f"{name}.txt"))
        for name in ("quoted", "quoted-heldout")
    ]
    for prompts in sets:
        assert all(OCRReward.check_prompt(prompt.text, {}) for prompt in prompts)
        assert any("“" in prompt.text for prompt in prompts)
        assert any('"' in prompt.text for prompt in prompts)
    assert not {prompt.text for prompt in sets[0]} & {prompt.text for prompt in sets[1]}


def test_it_is_a_reward_by_its_name(tmp_path: Path) -> None:
    config = RewardConfig(name="ocr", args={"num_frames": 1}, weights={"ocr": 1.0})
    composite = CompositeReward.of(config)
    composite.check(SamplingConfig(num_frames=5, height=32, width=32), keys_of(['"A"']))
    found = composite(torch.stack([frame("OPEN"), frame()])[:, None], keys_of(['"OPEN"', '"OPEN"']))
    assert found.rewards.tolist() == [1, 0]
    with pytest.raises(UserError, match="num_frames = 0: expected at least 1"):
        CompositeReward.of(RewardConfig(name="ocr", args={"num_frames": 0}))


# -- in the loop -----------------------------------------------------------------------------------


def test_two_iterations_with_published_weights_and_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published networks score what a run decodes.

    It draws shapes, not letters: a brightness tells samples apart.
    """
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "a small red ball moves left quickly", "text": "O"}\n'
    )
    read, calls = ocr_module.RapidOCR.__call__, list[int]()

    def fails_twice(self: Any, *given: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) in (10, 20):
            raise RuntimeError("the engine gave up")
        return read(self, *given, **more)

    monkeypatch.setattr(ocr_module.RapidOCR, "__call__", fails_twice)
    prompts = str(tmp_path / "p.jsonl")
    run, config = tmp_path / "run", tmp_path / "config.yaml"
    config.write_text(dump(
        settings(
            output=str(run), data__prompts=prompts, data__eval_prompts=prompts,
            sampling__num_frames=5,
            sampling__batch_size=2, sampling__steps=2, train__prompts_per_iteration=1,
            train__group_size=4,
            train__iterations=2, eval__num_prompts=1, eval__steps=2, tracking__trackers=[],
            reward__several=[
                {"name": "ocr", "args": {"num_frames": 2}, "weights": {"ocr": 1.0}},
                {"name": "tests.tiny:BrightnessReward", "weights": {"vq": 0.1}},
            ],
        )
    ))  # fmt: skip
    assert main(["train", str(config)]) == 0
    metrics = read_metrics(run)
    assert metrics["iteration"].tolist() == [0, 1]
    assert metrics["reward/retried"].tolist() == [2, 2], (
        "a batch whose call failed is scored again, one by one"
    )
    assert metrics["reward/dropped"].sum() == 0
    parts = np.stack(
        [metrics[f"reward_part/{part}"] for part in ("ocr", "ocr_best", "ocr_stays", "ocr_share")]
    )
    assert ((parts >= 0) & (parts <= 1)).all()
    assert len(calls) >= 2 * (2 * 4 + 2)
    assert (metrics["grad_norm"] > 0).all()
    scores = json.loads((run / "eval" / "after.json").read_text())
    assert 0 <= scores["parts"]["ocr"][0] <= 1
