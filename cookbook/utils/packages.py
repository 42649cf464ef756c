"""Packages that only an extra installs."""

import importlib.util

from cookbook.errors import ConfigError


def need(where: str, module: str, extra: str, instead: str = "") -> None:
    """Raise ConfigError: ``module``, a package of the extra ``extra``, is not installed. ``where`` names the option."""
    if importlib.util.find_spec(module) is None:
        package = module.replace("_", "-")
        raise ConfigError(f"{where}: {package} is not installed; pip install 'post-training-cookbook[{extra}]'{instead}")
