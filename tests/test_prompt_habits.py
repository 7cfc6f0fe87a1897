"""Prompt files that were written for other programs: refused, or noted, with the line; and prose,
which is neither."""

import json
from pathlib import Path

import pytest

from sage_fast.cli import main
from sage_fast.data.prompt_checks import notes_on_prompts
from sage_fast.data.prompt_habits import FORMATS, HABITS, KNOWN_OPTIONS
from sage_fast.data.prompts import KEYS, read_prompts
from sage_fast.util.errors import UserError
from tests.test_docs import REPOSITORY

OTHER_FORMATS = [
    ('{"prompt": "a cat"}\n{"prompt": "a dog"}', 1,
     "JSON in a text file; .*rename the file to .jsonl"),
    ('a cat\n{"prompt": "a dog", "seed": 3}', 2, "JSON in a text file"),
    ("{'prompt': 'a cat'}", 1, "JSON in a text file"),
    ('["a cat", "a dog"]', 1, "JSON in a text file"),
    ('[\n  "a cat",\n  "a dog"\n]', 1, "JSON in a text file"),
    ('[\n  {\n    "prompt": "a cat"\n  }\n]', 1, "JSON in a text file"),
    ("prompt\na cat\na dog", 1, "'prompt' looks like the header of a table"),
    ("prompt,seed\na cat,1\na dog,2", 1,
     "'prompt,seed' looks like the header of a table; .*rename the file to .jsonl"),
    ("id,Prompt\n1,a cat", 1, "header of a table"),
    ('"prompt","negative_prompt"\n"a cat","blurry"', 1, "header of a table"),
    ("caption, file\na cat, 1.mp4", 1, "header of a table"),
    ("text,label\na cat,3", 1, "header of a table"),
    ("Prompt;Negative Prompt\na cat;blurry", 1, "header of a table"),
    ("prompt\tseed\na cat\t1", 1, "header of a table"),
    ("sep=;\nprompt;seed", 1, "header of a table"),
    ("a cat\t1\na dog\t2", 1, "every line has 2 values with tabs between"),
    ("a cat\tblurry", 1, "every line has 2 values with tabs between"),
    ("a cat,7\na dog,8", 1, "every line has 2 values with commas between"),
    ("cat.mp4,a cat\ndog.mp4,a dog", 1, "every line has 2 values with commas between"),
    ("a cat;blurry\na dog;dark", 1, "every line has 2 values with semicolons between"),
    ("1|a cat\n2|a dog", 1, "every line has 2 values with bars between"),
    ('a cat\n"a dog, asleep",7', 2, "is a row of a table"),
    ('"a cat"\n"a dog, asleep"', 1, "every line is in quotes"),
    ("'a cat'\n'the dog's bone'", 1, "every line is in quotes"),
    ("\u201ca cat\u201d\n\u201ca dog\u201d", 1, "every line is in quotes"),
    ('"a cat",\n"a dog",', 1, "every line is in quotes"),
    ('"a sign says ""open"""\n"a dog"', 1, "every line is in quotes"),
    ("a cat\n# animals\na dog", 2, "'# animals' is a comment"),
    ("## animals\na cat", 1, "is a comment"),
    ("#\na cat", 1, "is a comment"),
    ("// animals\na cat", 1, "is a comment"),
    ("<!-- animals -->\na cat", 1, "is a comment"),
    ("1. a cat\n2. a dog", 1, "every line is listed by numbers"),
    ("1) a cat\n2) a dog", 1, "every line is listed by numbers"),
    ("- a cat\n- a dog", 1, "every line is listed by marks"),
    ("\u2022 a cat\n\u2022 a dog", 1, "every line is listed by marks"),
    ("- prompt: a cat\n  seed: 3", 1, "the name of a field"),
    ("a cat\n---\na dog", 2, "'---' holds no word"),
]  # fmt: skip
REFUSED_WORDS = [
    ("a cat --n 4", "--n 4"), ("a cat --ar 16:9", "--ar 16:9"), ("a cat --no hats --v 6",
     "--no hats"),
    ("--prompt a cat", "--prompt a"), ("a cat --negative_prompt=blurry",
     "--negative_prompt=blurry"),
    ("a cat \u2014ar 16:9", "\u2014ar 16:9"), ("a cat --SEED 5", "--SEED 5"), ("a cat -gs 12",
     "-gs 12"),
    ("a cat -camera zoom -motion 2", "-motion 2"), ("a cat -ar 16:9", "-ar 16:9"),
    ("/imagine prompt: a cat", "/imagine prompt:"), ("Prompt: a cat", "Prompt:"),
    ("Negative prompt: blurry", "Negative prompt:"), ("prompt = a cat", "prompt ="),
    ("Steps: 20, Sampler: Euler a, CFG scale: 7", "Steps: 20, Sampler: Euler a, CFG scale: 7"),
    ("a {red|blue} ball", "{red|blue}"), ("a {2$$red|blue|green} ball", "{2$$red|blue|green}"),
    ("a __color__ ball", "__color__"), ("a __art/color-of*__ ball", "__art/color-of*__"),
    ("a cat <lora:add_detail:0.8>", "<lora:add_detail:0.8>"),
]  # fmt: skip
NOTED_WORDS = [
    ("a (red:1.3) ball", "(red:1.3)"), ("a ((red)) ball", "((red))"), ("a [cat:dog:0.5]",
     "[cat:dog:0.5]"),
    ("a {color} ball", "{color}"), ("a ${color} ball", "${color}"), ("a %s ball", "%s"),
    ("a $COLOR ball", "$COLOR"),
    ("[img] a cat", "[img]"), ("a cat like <image>", "<image>"), ("<|im_start|> a cat",
     "<|im_start|>"),
    ("<b>a cat</b>", "<b>"), ("https://example.com/a.png a cat", "https://example.com/a.png"),
    ("a cat --fast", "--fast"), ("a cat # the grey one", "# the grey one"), ("#a cat", "#a cat"),
    ('"a cat, asleep"', '"a cat, asleep"'), ("1. a cat", "1."), ("- a cat", "-"),
    ("salt &amp; pepper", "&amp;"), ("one\\ntwo", "\\n"), ("a caf\\u00e9", "\\u00e9"),
    ("a cat\tblurry", "cat\tblurry"),
    ("a caf\ufffd", "caf\ufffd"),
]  # fmt: skip
PROSE = [
    "a cat, asleep", 'a dog under a sign that says "open"', '"Open", says the sign',
    '"One" and "two" are painted',
    "a fan with the number #1", "#1 fan waves a flag", "a well-known cat -- the grey one -- sleeps",
    "cat\u2014dog",
    "a cat \u2014 or a dog \u2014 runs", "a cat \u2014style of the day\u2014 runs",
    "rock & roll; a crowd (about 200)",
    "the time is 12:30, it is -5 degrees", "Paris, 1920", "New York, 1950", "a 16:9 screen [old]",
    "1950s diner",
    "it costs $5, or 5 % less", "a cat <3 its ball", "C# on a screen", "an e-mail to a@b.org",
    "a snake_case word",
    "'Twas the night before, and the dogs' bowl", "it's 'new'", "a prompt: the teleprompter rolls",
    "prompt delivery",
    "Text, neon, in the night", "a cat/dog", "and/or", "a\u3001b\uff0cc", "\U0001f431",
    "\u732b\uff1a\u7761\u89c9",
    "-5 degrees, and it snows", "2 cats", "3D render of a cat", "24 fps film look", "a size 7 shoe",
    "the end...",
]  # fmt: skip


