"""Read prompt files: plain text or JSON lines."""

from __future__ import annotations

import dataclasses
import difflib
import json
import pkgutil
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from sage_fast.config.fields import is_unicode
from sage_fast.config.schema import DataConfig
from sage_fast.data.prompt_habits import check_lines, check_words, meant_key
from sage_fast.util.captions import Caption, PromptKey
from sage_fast.util.errors import UserError, nearest
from sage_fast.util.files import why_no_file
from sage_fast.util.images import check_image
from sage_fast.util.paths import expanded

KEYS = ("prompt", "negative_prompt", "seed", "image")
OTHERS_KEYS = {"negative": "negative_prompt", "negprompt": "negative_prompt", "prompts": "prompt"}
"""Keys of other programs, as `squeezed`, -> which of `KEYS` they stand for."""
UNSUPPORTED_SUFFIXES = (
    ".json",
    ".ndjson",
    ".jsonlines",
    ".csv",
    ".tsv",
    ".yaml",
    ".yml",
    ".toml",
    ".xml",
    ".parquet",
    ".xlsx",
)
"""Suffixes that would wrongly be read as text."""
CODE_SUFFIXES = (".py", ".ipynb", ".sh", ".sbatch", ".html")
"""Suffixes of text that holds no prompts."""
SETS = {
    "testbed:train": "sage_fast.testbed.world:train_prompts",
    "testbed:heldout": "sage_fast.testbed.world:heldout_prompts",
}
"""Named prompts -> the function that returns them, for the models that list them in
`Spec.prompt_sets`."""
BLANKS = "\u115f\u1160\u2800\u3164\uffa0"
"""Letters and symbols that show nothing: Hangul's fillers, and Braille's empty cell."""
FORMATS = "UTF-8 text with one prompt a line, or .jsonl"

