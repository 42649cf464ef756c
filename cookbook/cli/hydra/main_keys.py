"""The keys that people change: ``cookbook init`` writes them to a file, and ``--cfg job`` shows them on a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from cookbook.cli.hydra import bridge, conf_files, own_file, shorthand
from cookbook.config import recipe as recipes
from cookbook.config.typed import TARGET
from cookbook.errors import ConfigError
from cookbook.utils import files, paths

# A group stands for all its keys. Those that a recipe's configuration lacks are left out.
MAIN = (
    "recipe", "model.name", "model.lora_rank", "model.dtype", "data.path", "data.name", "data.eval_path", "data.eval_fraction",
    "data.limit", "data.max_length", "loss.beta", "loss.variant", "loss.clip_low", "loss.clip_high", "loss.kl_beta",
    "loss.normalization", "optim.lr", "optim.weight_decay", "optim.grad_clip_norm", "schedule", "rollout.max_tokens",
    "rollout.temperature", "eval.every", "eval.limit", "eval.max_tokens", "checkpoint.every", "checkpoint.keep", "tracker",
    "seed", "out",
)  # fmt: skip
# Keys of rollouts, which only recipes that sample have a use for.
SAMPLING = ("rollout", "reward")
# Groups of which a file names a preset; comments of `cookbook init`.
CHOICES = {
    "model": "a hub id (owner/name), a folder (./my-model), a run (runs/mine), or a preset of: cookbook list models",
    "data": "a file (rows.jsonl), a folder, a dataset of the hub (owner/name), or a preset of: cookbook list data",
    "reward": "a preset of: cookbook list rewards; or your function: my_file.py:my_function",
}
WIDTH = 128
KEY_WIDTH = 32


def folded(text: str) -> str:
    """Return the YAML of a configuration with the keys of ``MAIN`` alone, and the number of the others."""
    cfg = _created(text)
    lines: list[str] = []
    num_shown = 0
    groups = [str(group) for group in cfg]
    for group in groups:
        node = cfg._get_node(group)
        keys = [key for key in _leaves(cfg, group) if _is_main(key, cfg)]
        num_shown += len(keys)
        if not isinstance(node, DictConfig) or keys == [group]:
            lines += [f"{group}: {_yaml(cfg, group)}"] * bool(keys)
            continue
        if keys:
            lines.append(f"{group}:")
            lines += [f"  {key.partition('.')[2]}: {_yaml(cfg, key)}" for key in keys]
    total = sum(len(list(_leaves(cfg, group))) for group in groups)
    return "\n".join(lines) + f"\n# {total - num_shown} more keys: add --all\n"


def _created(text: str) -> DictConfig:
    cfg = OmegaConf.create(text)
    assert isinstance(cfg, DictConfig)
    return cfg


def _is_main(key: str, cfg: DictConfig) -> bool:
    group, _, name = key.partition(".")
    if name == TARGET or (group in SAMPLING and not cfg.get("reward") and not cfg.get("env")):
        return False
    if group in ("model", "data") and name in ("name", "path", "eval_path") and OmegaConf.select(cfg, key) is None:
        return name == "eval_path"
    return group in MAIN or key in MAIN


def _leaves(cfg: DictConfig, group: str) -> Iterator[str]:
    """Yield the dotted keys of a group, a level deep; the group itself if it has no keys."""
    node = cfg._get_node(group)
    if isinstance(node, DictConfig) and not node._is_none() and len(node):
        yield from (f"{group}.{key!s}" for key in node)
    else:
        yield group


def _yaml(cfg: DictConfig, key: str) -> str:
    """Return the value of a key as YAML on one line."""
    group, _, name = key.partition(".")
    node = cfg._get_node(group) if name else cfg
    raw = OmegaConf.to_container(node, resolve=False)
    return _flow(raw[name or group])  # type: ignore[call-overload,index]


def _flow(value: object) -> str:
    if isinstance(value, dict | list):
        import yaml  # type: ignore[import-untyped]

        return str(yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)).strip()
    return OmegaConf.to_yaml({"x": value}).removeprefix("x: ").strip()


def init(recipe: str | None, words: Sequence[str]) -> str:
    """Write a commented file for the recipe. Return what to do next.

    Raises:
        ConfigError: an unknown recipe or key, or the file exists.
    """
    names = [info.name for info in recipes.available()]
    if recipe is None:
        raise ConfigError(f"init: name a recipe: cookbook init {names[-1]} (choices: {', '.join(names)})")
    named = [word for word in words if own_file.is_file(word)]
    typed = [word for word in words if not own_file.is_file(word)]
    if len(named) > 1:
        raise ConfigError(f"init: writes one file, got {', '.join(named)}; call it once for each")
    path = Path(named[0] if named else f"{recipe}.yaml")
    if path.exists():
        raise ConfigError(f"init: {path} exists; name another file: cookbook init {recipe} OTHER.yaml")
    text = content(recipe, typed, str(path))
    try:
        files.write_text(path, text)
    except OSError as error:
        raise ConfigError(f"init: cannot write {path}: {error.strerror}; name a file in a writable folder") from None
    return f"wrote {path}\nnext: edit its model and data, then: cookbook train {shlex.quote(str(path))}"


def content(recipe: str, typed: Sequence[str], name: str) -> str:
    """Return the text of the file: the recipe, its model and data, and its other main keys as comments with their defaults."""
    own = {override.key_or_group: own_file.plain_value(override.value()) for override in _parsed(recipe, typed)}
    if "recipe" in own:
        raise ConfigError(f"init: recipe is {recipe} already; drop recipe={own['recipe']}")
    # Composing refuses unknown keys. The defaults are those of any model and data, without the values of the demo.
    shipped = OmegaConf.create(bridge.show(bridge.ComposeRequest([f"recipe={recipe}"]), "all"))
    presets = dict(shipped.hydra.runtime.choices)
    # The shipped model, rather than a demo that begins with fresh weights.
    chosen = {"recipe": recipe, "model": "tiny", "data": presets["data"]}
    groups = [group for group in ("reward",) if presets.get(group) not in (None, "none")]
    chosen |= {group: presets[group] for group in groups}
    chosen |= own
    lines = _head(recipe, name)
    lines += [_line(key, _flow(value), CHOICES.get(key, "")) for key, value in chosen.items()]
    lines += [
        "",
        "# Defaults for your own model and data; the shipped ones have theirs. Remove the # before a key to change it.",
    ]
    overrides = [f"recipe={recipe}", "demo=none", *(word for word in typed if word.partition("=")[0] not in ("model", "data"))]
    cfg = _created(bridge.show(bridge.ComposeRequest([*overrides, "model=hf", "data=jsonl"]), "job"))
    choices = {**presets, "model": "hf", "data": "jsonl", **{key: str(value) for key, value in own.items()}}
    for group in dict.fromkeys(key.partition(".")[0] for key in MAIN):
        keys = [key for key in _leaves(cfg, group) if _is_main(key, cfg) and key not in chosen and key != "recipe.name"]
        texts = _comments(group, choices.get(group), recipe)
        keys = [key for key in keys if key not in ("model.name", "data.path", "data.name", "loss")]
        texts["tracker"] = "wandb, tensorboard, trackio or mlflow"
        lines += [_line(f"# {key}", _resolved(cfg, key), texts.get(key, "")) for key in keys]
    return "\n".join(lines) + "\n"


def _parsed(recipe: str, typed: Sequence[str]) -> list[Override]:
    """Return the overrides. Raises ConfigError: the text of one is not valid."""
    try:
        return list(OverridesParser.create().parse_overrides([shorthand.quoted(word) for word in typed]))
    except HydraException:
        # Composing the same words gives the one-line error of cookbook train.
        bridge.show(bridge.ComposeRequest([f"recipe={recipe}", *typed]), "job")
        raise


def _head(recipe: str, name: str) -> list[str]:
    summary = conf_files.find("recipe", recipe).summary().partition("  recipes/")[0]
    file = shlex.quote(name)
    return [
        f"# {summary}",
        f"#   cookbook train {file}                   train; a key after the file overrides it: seed=1",
        f"#   cookbook check config {file}            what the run would do; cookbook plan {file}: its memory",
        f"#   cookbook train {file} --cfg job --all   every key; each may be added here",
        "",
    ]


def _line(key: str, value: str, comment: str) -> str:
    text = f"{key}: {value}"
    if not comment:
        return text
    line = f"{text:<{KEY_WIDTH}}  # {comment}"
    return line if len(line) <= WIDTH else f"# {comment}\n{text}" if not key.startswith("#") else f"#   {comment}\n{text}"


def _resolved(cfg: DictConfig, key: str) -> str:
    value = OmegaConf.select(cfg, key)
    if OmegaConf.is_config(value) and not value:
        return "none"
    return _flow(OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)


def _comments(group: str, preset: str | None, recipe: str) -> dict[str, str]:
    """Return the comments of a group's keys: those of the recipe's file, else those of the preset."""
    texts = conf_files.comments(conf_files.ConfFile("", "train", paths.packaged("conf") / "train.yaml"))
    if preset is not None and any(file.name == preset for file in conf_files.options(group)):
        texts |= {f"{group}.{key}": text for key, text in conf_files.comments(conf_files.find(group, preset)).items()}
    return texts | conf_files.comments(conf_files.find("recipe", recipe))