def write(folder: Path, content: str, name: str = "p.txt") -> str:
    (folder / name).write_text(content, encoding="utf-8")
    return str(folder / name)


@pytest.mark.parametrize(("content", "line", "why"), OTHER_FORMATS)
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_another_format_in_a_text_file_is_refused(
    content: str, line: int, why: str, ends: str, tmp_path: Path
) -> None:
    file = write(tmp_path, "\ufeff" + content.replace("\n", ends))
    with pytest.raises(UserError, match=f"line {line}: .*{why}") as error:
        read_prompts(file)
    assert len(str(error.value).splitlines()) == 1
    assert file in str(error.value)


def test_every_check_of_a_format_has_a_case() -> None:
    found = set()
    for content, _, _ in OTHER_FORMATS:
        lines = [(i, text.strip()) for i, text in enumerate(content.split("\n"), start=1)]
        found |= {check for check in FORMATS if any(True for _ in check(lines))}
    assert found == {*FORMATS}


@pytest.mark.parametrize(("text", "found"), REFUSED_WORDS)
def test_an_instruction_is_refused_wherever_a_prompt_is_given(
    text: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (
        write(tmp_path, f"a dog\n{text}\n"),
        write(tmp_path, '{"prompt": "a dog"}\n' + json.dumps({"prompt": text}), "p.jsonl"),
        write(
            tmp_path,
            '{"prompt": "a dog"}\n' + json.dumps({"prompt": "b", "negative_prompt": text}),
            "n.jsonl",
        ),
    ):
        with pytest.raises(UserError) as error:
            read_prompts(file)
        assert f"line 2: {found!r} is " in str(error.value)
        assert "expected words alone" in str(error.value)
    demo = str(REPOSITORY / "configs" / "demo.yaml")
    assert main(["sample", demo, f"--prompt={text}", "--folder", str(tmp_path / "out")]) == 2
    assert f"{found!r} is " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", KNOWN_OPTIONS)
def test_every_known_option_is_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"'--{option} 2' is an option of another program"):
        read_prompts(write(tmp_path, f"a cat --{option} 2\n"))


