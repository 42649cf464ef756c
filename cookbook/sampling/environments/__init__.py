"""Environments: games and tasks in which the model acts over several turns, with tools or with text."""

from cookbook.sampling.environments.agent import AgentEnvironment
from cookbook.sampling.environments.config import EnvironmentConfig, PythonEnvironment
from cookbook.sampling.environments.games import TextArena
from cookbook.sampling.environments.ready import Arithmetic, ReasoningGym
from cookbook.sampling.environments.runner import EnvironmentRunner, EpisodeRunner, numbered_rows, prompts

__all__ = [
    "AgentEnvironment",
    "Arithmetic",
    "EnvironmentConfig",
    "EnvironmentRunner",
    "EpisodeRunner",
    "PythonEnvironment",
    "ReasoningGym",
    "TextArena",
    "numbered_rows",
    "prompts",
]
