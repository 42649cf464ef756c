"""What can go wrong that the user can mend.

The command prints these as one line and exits with 2. Every other exception is a bug: it keeps its trace and exits with 1.
A message says where, what is wrong, what was found, and what to do: ``datum 3: weights has 12 values and model_input 13;
build both from the same tokens``.
"""


class CookbookError(Exception):
    """Base of every error that has a remedy on the user's side."""


class ConfigError(CookbookError, ValueError):
    """A key, value or combination of the configuration."""


class DataError(CookbookError, ValueError):
    """A row of a dataset, or a datum made from one."""


class BackendError(CookbookError, RuntimeError):
    """The trainer: loading a model, computing, running out of memory."""


class CheckpointError(CookbookError, RuntimeError):
    """Saving, finding or loading a checkpoint."""


class RolloutError(CookbookError, RuntimeError):
    """Sampling from a deployment, or rewarding what was sampled."""
