"""``cookbook fork`` and ``cookbook diff``: a recipe or a loss as a copy of one's own, and what became of it."""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path

from cookbook import paths, typed
from cookbook.cli import conf_files
from cookbook.errors import ConfigError
from cookbook.recipe import NAME
from cookbook.suggest import did_you_mean

CODE = {"recipe": "recipes", "loss": "losses"}  # kind -> the folder of the user's Python file


def fork(kind: str, name: str, new: str) -> str:
    """Writes the two files of a fork into the current folder; returns what to tell the user.

    Raises:
        ConfigError: no such origin, an unfit name, files that are there already, a folder that cannot be written.
    """
    if not NAME.fullmatch(new):
        raise ConfigError(f"fork: {new!r} is no name; use small letters, digits and _, a letter first")
    if any(file.name == new for file in conf_files.options(kind)):
        raise ConfigError(f"fork: there is a {kind} {new!r} already; choose another name")
    files = _copies(kind, name, new)
    _write(files)
    code, conf = map(paths.shown, files)
    example = f"recipe={new}" if kind == "recipe" else f"recipe=... loss={new}"
    return f"wrote {code} and {conf}\ntry: cookbook train {example}"


def diff(kind: str, name: str, *, colour: bool) -> str:
    """What a fork changed in its two files, against what forking its origin would write today.

    Raises:
        ConfigError: there is no such fork.
    """
    if kind == "recipe" and not _conf(kind, name).is_file() and _conf("loss", name).is_file():
        kind = "loss"  # `cookbook diff my_loss` can mean nothing else
    conf = _conf(kind, name)
    if not conf.is_file():
        forks = [path.stem for one in CODE for path in _conf(one, "").parent.glob("*.yaml")]
        hint = did_you_mean(name, forks)
        raise ConfigError(f"diff: there is no {paths.shown(conf)} here; cookbook fork writes one.{hint}")
    forked = conf_files.FORKED.search(conf.read_text(encoding="utf-8"))
    if forked is None:
        raise ConfigError(f"diff: {paths.shown(conf)} has no line '# forked from NAME', so there is nothing to compare")
    origin = forked[1]
    lines: list[str] = []
    for path, before in _copies(kind, origin, name).items():
        after = path.read_text(encoding="utf-8") if path.is_file() else ""
        labels = f"{origin}: {paths.shown(path)}", f"{name}: {paths.shown(path)}"
        lines += difflib.unified_diff(before.splitlines(), after.splitlines(), *labels, lineterm="")
    if not lines:
        return f"{name} is the same as {origin}\n"
    return "".join(f"{_coloured(line) if colour else line}\n" for line in lines)


def _conf(kind: str, name: str) -> Path:
    return paths.user("conf") / kind / f"{name}.yaml"


def _copies(kind: str, name: str, new: str) -> dict[Path, str]:
    """The texts of a fork by path, code first."""
    conf = conf_files.find(kind, name)
    # Behind the comments at the top: Hydra wants its '# @package' first.
    text = re.sub(r"\A((?:#.*\n)*)", rf"\g<1># forked from {name}\n", conf_files.FORKED.sub("", conf.text()))
    if kind == "recipe":
        code, text = _recipe(name, new, text)
    else:
        code, text = _loss(conf, new, text)
    return {
        paths.user(CODE[kind]) / f"{new}.py": code,
        _conf(kind, new): text,
    }


def _recipe(name: str, new: str, conf: str) -> tuple[str, str]:
    path = paths.find("recipes", f"{name}.py")
    if path is None:
        raise ConfigError(f"fork: conf/recipe/{name}.yaml has no recipes/{name}.py beside it")
    code = path.read_text(encoding="utf-8")
    code = code.replace(f"conf/recipe/{name}.yaml", f"conf/recipe/{new}.yaml")
    code = code.replace(f'name: str = "{name}"', f'name: str = "{new}"')
    conf = conf.replace(f"recipes/{name}.py", f"recipes/{new}.py")
    conf, count = re.subn(r"(?m)^(recipe:.*\n(?:[ \t].*\n)*?[ \t]+name:[ \t]*)[\w'\"]+", rf"\g<1>{new}", conf)
    if not count:
        raise ConfigError(f"fork: conf/recipe/{name}.yaml sets no recipe.name")
    return code, conf


def _loss(conf: conf_files.ConfFile, new: str, text: str) -> tuple[str, str]:
    target = conf_files.values(conf).get(typed.TARGET)
    cls = typed.resolve_target(target, f"{paths.shown(conf.path)}: {typed.TARGET}")
    code = _renamed(Path(inspect.getsourcefile(cls) or ""), cls.__name__, new)
    line = f"{typed.TARGET}: losses.{new}.{cls.__name__}"
    text, count = re.subn(rf"(?m)^{typed.TARGET}:.*$", line, text)
    # A preset names its class through its defaults; the fork's own line comes after them and wins.
    return code, text if count else f"{text.rstrip()}\n{line}\n"


def _renamed(path: Path, cls: str, new: str) -> str:
    """The source with the loss's ``name`` changed in the class ``cls``, and nowhere else."""
    code = path.read_text(encoding="utf-8")
    classes = [node for node in ast.parse(code).body if isinstance(node, ast.ClassDef) and node.name == cls]
    lines = code.splitlines(keepends=True)
    for node in (statement for found in classes for statement in found.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "name":
            lines[node.lineno - 1] = re.sub(r"=.*", f'= "{new}"', lines[node.lineno - 1])
    return "".join(lines)


def _write(files: Mapping[Path, str]) -> None:
    """All files or none. A file appears whole or not at all, and none is overwritten."""
    for path in files:
        if path.exists():
            raise ConfigError(f"fork: {paths.shown(path)} is there already; choose another name, or remove it")
    parts = {path.with_name(f".{path.name}.part"): path for path in files}
    try:
        for part, path in parts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(files[path], encoding="utf-8")
        for part, path in parts.items():
            part.replace(path)
    except OSError as error:
        for unwanted in (*parts, *files):
            with contextlib.suppress(OSError):
                unwanted.unlink()
        raise ConfigError(f"fork: cannot write {paths.shown(path)}: {error.strerror}") from error


def _coloured(line: str) -> str:
    codes = {"+": "32", "-": "31", "@": "36"}
    return f"\033[{codes[line[0]]}m{line}\033[0m" if line[:1] in codes else line