Fields = Mapping[str, object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A record of a prompt file.

    Attributes:
        text: the prompt.
        negative: negative prompt for guidance; empty if neither the record nor the settings have
            one.
        image: path of the image that the video begins from, as the record names it; empty if it has
            none.
        folder: what a relative `image` is relative to.
        seed: seed of the first video in `eval` and `sample`; None derives it from the seed of the
            run.
        metadata: further keys of the record, for rewards that take them.
        where: file and line, or what else gave it, for messages.
        negative_where: the setting that gave the negative prompt; empty if the record has its own.
    """

    text: str
    negative: str = ""
    image: str = ""
    folder: str = dataclasses.field(default="", compare=False)
    seed: int | None = None
    metadata: Fields = dataclasses.field(default_factory=dict)
    where: str = dataclasses.field(default="", compare=False)
    negative_where: str = dataclasses.field(default="", compare=False)

    @property
    def key(self) -> PromptKey:
        """Name of the prompt everywhere else: its text, and its image if it has one."""
        return PromptKey(self.text, self.image)

    @property
    def caption(self) -> Caption:
        return Caption(
            self.text, str(Path(self.folder, expanded(self.image)).absolute()) if self.image else ""
        )

    def check(self, check_image: Callable[[str], object] = check_image) -> None:
        """Check the texts, the key, and the image by a function of its path; by default its header
        alone.

        Raises:
            UserError: the prompt is empty or no text, a text looks like a key with an image, or
                holds an option, a wildcard or another instruction of `prompt_habits`; or the image
                cannot be used.
        """
        if not any(map(_is_visible, self.text)):
            problem = "the prompt is empty"
            if self.text:
                problem += ", or all of its characters are invisible"
            raise UserError(f"{self.where}: {problem}")
        texts = self.text + self.negative
        if "\0" in texts or not is_unicode(texts):
            raise UserError(
                f"{self.where}: the prompt holds a NUL or half of a character; expected text"
            )
        for key in (self.key, self.saying(self.negative).key):
            # what files hold of it would be read back as the key of another prompt
            if PromptKey.parse(str(key)).image != self.image:
                raise UserError(
                    f"{self.where}: {textwrap.shorten(str(key), 60)!r} ends like the name of a "
                    "prompt with an image; "
                    'expected the image in the key "image" of a .jsonl file'
                )
        for text in (self.text, self.negative):
            check_words(text, self.where)
        if self.image:
            try:
                check_image(self.caption.image)
            except UserError as error:
                raise UserError(f"{self.where}: {error}") from error

    def saying(self, text: str) -> Prompt:
        """Return a prompt with the same image and another text."""
        return Prompt(text=text, image=self.image, folder=self.folder, where=self.where)


def _is_visible(letter: str) -> bool:
    """Whether a letter shows something: no control character, mark, space or blank."""
    return unicodedata.category(letter)[0] not in "CMZ" and letter not in BLANKS


def read_prompts(source: str) -> list[Prompt]:
    """Read the prompts of a UTF-8 file, or of a shipped set.

    `.jsonl` has one object per line. Of the keys `KEYS` only `prompt` is required; further keys are
    metadata. `image` is relative to the file. Any other file is text with one prompt per line;
    blank lines are skipped. Lines may end as on any system. Text that was written for another
    program is refused (`prompt_habits`).

    Args:
        source: path, or a name in `SETS`.

    Raises:
        UserError: missing, not UTF-8, malformed, or with a misspelt key, a wrong type or an image
            that cannot be used; names file and line.
    """
    if source in SETS:
        return [Prompt(text=text, where=source) for text in pkgutil.resolve_name(SETS[source])()]
    if source.startswith(tuple(f"{name.partition(':')[0]}:" for name in SETS)):
        raise UserError(f"prompts {source!r}: {nearest(source, SETS)}; or a file")
    suffix = Path(source).suffix.lower()
    if suffix in UNSUPPORTED_SUFFIXES:
        raise UserError(f"prompt file {source!r}: expected {FORMATS}; the nearest is .jsonl")
    if suffix in CODE_SUFFIXES:
        raise UserError(f"prompt file {source!r}: a {suffix} file; expected {FORMATS}")
    # splitlines() also splits at form feeds, ... A mark may be anywhere in a file that was put
    # together from several.
    split = re.split("\r\n|\r|\n", _text_of(source).replace("\ufeff", ""))
    lines = []
    for number, line in enumerate(split, start=1):
        if line.strip():
            lines.append((number, line.strip()))
    if not lines:
        raise UserError(f"prompt file {source!r} is empty; expected at least one prompt")
    for number, line in lines:
        if "\0" in line:
            raise UserError(
                f"prompt file {source!r}, line {number}: holds a NUL, as UTF-16 does; save it as "
                "UTF-8 text"
            )
    if suffix != ".jsonl":
        check_lines(lines, source)
    prompts = []
    for number, line in lines:
        where = f"prompt file {source!r}, line {number}"
        fields = _json_fields(line, where) if suffix == ".jsonl" else {"prompt": line}
        prompts.append(_prompt(fields, where, str(Path(source).parent)))
    return prompts


def configured_prompts(data: DataConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Read `data.prompts` and `data.eval_prompts`, with `data.negative_prompt`."""
    return (
        with_negative(read_prompts(data.prompts), data),
        with_negative(read_prompts(data.eval_prompts), data),
    )


def with_negative(prompts: Iterable[Prompt], data: DataConfig) -> list[Prompt]:
    """Return prompts of which each without a negative prompt has `data.negative_prompt`.

    Raises:
        UserError: that is no text for a model, as `Prompt.check`.
    """
    negative = (data.negative_prompt or "").strip()
    where = "data.negative_prompt"
    if negative:
        Prompt(text=negative, where=where).check()
    found = []
    for prompt in prompts:
        if negative and not prompt.negative:
            prompt = dataclasses.replace(prompt, negative=negative, negative_where=where)
        found.append(prompt)
    return found


def captions_of(prompts: Sequence[Prompt]) -> dict[PromptKey, Caption]:
    """Return key -> caption of all that a run of these prompts embeds: empty, given and negative
    prompts.

    Raises:
        UserError: a prompt has two negative prompts.
    """
    negatives = [
        prompt.saying(prompt.negative) for prompt in _firsts(prompts).values() if prompt.negative
    ]
    return {
        prompt.key: prompt.caption
        for prompt in (*(p.saying("") for p in prompts), *prompts, *negatives)
    }


def negatives_of(prompts: Iterable[Prompt]) -> dict[PromptKey, str]:
    """Return key -> negative prompt for the prompts that have one; errors as `_firsts`."""
    return {key: first.negative for key, first in _firsts(prompts).items() if first.negative}


def metadata_of(prompts: Iterable[Prompt]) -> dict[PromptKey, Fields]:
    """Return key -> metadata for the prompts that have any, the path of the image included; errors
    as `_firsts`."""
    found = {}
    for key, first in _firsts(prompts).items():
        metadata = _metadata(first)
        if metadata:
            found[key] = metadata
    return found


def _metadata(prompt: Prompt) -> Fields:
    if not prompt.image:
        return prompt.metadata
    return {**prompt.metadata, "image": prompt.caption.image}


def _firsts(prompts: Iterable[Prompt]) -> dict[PromptKey, Prompt]:
    """Return key -> its first record.

    Raises:
        UserError: another record of the prompt has other values. Sampling, training and evaluation
            must use the same policy and the same reward for a prompt.
    """
    known: dict[PromptKey, Prompt] = {}
    for prompt in prompts:
        first = known.setdefault(prompt.key, prompt)
        values = {"negative_prompt": prompt.negative, **_metadata(prompt)}
        earlier = {"negative_prompt": first.negative, **_metadata(first)}
        for key in values | earlier:
            if values.get(key) != earlier.get(key):
                name = textwrap.shorten(key, 60)
                raise UserError(
                    f"{prompt.where}: {name} = {repr(values.get(key))[:200]}; the same prompt has "
                    f"{repr(earlier.get(key))[:200]} in {first.where}; expected one {name} for a "
                    "prompt everywhere"
                )
    return known


def _text_of(source: str) -> str:
    path = Path(source)
    try:
        found = path.is_file()
    except OSError:  # not a possible file name
        found = False
    if not found:
        close = difflib.get_close_matches(path.name, SETS, n=1)
        hint = f", or {close[0]!r}" if close else ""
        relative = ""
        if path.is_absolute():
            relative = "; a relative path in a settings file means the folder of that file"
        raise UserError(
            f"prompt file {source!r}: {why_no_file(path)}; expected {FORMATS}{hint}{relative}"
        )
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = len(re.findall(rb"\r\n|\r|\n", content[: error.start])) + 1
        raise UserError(
            f"prompt file {source!r}, line {line}: not UTF-8; save it as UTF-8 text"
        ) from error


def _json_fields(line: str, where: str) -> Fields:
    try:
        fields = json.loads(line, parse_constant=_refuse, object_pairs_hook=_distinct)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UserError(f'{where}: expected an object, such as {{"prompt": "a cat"}}')
    return {key: value for key, value in fields.items() if value is not None or key not in KEYS[1:]}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number there; the nearest is null")


def _distinct(pairs: list[tuple[str, object]]) -> Fields:
    """Return an object of JSON, in which a key may stand once: the last value would win in
    silence."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(
            f"the key {textwrap.shorten(twice, 60)!r} stands there twice; expected one"
        )
    return fields


def _prompt(fields: Fields, where: str, folder: str) -> Prompt:
    metadata = {key: value for key, value in fields.items() if key not in KEYS}
    for key in sorted(metadata):
        meant = meant_key(key, KEYS, OTHERS_KEYS)
        if meant is not None:
            raise UserError(
                f"{where}: unknown key {textwrap.shorten(key, 60)!r}; expected one of "
                f"{', '.join(KEYS)}; did you mean {meant!r}? For metadata of your own, give it "
                "another name"
            )
        if difflib.get_close_matches(key, KEYS[:2], n=1, cutoff=0.85):
            raise UserError(
                f"{where}: unknown key {textwrap.shorten(key, 60)!r}; {nearest(key, KEYS)}"
            )
    if "prompt" not in fields:
        raise UserError(f"{where}: 'prompt' is missing")
    found = Prompt(
        text=_text(fields, "prompt", where),
        negative=_text(fields, "negative_prompt", where),
        image=_text(fields, "image", where),
        folder=folder,
        seed=_seed(fields, where),
        metadata=metadata,
        where=where,
    )
    found.check()
    return found


def _seed(fields: Fields, where: str) -> int | None:
    seed = fields.get("seed")
    if seed is None:
        return None
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise UserError(
            f"{where}: seed = {repr(seed)[:60]}: expected a whole number from 0 to 2^63 - 1"
        )
    return seed


def _text(fields: Fields, key: str, where: str) -> str:
    value = fields.get(key, "")
    if not isinstance(value, str):
        raise UserError(f"{where}: {key} = {repr(value)[:60]}: expected text")
    return value.strip()
