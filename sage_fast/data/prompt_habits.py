"""Recognise what a prompt file holds that was written for another program.

Tables, comments, options and wildcards are instructions to the program that they were written for.
Read as a prompt, they would be encoded as words. What can hardly be meant as words is refused; what
may be meant so gets a note.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from sage_fast.util.errors import UserError

Line = tuple[int, str]
"""Number of a line, from 1, and its text without spaces around it."""

JSONL = "rename the file to .jsonl, with one object a line"
OWN_KEYS = (
    'a .jsonl file holds such values, as {"prompt": "a cat", "negative_prompt": "blurry", "seed": '
    "7}"
)

# -- within a prompt -------------------------------------------------------------------------------

KNOWN_OPTIONS = (
    *(
        "ar",
        "aspect",
        "c",
        "camera",
        "cfg",
        "chaos",
        "cref",
        "cw",
        "d",
        "duration",
        "fps",
        "frames",
        "g",
        "gs",
        "h",
    ),
    *(
        "height",
        "hd",
        "image",
        "iw",
        "l",
        "loop",
        "motion",
        "n",
        "neg",
        "negative",
        "negative-prompt",
    ),
    *(
        "negative_prompt",
        "niji",
        "no",
        "num_frames",
        "prompt",
        "q",
        "quality",
        "r",
        "ratio",
        "raw",
        "repeat",
        "s",
    ),
    *(
        "sampler",
        "scale",
        "seed",
        "size",
        "sref",
        "steps",
        "stop",
        "style",
        "stylize",
        "sv",
        "sw",
        "test",
        "tile",
    ),
    *("turbo", "uplight", "upbeta", "v", "version", "vibe", "video", "w", "weird", "width", "zoom"),
)
"""Options that generators of pictures and videos take at the end of a prompt."""
_OPTION = "|".join(sorted(KNOWN_OPTIONS, key=len, reverse=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Habit:
    """Something that other programs take for an instruction.

    Attributes:
        what: what it is, for messages.
        pattern: how it is recognised in a prompt.
        instead: what to do.
        refused: whether it is an error; otherwise it gets a note.
        example: a prompt that has it.
    """

    what: str
    pattern: re.Pattern[str]
    instead: str
    refused: bool
    example: str

    def found(self, text: str) -> str:
        """Return the part of a prompt that is meant; empty if there is none."""
        match = self.pattern.search(text)
        return match[0].strip() if match else ""


HABITS = (
    Habit(
        what="an option of another program",
        # Editors make one dash of two hyphens. Prose has one before a word too, but no number then.
        pattern=re.compile(
            rf"(?:^|\s)(?:--(?:{_OPTION})(?![\w-])(?:[ =]\S+)?|[\u2013\u2014](?:{_OPTION})[ "
            r"=]\d\S*)",
            re.IGNORECASE,
        ),
        instead=f"remove it; {OWN_KEYS}, and settings hold the rest",
        refused=True,
        example="a cat --ar 16:9",
    ),
    Habit(
        what="an option of another program",
        pattern=re.compile(
            rf"\s-(?:{_OPTION})[ =](?:\d[\d.:x]*|in|out|left|right|up|down)(?!\S)", re.IGNORECASE
        ),
        instead=f"remove it; {OWN_KEYS}, and settings hold the rest",
        refused=True,
        example="a cat -motion 2",
    ),
    Habit(
        what="a command of another program",
        pattern=re.compile(r"^/(?:imagine|video|animate|create)\b(?:\s+prompt:)?", re.IGNORECASE),
        instead="keep the prompt alone",
        refused=True,
        example="/imagine prompt: a cat",
    ),
    Habit(
        what="the name of a field",
        pattern=re.compile(
            r"^[\"'-]*\s*(?:negative[ _-]?prompt|prompt)[\"']?\s*[:=]", re.IGNORECASE
        ),
        instead=f"keep the prompt alone; {OWN_KEYS}",
        refused=True,
        example="Negative prompt: blurry",
    ),
    Habit(
        what="settings of another program",
        pattern=re.compile(r"\bSteps: \d+, (?:Sampler|Size|CFG|Seed)\b.*", re.IGNORECASE),
        instead="keep the prompts alone",
        refused=True,
        example="Steps: 20, Sampler: Euler a, CFG scale: 7, Seed: 5",
    ),
    Habit(
        what="a choice between words",
        pattern=re.compile(r"\{[^{}|]*\|[^{}]*\}"),
        instead="nothing draws one: write a line for each",
        refused=True,
        example="a {red|blue} ball",
    ),
    Habit(
        what="a wildcard",
        pattern=re.compile(r"(?<!\w)__[A-Za-z][\w/*-]*__(?!\w)"),
        instead="nothing replaces it: write a line for each word",
        refused=True,
        example="a __color__ ball",
    ),
    Habit(
        what="the name of weights",
        pattern=re.compile(r"<(?:lora|lyco|hypernet|embedding|ti):[^<>]*>", re.IGNORECASE),
        instead="remove it; model.weights loads weights",
        refused=True,
        example="a cat <lora:add_detail:0.8>",
    ),
    Habit(
        what="a weight of words",
        pattern=re.compile(r"\([^()]*:-?\d*\.?\d+\)|\(\([^()]+\)\)"),
        instead="no weight is read",
        refused=False,
        example="a (red:1.3) ball",
    ),
    Habit(
        what="a change of words on the way",
        pattern=re.compile(r"\[[^\[\]:|]*[:|][^\[\]]*\]"),
        instead="nothing follows it",
        refused=False,
        example="a [cat:dog:0.5]",
    ),
    Habit(
        what="the name of a wildcard or of a field",
        pattern=re.compile(r"\$?\{[^{}|]*\}|(?<!\w)%(?:\([a-z_]+\))?s(?!\w)|(?<!\w)\$[A-Z_]{2,}"),
        instead="nothing replaces it",
        refused=False,
        example="a {color} ball",
    ),
    Habit(
        what="a mark for an image, or of a page",
        pattern=re.compile(
            r"\[/?(?:img|image|video|b|i|url)\]|</?[A-Za-z][\w-]*(?: "
            r"[^<>]*)?/?>|<\|[^<>|]*\|>|!?\[[^\[\]]*\]\([^()]*\)"
        ),
        instead='the key "image" of a .jsonl file names an image',
        refused=False,
        example="[img] a cat",
    ),
    Habit(
        what="an address",
        pattern=re.compile(r"\b(?:https?|file|s3|gs)://\S+", re.IGNORECASE),
        instead="nothing is fetched",
        refused=False,
        example="https://example.com/cat.png a cat",
    ),
    Habit(
        what="an option",
        pattern=re.compile(r"(?:^|\s)--[A-Za-z][\w-]*"),
        instead="no option is read in a prompt",
        refused=False,
        example="a cat --fast",
    ),
    Habit(
        what="a comment",
        pattern=re.compile(r"^#(?![\d\s]).*|\s#\s.*|\s//\s.*|/\*.*|<!--.*"),
        instead="there are no comments",
        refused=False,
        example="a cat # the grey one",
    ),
    Habit(
        what="quotes around the prompt",
        pattern=re.compile(
            r"^(?:\"[^\"]*\"|'[^']*'|\u201c[^\u201c\u201d]*\u201d|\u00ab[^\u00ab\u00bb]*\u00bb),?$"
        ),
        instead="they are part of the prompt, as a text to be shown",
        refused=False,
        example='"a cat"',
    ),
    Habit(
        what="a number or a mark of a list",
        pattern=re.compile(r"^(?:\(?\d{1,5}[.):]|[-*\u2022>]|#\d+[.:])\s"),
        instead="it is part of the prompt",
        refused=False,
        example="1. a cat",
    ),
    Habit(
        what="an escape",
        pattern=re.compile(
            r"&(?:[a-z]{2,8}|#\d+|#x[0-9a-f]+);|\\(?:[nrt\"']|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})"
        ),
        instead="it stays as it is written",
        refused=False,
        example="salt &amp; pepper",
    ),
    Habit(
        what="a tab",
        pattern=re.compile(r"\S{1,30}\t\S{1,30}"),
        instead="a table has to be a .jsonl file",
        refused=False,
        example="a cat\tblurry",
    ),
    Habit(
        what="a letter that was lost",
        pattern=re.compile(r"\S{0,30}\ufffd\S{0,30}"),
        instead="read the file that it came from in its own encoding",
        refused=False,
        example="caf\ufffd",
    ),
)
"""What is recognised within a prompt, whatever file it came from.

