"""Finds what a person names: package.module:attribute, path/flow.py[:attribute], inputs, limits."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import tomllib
import traceback
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dagresume.cli.command import Here, Problem
from dagresume.errors import DagresumeError
from dagresume.policy import Limit
from dagresume.workflow import Workflow

__all__ = ["apps", "here_of", "inputs_of", "limits_of", "one_workflow", "workflows"]


_OF_PYTHON = sys.stdlib_module_names - {"test"}  # which nothing imports


def one_workflow(target: str) -> Workflow:
    """Give the one workflow that a target means, or a Problem that lists what there is."""
    named = _named(target)
    if len(named) > 1:  # what is a node of another one is not what is meant
        inside = {id(node.workflow) for wf in named.values() for node in wf.nodes.values()}
        named = {name: wf for name, wf in named.items() if id(wf) not in inside} or named
    if len(named) == 1:
        return next(iter(named.values()))
    place, _ = _split(target)
    if not named:
        raise Problem(f"{place} holds no Workflow. Make one in it: wf = Workflow('name').")
    listed = ", ".join(f"{place}:{name}" for name in named)
    raise Problem(f"{place} holds {len(named)} workflows. Name one of them: {listed}")


def workflows(targets: Iterable[str]) -> list[Workflow]:
    """Give all workflows of these targets; one that stands in several of them is given once."""
    found: dict[int, Workflow] = {}
    for target in targets:
        named = _named(target)
        if not named:
            raise Problem(f"{_split(target)[0]} holds no Workflow (it was named as an app).")
        found |= {id(wf): wf for wf in named.values()}
    return list(found.values())


def _named(target: str) -> dict[str, Workflow]:
    place, attribute = _split(target)
    module = _load(place)
    if not attribute:
        named = {id(v): (k, v) for k, v in reversed(vars(module).items()) if isinstance(v, Workflow)}
        return dict(reversed(named.values()))
    value: Any = module
    for name in attribute.split("."):
        value = getattr(value, name, None)
    if not isinstance(value, Workflow):
        there = ", ".join(name for name, v in vars(module).items() if isinstance(v, Workflow))
        what = "has no" if value is None else f"holds {type(value).__name__}, not a Workflow, under"
        raise Problem(f"{place} {what} {attribute!r}. Workflows in it: {there or 'none'}")
    return {attribute: value}


def _split(target: str) -> tuple[str, str]:
    """Split a target into its place and its attribute ("" if there is none)."""
    place, colon, attribute = target.rpartition(":")
    if colon and place and attribute.replace(".", "").isidentifier():
        return place, attribute
    return target.removesuffix(":"), ""


# -- importing ------------------------------------------------------------------------------------------


def _load(place: str) -> types.ModuleType:
    path = Path(place)
    if place.endswith(".py") or "/" in place or os.sep in place or path.is_file():
        return _load_file(path)
    return _load_module(place)


def _load_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise Problem(f"there is no file {path} (seen from {Path.cwd()})")
    if path.suffix != ".py":
        raise Problem(f"{path} is not a Python file; a workflow is path/flow.py or package.module:attribute")
    shown, path = str(path), path.resolve()
    root, name = path.parent, path.stem
    while (root / "__init__.py").exists():  # inside a package: imported as the part of it that it is
        name, root = f"{root.name}.{name}", root.parent
    name = name.removesuffix(".__init__")
    if name in _OF_PYTHON:
        raise Problem(f"{shown} has the name of a module of Python itself. Give the file another name.")
    known = sys.modules.get(name)
    if known is not None:
        if Path(getattr(known, "__file__", None) or ".").resolve() == path:
            return known
        raise Problem(f"{path.name}: a module called {name!r} is loaded already. Give the file another name.")
    _put_on_path(root)
    if "." in name and root != path.parent:
        return _guarded(shown, lambda: importlib.import_module(name))
    return _guarded(shown, lambda: _execute(name.replace(".", "_"), path))


def _execute(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> types.ModuleType:
    _put_on_path(Path.cwd())
    if not all(part.isidentifier() for part in name.split(".")):
        raise Problem(f"{name!r} names no module: write package.module:attribute or path/flow.py")
    return _guarded(name, lambda: importlib.import_module(name))


def _put_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _guarded(place: str, load: typing.Callable[[], types.ModuleType]) -> types.ModuleType:
    """Import what a person named; what goes wrong in it is told in one line with its place."""
    try:
        return load()
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            file = Path(f"{place.replace('.', '/')}.py")
            hint = f" Did you mean {file}?" if file.is_file() else ""
            raise Problem(f"there is no module {error.name!r} (looked for {place}).{hint}") from None
        _told(place, error)
    except DagresumeError as error:
        raise Problem(f"{place}: {error}") from error
    except Exception as error:
        _told(place, error)


def _told(place: str, error: Exception) -> NoReturn:
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}:{error.lineno}"
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}:{frame.lineno}"
    if Path(where).is_relative_to(Path.cwd()):
        where = str(Path(where).relative_to(Path.cwd()))
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    raise Problem(f"{place} cannot be imported: {type(error).__name__}: {text} ({where})") from error


# -- the apps of stored runs ----------------------------------------------------------------------------


def apps(given: Sequence[str] | None) -> list[str]:
    """Give the targets that stored runs may mean: --app, else DAGRESUME_APP, else those of pyproject.toml."""
    if given:
        return list(given)
    variable = os.environ.get("DAGRESUME_APP", "").strip()
    return _separate(variable) if variable else _of_project(Path("pyproject.toml"))


def here_of(db: str) -> Here:
    """Give what the commands that are named must be told: where the code is, unless it is known."""
    try:
        known = bool(apps(None))
    except Problem:
        known = False
    return Here(db, () if known else ("TARGET",))


def _separate(text: str) -> list[str]:
    """Split at commas and path separators. Where that is the colon, a bare name behind it is an attribute."""
    found: list[str] = []
    for part in text.split(","):
        open_target = False
        for word in part.split(os.pathsep):
            if open_target and word.isidentifier() and ":" not in found[-1]:
                found[-1] += f":{word}"
            elif word.strip():
                found.append(word.strip())
            open_target = os.pathsep == ":" and bool(found)
    return found


def _of_project(file: Path) -> list[str]:
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise Problem(f"{file} cannot be read: {error}") from error
    section = project.get("tool", {}).get("dagresume", {})
    named = section.get("apps", []) if isinstance(section, dict) else None
    if not isinstance(named, list) or not all(isinstance(target, str) for target in named):
        raise Problem(
            f"{file}: apps in [tool.dagresume] is a list of targets, like ['package.module:attribute']"
        )
    return named


# -- inputs and limits ----------------------------------------------------------------------------------


def inputs_of(wf: Workflow, given: Sequence[str], file: Path | None) -> dict[str, Any]:
    """Give the run inputs: the file, over it `name=value` pairs, which are JSON unless their type is text."""
    inputs = {} if file is None else _read(file)
    for pair in given:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise Problem(f"--input {pair!r}: write name=value")
        inputs[name] = _value(text, wf.inputs.get(name))
    return inputs


def _read(file: Path) -> dict[str, Any]:
    try:
        inputs = _json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise Problem(f"--inputs {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise Problem(f"--inputs {file} is not JSON: {error}") from error
    if not isinstance(inputs, dict):
        raise Problem(
            f"--inputs {file} holds {type(inputs).__name__}; it must be an object of names and values"
        )
    return inputs


def _value(text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) if typing.get_origin(hint) in {typing.Union, types.UnionType} else (hint,)
    if types.NoneType in kinds and text == "null":
        return None
    if str in kinds:
        return text
    if any(isinstance(kind, type) and issubclass(kind, Path) for kind in kinds):
        return Path(text)
    try:
        return _json(text)
    except ValueError:
        return text


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def limits_of(given: Sequence[str] | None) -> dict[str, Limit]:
    """Give the limits of `name=8` and `name=500/minute`; one name may have one of each."""
    found: dict[str, Limit] = {}
    for pair in given or ():
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not name or not text:
            raise Problem(f"--limit {pair!r}: write name=8 or name=500/minute")
        before = found.get(name, Limit())
        try:
            if "/" in text:
                found[name] = Limit(before.concurrency, text)
            else:
                found[name] = Limit(int(text), before.rate)
        except (ValueError, DagresumeError):
            raise Problem(
                f"--limit {pair!r}: {text!r} is no limit. Write a whole number from 1 (at once), or a rate"
                " like 500/minute (second, minute, hour, day)."
            ) from None
    return found
