"""``cookbook check env``: play episodes of an environment with made-up answers, and print what a run relies on."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cookbook.cli.check_loss import report
from cookbook.cli.hydra import bridge
from cookbook.config.nodes import build
from cookbook.run.builder import episode_runner
from cookbook.sampling.environments import EnvironmentConfig
from cookbook.sampling.environments.check import check_environment


def run(target: str, options: Sequence[str], *, table: bool) -> None:
    """Check the environment and print one result per check.

    Raises:
        ConfigError: the environment is unknown, lacks a method, or cannot be constructed with these options.
        CookbookError: a check failed.
    """
    # Also `+options.max_terms=3`, as Hydra adds a key.
    keys = [re.sub(r"^(\+*)(?:env\.)?", r"\1env.", option) for option in options]
    config = bridge.run(
        bridge.ComposeRequest([f"env={target}", *keys]), lambda cfg, _: build(cfg.env, "env", EnvironmentConfig)
    )
    assert isinstance(config, EnvironmentConfig)
    tools = [str(tool["function"]["name"]) for tool in config.contract.tools]
    declared = f"tools: {', '.join(tools)}" if tools else "answers text with text"
    rows = "the data" if config.contract.reads_rows else f"{config.rows:,} numbered rows"
    report("check env", target, f"{target}, played on {rows}", declared, check_environment(config, episode_runner), table=table)
