"""Tokenizers and encoders of others: their own settings do not act, and each is tried once when it
is loaded.

Models and rewards load theirs through this module. A file that cannot be used is one line at load,
which names the folder, the part and the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sage_fast.util.errors import UserError, first_line, in_one_line

TOKENIZER_SETTINGS = {
    "padding_side": "right",
    "truncation_side": "right",
    "add_prefix_space": False,
    "split_special_tokens": False,
    "clean_up_tokenization_spaces": False,
}
"""Settings of a tokenizer that would change its tokens.

They replace those of its tokenizer_config.json.
"""


WORD = "word"
"""A word that every tokenizer of English knows, or at least its letters."""


@contextlib.contextmanager
def reading(start: str, part: str) -> Iterator[None]:
    """Turn any error of loading or trying `part` into a `UserError` of one line that begins with
    `start`.

    Odd files make these packages raise errors of nearly every class. That the device has too little
    memory is no fault of a file, so that error is left as it is.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        is_sentence = isinstance(error, (OSError, ValueError)) and first_line(error)
        reason = first_line(error) if is_sentence else in_one_line(error)
        named = reason if reason.startswith(part) else f"{part}: {reason}"
        raise UserError(f"{start}: {named}") from error


def load_tokenizer(loader: Any, path: str, **options: Any) -> Any:
    """Load a tokenizer with `TOKENIZER_SETTINGS`, whatever its files say.

    Args:
        loader: class with a method `from_pretrained`.
        path: folder or hub id.
        options: further arguments of `from_pretrained`, which replace the settings.
    """
    return loader.from_pretrained(path, **TOKENIZER_SETTINGS | options)


def check_tokenizer(tokenizer: Any, network: str, rows: int) -> None:
    """Check that a tokenizer gives a network nothing but tokens that it knows.

    Args:
        network: name of the network's part, for the message.
        rows: number of rows of its embedding.

    Raises:
        ValueError: it has no padding token, knows a token without a row, reads an ordinary word as
            a token of its own, or knows none: transformers makes such a tokenizer of a folder that
            lacks its files.
    """
    highest = max(tokenizer.get_vocab().values(), default=-1)
    count = max(highest + 1, len(tokenizer))
    if count > rows:
        raise ValueError(f"{network} has {rows} tokens, and its tokenizer {count}")
    if tokenizer.pad_token_id is None:
        raise ValueError("has no padding token (pad_token in tokenizer_config.json)")
    for token in tokenizer.added_tokens_decoder.values():
        # Published tokenizers add markup, such as <|im_end|>. An ordinary word would get a row that
        # was never trained.
        is_markup = token.content.startswith("<") and token.content.endswith(">")
        is_read_as_text = token.special and tokenizer.split_special_tokens
        if not is_markup and not is_read_as_text:
            word = f"adds the token {token.content!r}, which prompts may hold"
            raise ValueError(f"{word}; expected markup such as <|im_end|>")
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown in tokenizer(WORD, add_special_tokens=False).input_ids:
        raise ValueError(
            f"does not know the word {WORD!r}; expected the files of the published tokenizer, such "
            "as tokenizer.json"
        )


def check_finite(tensor: Tensor, part: str, what: str) -> Tensor:
    """Return `tensor`, what an encoder gives for `what`.

    Raises:
        UserError: it has values that are not finite.
    """
    if not tensor.isfinite().all():
        raise UserError(f"{part} gives values that are not finite for {what}")
    return tensor


def grey_picture(height: int, width: int) -> Image.Image:
    """Return the picture of a trial."""
    return Image.new("RGB", (width, height), (128, 128, 128))
