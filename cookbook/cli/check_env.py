"""``cookbook check env``: play episodes of an environment with made-up answers, and print what a run relies on."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from cookbook.cli.check_loss import report
from cookbook.cli.hydra import bridge
from cookbook.config.nodes import build
from cookbook.data import DataConfig, RejectedRows, Row
from cookbook.data.source import stream_rows
from cookbook.errors import ConfigError
from cookbook.run.builder import episode_runner
from cookbook.sampling.environments import EnvironmentConfig, numbered_rows
from cookbook.sampling.environments.check import ROWS, check_environment
from cookbook.sampling.environments.config import NUMBERED

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Keys of the data, among those of the environment.
DATA = re.compile(r"\+*data[.=]")
MODEL = re.compile(r"\+*model[.=]")


def run(target: str, options: Sequence[str], *, table: bool) -> None:
    """Check the environment and print one result per check.

    Raises:
        ConfigError: the environment is unknown, lacks a method or a column, or cannot be constructed with these options.
        CookbookError: a check failed.
    """
    # Also `+options.max_terms=3`, as Hydra adds a key.
    keys = [option if DATA.match(option) else re.sub(r"^(\+*)(?:env\.)?", r"\1env.", option) for option in options]
    if model := next((option for option in options if MODEL.match(option)), None):
        raise ConfigError(f"check env: {model}: answers are made up and no model is loaded; remove {model}")
    reads_data = any(map(DATA.match, keys))

    def built(cfg: DictConfig, _: object) -> tuple[EnvironmentConfig, list[Row]]:
        config = build(cfg.env, "env", EnvironmentConfig)
        assert isinstance(config, EnvironmentConfig)
        # env=none has no class.
        if type(config) is EnvironmentConfig:
            raise ConfigError(f"check env: {target} is not an environment; name one (cookbook list envs), or FILE.py:CLASS")
        if not (reads_data and config.contract.reads_rows):
            return config, numbered_rows(config, "train", 0, None)[:ROWS]
        data = build(cfg.data, "data", DataConfig)
        assert isinstance(data, DataConfig)
        # The number of rows, which a share depends on, is not counted for three rows.
        data = dataclasses.replace(data, eval_fraction=0.0)
        return config, list(itertools.islice(stream_rows(data, RejectedRows(data)), ROWS))

    config, rows = cast(
        "tuple[EnvironmentConfig, list[Row]]", bridge.run(bridge.ComposeRequest([f"env={target}", *keys]), built)
    )
    contract = config.contract
    if reads_data and not contract.reads_rows:
        raise ConfigError(f"check env: reset of {target} reads no columns, so data= has no effect; remove it")
    if missing := contract.required - NUMBERED - rows[0].values.keys():
        raise ConfigError(
            f"check env: reset of {target} reads the column {', '.join(sorted(missing))}, and {rows[0].where} has "
            f"{', '.join(map(str, rows[0].values))}; add the data of the run, for example data=rows.jsonl"
        )
    tools = [str(tool["function"]["name"]) for tool in contract.tools]
    declared = f"tools: {', '.join(tools)}" if tools else "answers text with text"
    if contract.ignored:
        declared += f"; {', '.join(contract.ignored)} cannot be called as tools, because the class has step"
    played = f"{target}, played on {rows[0].where} and the next rows"
    report("check env", target, played, declared, check_environment(config, rows, episode_runner), table=table)