@pytest.mark.parametrize(("text", "found"), NOTED_WORDS)
def test_what_may_be_an_instruction_is_noted_with_its_line(
    text: str, found: str, tmp_path: Path
) -> None:
    prompts = read_prompts(write(tmp_path, f"a dog\n{text}\na dog that runs\n"))
    assert prompts[1].text == text
    (note,) = notes_on_prompts(prompts)
    assert "p.txt', line 2: " in note
    assert found in note or repr(found)[1:-1] in note
    assert "encoded as words" in note


def test_notes_are_counted_and_each_is_told_once(tmp_path: Path) -> None:
    prompts = read_prompts(write(tmp_path, "a {color} cat\na dog\na {color} hat\n"))
    (note,) = notes_on_prompts(prompts, prompts)
    assert (
        "line 1: '{color}' looks like the name of a wildcard or of a field, and 1 more such" in note
    )
    rows = read_prompts(write(tmp_path, "a cat,blurry\na dog,dark\n"))
    assert (
        "'a cat,blurry' looks like a row of a table, as every line has 2 values"
        in notes_on_prompts(rows)[0]
    )


def test_every_habit_has_an_example() -> None:
    for habit in HABITS:
        first = next(each for each in HABITS if each.found(habit.example))
        assert first.what == habit.what, habit.example


def test_prose_is_neither_refused_nor_noted(tmp_path: Path) -> None:
    prompts = read_prompts(write(tmp_path, "\n".join(PROSE)))
    assert [prompt.text for prompt in prompts] == PROSE
    assert notes_on_prompts(prompts) == []
    for text in PROSE:  # alone in its file too
        assert [prompt.text for prompt in read_prompts(write(tmp_path, text))] == [text]


@pytest.mark.parametrize(
    "file", sorted((REPOSITORY / "configs" / "prompts").rglob("*.[tj]*")), ids=lambda f: f.name
)
def test_shipped_prompts_have_no_note(file: Path) -> None:
    if file.suffix in (".txt", ".jsonl"):
        assert notes_on_prompts(read_prompts(str(file))) == []


@pytest.mark.parametrize(
    "text", ["a" * 200_000, "{" * 50_000, "[:" * 50_000, "|" * 50_000 + "a", "(:1" * 50_000]
)
def test_long_lines_end(text: str, tmp_path: Path) -> None:
    """No pattern takes the square of a line's length, which would be minutes here."""
    for note in notes_on_prompts(read_prompts(write(tmp_path, f"{text} b\na dog\n"))):
        assert len(note) < 500


def variants(key: str) -> list[str]:
    words = key.split("_")
    camel = words[0] + "".join(map(str.title, words[1:]))
    joined = [mark.join(words) for mark in ("-", " ", "", ".", "__")]
    return [
        key.upper(),
        key.title(),
        camel,
        f" {key}",
        f"{key} ",
        f"\u200b{key}",
        f"{key}:",
        *joined,
    ]


@pytest.mark.parametrize("key", KEYS)
def test_our_keys_in_another_spelling_are_no_metadata(key: str, tmp_path: Path) -> None:
    values = {"prompt": "a", "negative_prompt": "b", "seed": 1, "image": "a.png"}
    for spelling in {*variants(key)} - {key}:
        record = {"prompt": "a cat", spelling: values[key]}
        with pytest.raises(UserError, match=f"line 1: unknown key .*did you mean '{key}'"):
            read_prompts(write(tmp_path, json.dumps(record), "p.jsonl"))


@pytest.mark.parametrize("key", ["negative", "neg_prompt", "prompts"])
def test_names_that_other_programs_give_our_keys_are_no_metadata(key: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=f"unknown key '{key}'; expected one of prompt, negative_prompt, seed, image",
    ):
        read_prompts(write(tmp_path, json.dumps({"prompt": "a cat", key: "b"}), "p.jsonl"))


def test_a_key_stands_once_in_a_record(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="line 1: not valid JSON: the key 'prompt' stands there twice"
    ):
        read_prompts(write(tmp_path, '{"prompt": "a cat", "prompt": "a dog"}', "p.jsonl"))
    with pytest.raises(UserError, match="the key 'x' stands there twice"):
        read_prompts(write(tmp_path, '{"prompt": "a cat", "target": {"x": 1, "x": 2}}', "p.jsonl"))


def test_metadata_of_one_s_own_stays(tmp_path: Path) -> None:
    record = {
        "prompt": "a cat",
        "text": "open",
        "Count": 3,
        "image_path": "x.png",
        "seed_of_video": 1,
    }
    (prompt,) = read_prompts(write(tmp_path, json.dumps(record), "p.jsonl"))
    assert {**prompt.metadata} == {key: value for key, value in record.items() if key != "prompt"}


def test_commands_say_the_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(REPOSITORY / "configs" / "hunyuanvideo15-480p.yaml")
    file = write(tmp_path, "a dog\na {color} cat\n")
    given = ["--model.path", "random:hunyuanvideo15-480p", "--data.prompts", file]
    assert main(["train", config, "--dry-run", *given]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "line 2: '{color}' looks like the name of a wildcard or of a field; encoded as words"
        in said
    )
