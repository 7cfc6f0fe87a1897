"""Sections of settings: every field has a type, bounds and a meaning, and one check covers them
all.

    @dataclasses.dataclass(kw_only=True)
    class SamplingConfig(Section):
        \"""How videos are sampled.\"""

        eta: float = within(1.0, least=0)
        \"""Noise level.\"""

A section checks itself when it is created, including by `dataclasses.replace`. Rules over several
fields are in its `__post_init__`. Meanings are read from the source, so that `--help` repeats
nothing. Imports nothing heavy.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import operator
import re
import sys
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sage_fast.util.errors import OWN_PLACE, UserError, nearest

PLACE_FORM = re.compile(r"(?:.*/)?\w[\w.]*:\w[\w.]*")
"""Form of `package.module:name`, with or without the folder of the module."""

BOUNDS = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
NAMES = "names"
"""Key of a field's metadata that says what the setting names on this machine; the other keys are
`BOUNDS`."""
KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "null",
    list[str]: "a list of text, such as [one, two]",
    list[int]: "a list of whole numbers, such as [2, 3]",
    list[dict[str, Any]]: "a list of mappings, such as [{name: one}, {name: two}]",
    list[Any]: "a list, such as [my_module:Name]",
    dict[str, Any]: "a mapping of names to values, such as {name: 1}",
    dict[str, float]: "a mapping of names to numbers, such as {name: 1}",
}
"""Type of a setting, or of what it holds -> the type in words."""
_PYTHON: dict[Any, Any] = {bool: bool, int: int, float: int | float, str: str}


def within(default: float | str | None, **bounds: float) -> Any:
    """Declare a number, which may have choices beside it, with `BOUNDS`; `above` and `below`
    exclude the bound itself, `every` counts from `least`."""
    return dataclasses.field(default=default, metadata=bounds)


def names(kind: str, default: str | None) -> Any:
    """Declare a text that names something on this machine; `sage_fast.config.places.PLACES` has the
    kinds."""
    return dataclasses.field(default=default, metadata={NAMES: kind})


def require(condition: bool, name: str, value: object, expected: str) -> None:
    """Check a condition.

    Raises:
        UserError: the condition does not hold.
    """
    if not condition:
        raise UserError(f"{name} = {value!r}: {expected}")


class Section:
    """Base class of the dataclasses that hold settings. They are checked once, and then frozen.

    Raises:
        UserError: names the setting, its value, what was expected and the nearest valid choice.
    """

    # In a slot, so that `vars` of a section holds its settings alone.
    __slots__ = ("_is_checked",)

    def __post_init__(self) -> None:
        section: type = type(self)
        for setting in own_settings(section):
            value = getattr(self, setting.field)
            setattr(self, setting.field, setting.checked(value))
        object.__setattr__(self, "_is_checked", True)

    def __setattr__(self, field: str, value: object) -> None:
        """Set a field while the section is made; afterwards it would change what was checked.

        `dataclasses(frozen=True)` would refuse without saying what to do.

        Raises:
            UserError: the section is checked already.
        """
        if getattr(self, "_is_checked", False):
            raise self._frozen(field, repr(value))
        object.__setattr__(self, field, value)

    def __delattr__(self, field: str) -> None:
        raise self._frozen(field, "...")

    def _frozen(self, field: str, value: str) -> UserError:
        """Return the error of an assignment to a checked section."""
        name = f"{section_name(type(self))}.{field}".removeprefix(".")
        return UserError(
            f"{name} = {value}: checked settings are frozen, since a change would go unchecked; "
            f'config.replace({{"{name}": {value}}}) returns a changed copy'
        )

    def require(self, condition: bool, field: str, expected: str) -> None:
        """Check a condition on a field, beyond its type and bounds."""
        name = f"{section_name(type(self))}.{field}".removeprefix(".")
        require(condition, name, getattr(self, field), expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of a section.

    Attributes:
        name: dotted name, as in a YAML file and on the command line.
        type: type annotation.
        default: value if nothing is given.
        bounds: name in `BOUNDS` -> bound.
        names: what the setting names on this machine, in `sage_fast.config.places.PLACES`; None for
            a plain value.
    """

    name: str
    type: Any
    default: Any
    bounds: Mapping[str, float]
    names: str | None = None

    @property
    def field(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def choices(self) -> tuple[str, ...]:
        """Shipped values of a choice; empty for every other type."""
        return _choices(self.type)

    @property
    def takes_plugin(self) -> bool:
        """Whether it is a choice that may also be `package.module:name` of the user's."""
        return bool(self.choices) and str in _members(self.type)

    @property
    def takes_number(self) -> bool:
        """Whether it is a choice that may also be a whole number."""
        return bool(self.choices) and int in _members(self.type)

    @property
    def is_text(self) -> bool:
        """Whether any text is valid, as typed."""
        return not self.choices and str in (self.type, *_members(self.type))

    @property
    def takes_mapping(self) -> bool:
        """Whether it may be a mapping."""
        return any(get_origin(kind) is dict for kind in (self.type, *_members(self.type)))

    @property
    def range(self) -> str:
        """Bounds in words, such as `at least 0 and below 1`, `a multiple of 16` or `4k + 1`."""
        if every := self.bounds.get("every"):
            least = self.bounds["least"]
            return f"a multiple of {every}" if least % every == 0 else f"{every}k + {least}"
        return " and ".join(f"{BOUNDS[name][0]} {bound}" for name, bound in self.bounds.items())

    def checked(self, value: object) -> Any:
        """Return a valid value; a whole number becomes a float where the type is float.

        Raises:
            UserError: wrong type, not finite, out of bounds, or none of the choices.
        """
        try:
            value = _convert(self.type, value)
        except ValueError as error:
            raise UserError(f"{self.name} = {value!r}: {error}") from None
        if isinstance(value, int | float) and not isinstance(value, bool):
            problem = self._out_of_bounds(value)
            require(problem is None, self.name, value, str(problem))
        return value

    def _out_of_bounds(self, value: float) -> str | None:
        if not is_finite(value):
            return f"expected a finite number, such as {self.default}"
        if every := self.bounds.get("every"):
            least = self.bounds["least"]
            below = max((value - least) // every, 0) * every + least
            valid = str(below) if below > value else f"{below} and {below + every}"
            return (
                None
                if value == below
                else f"expected {self.range}; the nearest valid values are {valid}"
            )
        for name, bound in self.bounds.items():
            if not BOUNDS[name][1](value, bound):
                valid = (
                    f"; the nearest is {bound}"
                    if name in ("least", "most")
                    else f", such as {self.default}"
                )
                return f"expected {self.range}{valid}"
        return None


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()


def _choices(hint: Any) -> tuple[str, ...]:
    """Return the values of a `Literal`, alone or beside other types; empty without one."""
    for member in (hint, *_members(hint)):
        if get_origin(member) is Literal:
            return get_args(member)
    return ()


def kind(hint: Any) -> str:
    """Describe a type in words."""
    if choices := _choices(hint):
        return f"one of {', '.join(choices)}{_beside_choices(hint)}"
    return " or ".join(KINDS[member] for member in _members(hint) or (hint,))


def _beside_choices(hint: Any) -> str:
    """Return what else a choice may be, in words; empty if nothing."""
    own = OWN_PLACE if str in _members(hint) else ""
    number = f" or {KINDS[int]}" if int in _members(hint) else ""
    return own + number


def _convert(hint: Any, value: Any) -> Any:
    """Return the value if it has the type, at any depth; whole numbers become floats where the type
    is float.

    Raises:
        ValueError: says what was expected.
    """
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if _choices(hint):
        return _chosen(hint, value)
    for member in _members(hint):
        if get_origin(member) is dict and isinstance(value, Mapping):
            return _convert(member, value)
    if origin is dict and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _convert(inside[1], item) for key, item in value.items()}
    if origin is list and isinstance(value, list):
        return [_convert(inside[0], item) for item in value]
    if value is None and types.NoneType in _members(hint):
        return None
    return _convert_scalar(hint, value)


def _convert_scalar(hint: Any, value: Any) -> Any:
    """Return a number, text or bool if it has the type.

    Raises:
        ValueError: says what was expected.
    """
    wanted = next(member for member in (*_members(hint), hint) if member is not types.NoneType)
    if not isinstance(value, _PYTHON.get(wanted, ())) or (
        isinstance(value, bool) and wanted is not bool
    ):
        quoted = (
            f", such as {str(value)!r}"
            if wanted is str and not isinstance(value, list | dict)
            else ""
        )
        raise ValueError(f"expected {kind(hint)}{quoted}")
    if wanted is float:
        return float(value) if is_finite(value) else value
    if value == "":
        raise ValueError("expected text that is not empty")
    return value


def _chosen(hint: Any, value: Any) -> Any:
    """Return a choice, or `package.module:name` or a number where the type allows it beside its
    choices.

    Raises:
        ValueError: says what was expected.
    """
    choices = _choices(hint)
    takes_plugin = str in _members(hint)
    # `in` compares with ==, which some values do not answer with a bool
    if isinstance(value, str) and value in choices:
        return value
    if takes_plugin and isinstance(value, str) and PLACE_FORM.fullmatch(value):
        return value
    if int in _members(hint) and isinstance(value, int) and not isinstance(value, bool):
        return value
    off = value is False or value == "off"  # YAML reads off as False
    raise ValueError(nearest("none" if off else str(value), choices, _beside_choices(hint)))


def is_finite(value: float) -> bool:
    """Whether a float can hold a number; `math.isfinite` raises on larger whole numbers."""
    return -sys.float_info.max <= value <= sys.float_info.max  # false for NaN too


def is_unicode(text: str) -> bool:
    """Whether text can be written as UTF-8; arguments in another encoding cannot, as Python decodes
    them."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def is_hub_id(text: str) -> bool:
    """Whether text has the form of a hub id, owner/name."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) is not None


def section_name(section: type) -> str:
    """Return `sampling` for `SamplingConfig` and "" for the whole tree, `Config`; `SECTION` in a
    class overrides it."""
    return vars(section).get("SECTION", section.__name__.removesuffix("Config").lower())


@functools.cache
def own_settings(section: type) -> tuple[Setting, ...]:
    """Return the settings of a section, without those of nested sections."""
    hints = get_type_hints(section)
    prefix = section_name(section) + "."
    found = []
    for field in dataclasses.fields(section):
        if not dataclasses.is_dataclass(hints[field.name]):
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            name = (prefix + field.name).removeprefix(".")
            bounds = {key: bound for key, bound in field.metadata.items() if key != NAMES}
            kind = field.metadata.get(NAMES)
            found.append(
                Setting(
                    name=name, type=hints[field.name], default=default, bounds=bounds, names=kind
                )
            )
    return tuple(found)


@functools.cache
def sections(tree: type) -> dict[str, type]:
    """Return name -> section; the first one is the tree itself, named `""`."""
    hints = get_type_hints(tree)
    inside = {
        f.name: hints[f.name]
        for f in dataclasses.fields(tree)
        if dataclasses.is_dataclass(hints[f.name])
    }
    return {"": tree} | inside


@functools.cache
def settings_of(tree: type) -> dict[str, Setting]:
    """Return dotted name -> setting of the whole tree."""
    return {
        setting.name: setting
        for section in sections(tree).values()
        for setting in own_settings(section)
    }


@functools.cache
def meanings(section: type) -> dict[str, str]:
    """Return field -> the docstring after it in the source, and `""` -> the section's own
    docstring."""
    found: dict[str, str] = {}
    # its own fields first, then those of its bases
    for base in filter(dataclasses.is_dataclass, section.__mro__):
        tree, name = ast.parse(inspect.getsource(sys.modules[base.__module__])), ""
        body = next(
            node.body
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == base.__name__
        )
        for node in body:
            if isinstance(node, ast.AnnAssign):
                name = ast.unparse(node.target)
            elif isinstance(node, ast.Expr):
                found.setdefault(name, inspect.cleandoc(ast.literal_eval(node.value)))
    return found
