"""conf/ restates the defaults of the classes its files name, in files one can read at a glance."""

import dataclasses
import re
from functools import cache

import pytest
from omegaconf import OmegaConf

from cookbook.cli.hydra import conf_files
from cookbook.cli.hydra.bridge import ComposeRequest, complete, show
from cookbook.config import recipe, typed
from cookbook.config.nodes import build
from cookbook.errors import ConfigError
from cookbook.utils import paths

CONF = paths.packaged("conf")
FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
GLOBAL = ("recipe", "demo", "debug", "experiment")  # their files begin with '# @package _global_'
IDS = [str(path.with_suffix("")) for path in FILES]

# Keys that need no comment: their name is well known, or says the whole meaning.
OBVIOUS = {"_target_", "defaults", "lr", "beta1", "beta2", "eps", "lora_dropout", "temperature", "project", "tags"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a ./conf of the place the tests run in must not matter


@cache
def composed(*overrides: str) -> dict:
    return OmegaConf.to_container(OmegaConf.create(show(ComposeRequest(overrides), "job", resolve=True)))


def choices(path) -> list[str]:
    """The overrides that choose a file. Where groups are independent, one configuration shows the n-th file of each."""
    if path.parts[0] == "demo":
        return [f"recipe={path.parts[1]}"]
    if path.parts[0] in GLOBAL or len(path.parts) == 1:
        return [f"{path.parts[0]}={path.stem}"] if len(path.parts) > 1 else []
    groups: dict[str, list] = {}
    for typed_file in TYPED:
        groups.setdefault(typed_file.parts[0], []).append(typed_file.stem)
    rank = groups[path.parts[0]].index(path.stem)
    return [f"{group}={names[rank]}" for group, names in groups.items() if rank < len(names)]


def nodes(path):
    """(path in the configuration, node) of every typed node a file makes, by itself: a recipe may deviate from it."""
    group, name = path.parts[0], path.stem
    node = conf_files.values(conf_files.find(group, name))
    if typed.TARGET in node:
        return [(group, node)]
    return [(f"{group}.{key}", value) for key, value in node.items()]


def one_of_each_group_fast() -> list:
    """Return the files; all but the first of each group are slow tests."""
    first = {path.parts[0]: path for path in reversed(FILES)}
    return [path if path == first[path.parts[0]] else pytest.param(path, marks=pytest.mark.slow) for path in FILES]


TYPED = [path for path in FILES if len(path.parts) > 1 and path.parts[0] not in GLOBAL]


@pytest.mark.parametrize("path", one_of_each_group_fast(), ids=IDS)
def test_every_file_composes(path):
    assert composed(*choices(path))


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_a_file_is_short_and_begins_with_a_description(path):
    lines = (CONF / path).read_text().splitlines()
    assert len(lines) <= 60
    first = lines[1] if lines[0] == "# @package _global_" else lines[0]
    assert re.match(r"# \w", first), "the first comment is what `cookbook list` shows"
    assert lines[0] == "# @package _global_" or path.parts[0] not in GLOBAL
    assert max(map(len, lines)) <= 140


@pytest.mark.parametrize("path", TYPED, ids=[str(path.with_suffix("")) for path in TYPED])
def test_a_file_has_exactly_the_keys_of_its_class(path):
    for where, node in nodes(path):
        cls = typed.resolve_target(node[typed.TARGET], where)
        assert dataclasses.is_dataclass(cls), f"{cls.__name__} must be a dataclass: conf restates its defaults"
        fields = {field.name for field in dataclasses.fields(cls) if field.init}
        assert set(node) - {typed.TARGET} == fields
        # A file that waits for a value, or for the rewards of a sum, cannot be built alone.
        if typed.MISSING not in node.values() and path.stem != "weighted":
            whole = OmegaConf.create(composed(*choices(path)))
            build(OmegaConf.select(whole, where), where)


def different(node, cls) -> list[str]:
    """Return the keys with a value other than the class's default; keys without a default are ignored."""
    defaults = {
        field.name: field.default_factory() if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(cls)
        if field.init and {field.default, field.default_factory} != {dataclasses.MISSING}
    }
    # A key that follows one of another group has the class's default without that group.
    followed = {key: None for key in defaults if str(node[key]).startswith("${oc.select:")}
    return [key for key, default in defaults.items() if {**node, **followed}[key] != plain(default)]


def plain(value):
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple) else value


def test_for_every_class_one_file_restates_its_defaults():
    files: dict[type, list] = {}
    for path in TYPED:
        for where, node in nodes(path):
            cls = typed.resolve_target(node[typed.TARGET], where)
            files.setdefault(cls, []).append((different(node, cls), str(path)))
    wrong = {cls.__name__: min(found) for cls, found in files.items() if min(found)[0]}
    assert not wrong, "\n".join(f"{name}: {path} differs in {', '.join(keys)}" for name, (keys, path) in wrong.items())


@pytest.mark.parametrize("name", [path.stem for path in FILES if path.parts[0] == "recipe"])
def test_a_recipe_and_its_file_agree(name):
    node = composed(f"recipe={name}", "demo=none")["recipe"]
    cls = recipe.load(name).Config
    assert set(node) == {field.name for field in dataclasses.fields(cls)}
    assert build(node, "recipe", cls) == cls()


def keys_of(path):
    """Yield (key, whether its line, the line above or the line of its parent key has a comment) for every line."""
    above, parent_told = "", False
    for line in (CONF / path).read_text().splitlines():
        if key := re.match(r"(\s*)([a-z_0-9]+):\s*([^\s#]?)", line):
            told = "#" in line or above.lstrip().startswith("#")
            if not key[3]:
                parent_told = told
            else:
                yield key[2], told or (bool(key[1]) and parent_told)
        above = line


@pytest.mark.parametrize("group", sorted({path.parts[0] for path in FILES}))
def test_every_key_is_obvious_or_explained_in_its_group(group):
    here = [path for path in FILES if path.parts[0] == group]
    explaining = FILES if group in GLOBAL else here  # a recipe's value is explained in the file that it overrides
    explained = {key for path in explaining for key, told in keys_of(path) if told}
    silent = {key for path in here for key, _ in keys_of(path)} - explained - OBVIOUS
    assert not silent, f"conf/{group}: {', '.join(sorted(silent))}: write its meaning or unit in a comment"


@pytest.mark.parametrize("group", ["data", "model"])
def test_a_base_of_presets_is_not_offered(group):
    assert not [file.name for file in conf_files.options(group) if file.name.startswith("_")]
    offered = complete(ComposeRequest(), f"{group}=")
    assert offered and not [word for word in offered if "=_" in word]
    with pytest.raises(ConfigError, match=f"^unknown {group} 'none'") as refused:
        show(ComposeRequest([f"{group}=none"]), "job")
    assert "_base" not in str(refused.value)