The first that is found is told.
"""


def check_words(text: str, where: str) -> None:
    """Check that a prompt holds no instruction for another program.

    Args:
        where: what gave it, for messages.

    Raises:
        UserError: it holds one of the refused `HABITS`.
    """
    for habit in HABITS:
        if not habit.refused:
            continue
        found = habit.found(text)
        if found:
            raise UserError(
                f"{where}: {_quoted(found)} is {habit.what}; expected words alone: {habit.instead}"
            )


def notes_on_words(texts: Sequence[tuple[str, str]]) -> list[str]:
    """Return a note for each kind of what may be an instruction for another program.

    Args:
        texts: prompt and where it is from.
    """
    notes = []
    for habit in HABITS:
        if habit.refused:
            continue
        found_at = {}
        for text, where in texts:
            found = habit.found(text)
            if found:
                found_at[where] = found
        if not found_at:
            continue
        where, found = next(iter(found_at.items()))
        others = f", and {len(found_at) - 1} more such" if len(found_at) > 1 else ""
        notes.append(
            f"{where}: {_quoted(found)} looks like {habit.what}{others}; encoded as words: "
            f"{habit.instead}"
        )
    for delimiter in (",", "|"):
        rows = [_cells(text, delimiter) for text, _ in texts]
        if len(rows) > 1 and _width(rows) > 1 and _is_tight(rows):
            text, where = texts[0]
            notes.append(
                f"{where}: {_quoted(text)} looks like a row of a table, as every line has "
                f"{len(rows[0])} values with {DELIMITERS[delimiter]} between; encoded as words: a "
                "table has to be a .jsonl file"
            )
    return notes


def _quoted(found: str) -> str:
    short = found if len(found) <= 60 else f"{found[:57]}..."
    return repr(short)


# -- a text file as a whole ------------------------------------------------------------------------

PROMPT_COLUMNS = {
    "prompt",
    "prompts",
    "caption",
    "captions",
    "negativeprompt",
    "promptid",
    "videoprompt",
}
"""Names of columns, as `squeezed` gives them, that are no prompts."""
OTHER_COLUMNS = {
    "text",
    "description",
    "instruction",
    "query",
    "title",
    "sentence",
    "id",
    "file",
    "image",
    "seed",
}
"""Further names, which may also be words of a prompt: they count in a row that is written as a
table."""
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_CELL = re.compile(
    r"-?\d+(?:\.\d+)?|\S+\.(?:mp4|webm|mov|avi|mkv|gif|png|jpe?g|webp|txt|safetensors)",
    re.IGNORECASE,
)
_LISTED = {
    "numbers": re.compile(r"^\(?\d{1,5}[.):]\s"),
    "marks": re.compile(r"^[-*\u2022]\s"),
}
_PAIRS = {
    '"': '"',
    "'": "'",
    "\u201c": "\u201d",
    "\u201e": "\u201c",
    "\u2018": "\u2019",
    "\u00ab": "\u00bb",
    "`": "`",
}


def squeezed(name: str) -> str:
    """Return the letters and digits of a name without case, so that `Negative-Prompt ` is
    `negativeprompt`."""
    return "".join(filter(str.isalnum, name.casefold()))


def check_lines(lines: Sequence[Line], source: str) -> None:
    """Check that a text file holds prompts, one a line, and no other format.

    Args:
        lines: those that are not blank.
        source: path of the file, for messages.

    Raises:
        UserError: it holds another format; names the line and what to do.
    """
    for find in FORMATS:
        for number, what in find(lines):
            raise UserError(f"prompt file {source!r}, line {number}: {what}")


def _json(lines: Sequence[Line]) -> Iterator[Line]:
    for number, text in lines:
        if (
            re.match(r"""\{\s*["']|\[\s*["'{]""", text)
            or text in ("[", "{")
            or (text[0] in "[{" and _is_json(text))
        ):
            yield number, f"JSON in a text file; expected one prompt a line: {JSONL}"


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def _comments(lines: Sequence[Line]) -> Iterator[Line]:
    for number, text in lines:
        if re.match(r"#(?:[\s#!=*-]|$)|//\s|<!--|<\?xml|/\*", text):
            yield (
                number,
                (
                    f"{_quoted(text)} is a comment, and there are none in prompt files; remove the "
                    "line"
                ),
            )


def _no_words(lines: Sequence[Line]) -> Iterator[Line]:
    for number, text in lines:
        if re.fullmatch(r"[!-/:-@\[-`{-~\s]+", text):
            yield number, f"{_quoted(text)} holds no word; expected one prompt a line"


def _header(lines: Sequence[Line]) -> Iterator[Line]:
    number, first = lines[0]
    advice = f"looks like the header of a table; expected one prompt a line: remove it, or {JSONL}"
    if re.fullmatch(r"sep=.", first):
        yield number, f"{_quoted(first)} {advice}"
    for delimiter in DELIMITERS:
        cells = _cells(first, delimiter)
        if not all(
            re.fullmatch(r"\s?[\w.-]{0,30}(?: [\w.-]{1,30}){0,2}\s?", cell) for cell in cells
        ):
            continue
        names = {squeezed(cell) for cell in cells}
        is_tight = len(cells) > 1 and not any(cell.startswith(" ") for cell in cells)
        if names & PROMPT_COLUMNS or (is_tight and names & OTHER_COLUMNS):
            yield number, f"{_quoted(first)} {advice}"


def _table(lines: Sequence[Line]) -> Iterator[Line]:
    for number, text in lines:
        # A quoted cell and another one behind it. Prose has a space there.
        if re.match(r'"(?:[^"]|"")*"[,;\t][^\s,;]', text):
            yield (
                number,
                f"{_quoted(text)} is a row of a table; expected one prompt a line: {JSONL}",
            )
    for delimiter, called in DELIMITERS.items():
        rows = [_cells(text, delimiter) for _, text in lines]
        width = _width(rows)
        if width == 1:
            continue
        columns = [[row[i] for row in rows] for i in range(width)]
        is_data = any(all(_CELL.fullmatch(cell) for cell in column) for column in columns)
        if delimiter == "\t" or (
            len(rows) > 1 and (is_data or (delimiter == ";" and _is_tight(rows)))
        ):
            where, row = lines[0]
            columned = f"every line has {width} values with {called} between"
            yield (
                where,
                f"{_quoted(row)}: {columned}, as a table; expected one prompt a line: {JSONL}",
            )


def _width(rows: Sequence[Sequence[str]]) -> int:
    """Return how many cells every row has; 1 if they differ."""
    widths = {len(row) for row in rows}
    return widths.pop() if len(widths) == 1 else 1


def _is_tight(rows: Sequence[Sequence[str]]) -> bool:
    """Whether no space follows a separator, as in tables and unlike prose."""
    return not any(cell.startswith(" ") for row in rows for cell in row)


def _cells(text: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([text], delimiter=delimiter), [""])
    except csv.Error:
        return [text]


def _all_quoted(lines: Sequence[Line]) -> Iterator[Line]:
    if all(_is_quoted(text.removesuffix(",")) for _, text in lines):
        number, first = lines[0]
        said = "every line is in quotes, which would be part of the prompts; remove them"
        yield number, f"{_quoted(first)}: {said}"


def _is_quoted(text: str) -> bool:
    """Whether a text stands in quotes as a whole, and not only begins and ends with quoted
    words."""
    end = _PAIRS.get(text[:1])
    if end is None or len(text) < 3 or not text.endswith(end):
        return False
    inner = text[1:-1].replace('""', "").replace(f"\\{end}", "")
    inner = re.sub(r"(?<=\w)['\u2019](?=\w)", "", inner)  # an apostrophe
    return text[0] not in inner and end not in inner


def _all_listed(lines: Sequence[Line]) -> Iterator[Line]:
    for called, pattern in _LISTED.items():
        if len(lines) > 1 and all(pattern.match(text) for _, text in lines):
            number, first = lines[0]
            yield (
                number,
                f"{_quoted(first)}: every line is listed by {called}, which would be encoded; "
                "remove them",
            )


FORMATS: tuple[Callable[[Sequence[Line]], Iterator[Line]], ...] = (
    _json,
    _comments,
    _header,
    _table,
    _all_quoted,
    _all_listed,
    _no_words,
)
"""Each yields the lines of a text file that belong to another format, and what is wrong with them.
"""


# -- keys of a record ------------------------------------------------------------------------------


def meant_key(key: str, own: Sequence[str], further: Mapping[str, str]) -> str | None:
    """Return which of our names is meant by one that differs in case, spaces, hyphens or points.

    Args:
        own: our names.
        further: squeezed name -> which of ours it stands for.
    """
    letters = squeezed(key)
    if key in own or not letters:
        return None
    names = {squeezed(name): name for name in own}
    return (names | dict(further)).get(letters)
