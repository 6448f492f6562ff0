"""Recipe files: the ones that ship, reading YAML, and `--set` overrides."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hybridize.problems import nearest
from hybridize.recipe.schema import Header, Recipe, RecipeError
from hybridize.recipe.steps import KINDS


@dataclass(frozen=True)
class RecipeFile:
    """A recipe that ships with the package."""

    name: str
    path: Path
    header: Header


def list_recipes() -> list[RecipeFile]:
    """The recipes that ship, by name."""
    return [
        RecipeFile(path.stem, path, _read_header(path.read_text("utf-8")))
        for path in sorted(_shipped_folder().glob("*.yaml"))
    ]


def recipe_path(path_or_name: str | Path) -> Path:
    """The file of a recipe given by its path or by the name of one that ships.

    Raises:
        RecipeError: neither exists; the message names the nearest recipe.
    """
    path = Path(path_or_name)
    if path.is_file():
        return path
    shipped = {path.stem: path for path in _shipped_folder().glob("*.yaml")}
    if str(path_or_name) in shipped:
        return shipped[str(path_or_name)]
    raise RecipeError(
        str(path_or_name),
        [f"no such file, and no recipe of this name ships; {nearest(path.stem, sorted(shipped))}"],
    )


def copy_recipe(name: str, destination: str | Path = ".") -> Path:
    """Copy a shipped recipe into a folder, or to a new file name, and give the new path.

    Raises:
        FileExistsError: the destination file exists.
    """
    source = recipe_path(name)
    target = Path(destination)
    if target.is_dir() or target.suffix not in (".yaml", ".yml"):
        target = target / source.name
    if target.exists():
        raise FileExistsError(f"{target} exists; name another destination or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target


def load_recipe(
    recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | Sequence[str] | None = None
) -> Recipe:
    """Read and check a recipe: a file, the name of one that ships, or its content as plain data.

    `overrides` change values before the check: a mapping `{"data.length": 512}` or texts such as `data.length=512`.
    A path may start at a step: `steps[0].transfer.tokens` or, where one such step exists, `transfer.tokens`.

    Raises:
        RecipeError: with every problem found, one line each.
    """
    if isinstance(recipe, Mapping):
        return Recipe.from_dict(_overridden(recipe, overrides or {}, "recipe"))
    path = recipe_path(recipe)
    text = path.read_text("utf-8")
    try:
        raw = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        where = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RecipeError(str(path), [f"is not YAML: {error.problem}{where}"]) from None
    read = Recipe.from_dict(_overridden(raw, overrides or {}, str(path)), source=str(path))
    read._name = path.stem
    read._header = _read_header(text)
    return read


def _shipped_folder() -> Path:
    """`shipped` beside this file in an installed wheel, `recipes` at the root of a checkout."""
    installed = Path(__file__).parent / "shipped"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "recipes"


def _read_header(text: str) -> Header:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    if not lines:
        return Header()
    command, _, cost = lines[0].partition("  ")
    return Header(command, cost.strip(), lines[1] if len(lines) > 1 else "", " ".join(lines[2:]))


def _overridden(raw: Any, overrides: Mapping[str, Any] | Sequence[str], source: str) -> Any:
    if not overrides or not isinstance(raw, Mapping):
        return raw
    pairs = (
        overrides.items() if isinstance(overrides, Mapping) else [_parse_override(text) for text in overrides]
    )
    changed = copy.deepcopy(raw)
    problems = []
    for path, value in pairs:
        try:
            _assign(changed, path, value)
        except ValueError as error:
            problems.append(f"override {path}: {error}")
    if problems:
        raise RecipeError(source, problems)
    return changed


def _parse_override(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ValueError(f"override is {text!r}; write PATH=VALUE, such as data.length=512")
    try:
        return path.strip(), yaml.load(value, Loader=_Loader)
    except yaml.YAMLError as error:
        why = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(
            f"override {path.strip()}: {value!r} is not YAML ({why}); quote what is a text"
        ) from None


def _assign(raw: Any, path: str, value: Any) -> None:
    *parents, last = _parts(raw, path)
    here = raw
    for part in parents:
        if isinstance(here, dict) and here.get(part) is None:
            here[part] = {}
        here = here[_key(here, part)]
    here[_key(here, last)] = value


def _parts(raw: Any, path: str) -> list[str]:
    parts = re.findall(r"[^.\[\]]+", path)
    if not parts:
        raise ValueError("the path is empty")
    if parts[0] in KINDS:
        return ["steps", str(_only_step(raw, parts[0])), *parts]
    return parts


def _key(here: Any, part: str) -> str | int:
    if isinstance(here, dict):
        return part
    if not isinstance(here, list):
        raise ValueError(f"{part!r} lies below a plain value")
    if not part.isdigit() or int(part) >= len(here):
        raise ValueError(f"{part!r} is not an index of a list of {len(here)}")
    return int(part)


def _only_step(raw: Any, kind: str) -> int:
    steps = raw.get("steps")
    found = [
        i
        for i, step in enumerate(steps if isinstance(steps, list) else [])
        if isinstance(step, dict) and kind in step
    ]
    if len(found) != 1:
        raise ValueError(f"the recipe has {len(found)} {kind} steps; name one as steps[0].{kind}")
    return found[0]


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values (`on` is a word, `1e-2` a number); keys are texts, and none occurs twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} occurs twice", key_node.start_mark
                )
            seen.add(key)
            key_node.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"(?:~|null|)", ["~", "n", ""]),
    ("bool", r"(?:true|false)", list("tf")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^{_pattern}$"), _first)
