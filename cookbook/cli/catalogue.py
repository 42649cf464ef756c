"""Recipes and files of ``conf/``, of the user and packaged: ``cookbook list``, ``fork``, ``diff``, and models by name."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cookbook.cli.hydra import conf_files
from cookbook.cli.hydra.shorthand import SHIPPED, WITHOUT_OWNER
from cookbook.config import recipe, typed
from cookbook.errors import ConfigError
from cookbook.utils import files, paths, tables
from cookbook.utils.suggest import did_you_mean

# Kind of the list -> its group in conf/.
GROUPS = {"models": "model", "data": "data", "rewards": "reward", "envs": "env", "experiments": "experiment"}
# Kinds that `cookbook list` prints without a word.
USUAL = ("recipes", "losses", "models", "data", "rewards", "envs")
# Kind of a fork -> the folder of the user's Python file.
CODE = {"recipe": "recipes", "loss": "losses"}
# Modules of the packaged losses, and their folder.
PACKAGE = "cookbook.losses."
LOSSES = Path(__file__).parent.parent / "losses"


def print_list(kind: str, *, table: bool) -> None:
    """Print one kind, or ``all``: as tables on a terminal, as aligned text anywhere else."""
    for group in USUAL if kind == "all" else (kind,):
        head, rows = _rows(group)
        tables.show(group, head, rows, table=table)


def _rows(kind: str) -> tuple[Sequence[str], list[Sequence[str]]]:
    if kind == "recipes":
        return ("recipe", "from", "description"), [(info.name, info.origin, info.summary) for info in recipe.available()]
    if kind == "losses":
        head = ("loss", "from", "returns", "divided by", "description")
        return head, [_loss_row(file) for file in conf_files.options("loss")]
    group = GROUPS[kind]
    return (group, "from", "description"), [(file.name, file.origin, file.summary()) for file in conf_files.options(group)]


def _loss_row(file: conf_files.ConfFile) -> Sequence[str]:
    """Return a row of the table. The class states what the loss returns; the file chooses the divisor of the gradient."""
    try:
        values = conf_files.values(file)
        target = values.get(typed.TARGET)
        read = _packaged_class(target) if isinstance(target, str) else None
        cls = typed.resolve_target(target) if read is None else None
    except ConfigError as error:
        return file.name, file.origin, "?", "?", f"unusable: {error}"
    reduction = getattr(cls, "reduction", "?") if read is None else read.get("reduction", "?")
    default = getattr(cls, "normalization", None) if read is None else read.get("normalization")
    normalization = values.get("normalization", default)
    return file.name, file.origin, str(reduction).replace("_", " "), str(normalization or "nothing"), file.summary()


@functools.cache
def _packaged_class(target: str) -> Mapping[str, str | None] | None:
    """Return the attributes of a packaged loss, its bases' included: ``mean`` for ``Reduction.mean``, None for other values.

    Return None if ``target`` names another class. The source is read, because the import of a loss imports torch, which takes
    over a second. A user's loss is imported: only the import shows that the loss works.
    """
    module, _, name = target.replace(":", ".").rpartition(".")
    path = LOSSES / f"{module.removeprefix(PACKAGE)}.py"
    if not module.startswith(PACKAGE) or not path.is_file():
        return None
    body = ast.parse(path.read_bytes()).body
    cls = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if cls is None:
        return None
    modules = {alias.name: node.module for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    attributes: dict[str, str | None] = {}
    for base in map(ast.unparse, reversed(cls.bases)):
        attributes |= _packaged_class(f"{modules.get(base, module)}.{base}") or {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            attributes[ast.unparse(node.target)] = node.value.attr if isinstance(node.value, ast.Attribute) else None
    return attributes


def resolve(name: str, command: str = "sample") -> str:
    """Return the folder or hub id to sample from. ``command`` begins the error.

    Raises:
        ConfigError: no folder and no model has this name; the error suggests the nearest run or model. The hub is not
            queried, because that takes a minute without a network.
    """
    is_step = paths.is_run(Path(name.rpartition("@")[0])) if "@" in name else False
    if Path(name).exists() or is_step or name in WITHOUT_OWNER or _is_cached(name):
        return name
    named = [file for file in conf_files.options("model") if file.name == name]
    # Only the file of this name is read: it takes a fifth of a second to read all of them.
    if named and (weights := _weights(named[0])):
        return weights
    if "/" in name and not Path(name).parent.is_dir():
        # A model of the hub. If the name is a mistyped path, the loader reports it.
        return name
    raise ConfigError(
        f"{command}: no folder and no model is called {name!r}; give a run's folder, a checkpoint, a model of "
        f"`cookbook list models`, or a hub id as owner/name.{_hint(name)}"
    )


def _hint(name: str) -> str:
    """Return the nearest run or model; a run is also found without its folder."""
    models = [file.name for file in conf_files.options("model") if _weights(file)]
    folder = Path(name).parent if "/" in name else Path("runs")
    runs = {path.name: str(path) for path in folder.glob("*") if path.is_dir()}
    last = Path(name).name
    near = f" Did you mean {last!r}?" if last in runs else did_you_mean(last, [*runs, *models])
    for run, path in runs.items():
        near = near.replace(repr(run), repr(path))
    return near


def _weights(file: conf_files.ConfFile) -> str | None:
    """Return the name or folder of a model of ``conf/model``; None if the model has no weights to sample from."""
    node = conf_files.values(file)
    name = str(node["name"])
    return None if node.get("random") or name == typed.MISSING else name.replace(SHIPPED, str(paths.packaged("data")))


def _is_cached(name: str) -> bool:
    """Whether the cache of the hub's client has a model of that name."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or Path(home) / "hub"
    return (Path(cache) / f"models--{name}").is_dir()


def fork(kind: str, name: str, new: str) -> str:
    """Write the two files of a fork into the current folder; return a message for the user.

    Raises:
        ConfigError: the origin is unknown, the name is invalid, a file already exists, or the folder cannot be written.
    """
    if not recipe.NAME.fullmatch(new):
        raise ConfigError(f"fork: invalid name {new!r}; use lowercase letters, digits and _, starting with a letter")
    if any(file.name == new for file in conf_files.options(kind)):
        raise ConfigError(f"fork: a {kind} {new!r} already exists; choose another name")
    copies = _copies(kind, name, new)
    _write(copies)
    code, conf = map(paths.shown, copies)
    example = f"recipe={new}" if kind == "recipe" else f"recipe=... loss={new}"
    return f"wrote {code} and {conf}\ntry: cookbook train {example}"


def diff(kind: str, name: str, *, color: bool) -> str:
    """Return the differences between a fork's two files and a fresh fork of its origin.

    Raises:
        ConfigError: the fork is unknown.
    """
    if kind == "recipe" and not _conf(kind, name).is_file() and _conf("loss", name).is_file():
        kind = "loss"  # `cookbook diff my_loss` can mean nothing else
    conf = _conf(kind, name)
    if not conf.is_file():
        forks = [path.stem for folder in CODE for path in _conf(folder, "").parent.glob("*.yaml")]
        hint = did_you_mean(name, forks)
        raise ConfigError(f"diff: {paths.shown(conf)} not found; cookbook fork writes it.{hint}")
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
    return "".join(f"{_colored(line) if color else line}\n" for line in lines)


def _conf(kind: str, name: str) -> Path:
    return paths.user("conf") / kind / f"{name}.yaml"


def _copies(kind: str, name: str, new: str) -> dict[Path, str]:
    """Return the texts of a fork by path, the code first."""
    conf = conf_files.find(kind, name)
    # After the comments at the top, one of which is Hydra's '# @package'.
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
        raise ConfigError(f"fork: conf/recipe/{name}.yaml has no recipes/{name}.py next to it")
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
    """Return the source with the loss's ``name`` changed in the class ``cls``, and nowhere else."""
    code = path.read_text(encoding="utf-8")
    classes = [node for node in ast.parse(code).body if isinstance(node, ast.ClassDef) and node.name == cls]
    lines = code.splitlines(keepends=True)
    for node in (statement for definition in classes for statement in definition.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "name":
            lines[node.lineno - 1] = re.sub(r"=.*", f'= "{new}"', lines[node.lineno - 1])
    return "".join(lines)


def _write(texts: Mapping[Path, str]) -> None:
    """Write all files or none. A file appears whole or not at all, and no file is overwritten."""
    for path in texts:
        if path.exists():
            raise ConfigError(f"fork: {paths.shown(path)} already exists; choose another name, or remove it")
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_text(path, text)
    except OSError as error:
        for unwanted in texts:
            with contextlib.suppress(OSError):
                unwanted.unlink()
        raise ConfigError(
            f"fork: cannot write {paths.shown(path)}: {error.strerror}; run the command in a writable folder"
        ) from error


def _colored(line: str) -> str:
    codes = {"+": "32", "-": "31", "@": "36"}
    return f"\033[{codes[line[0]]}m{line}\033[0m" if line[:1] in codes else line
