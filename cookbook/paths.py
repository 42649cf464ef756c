"""Where things are: the folders that ship with the package, and the user's own, which win."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def packaged(kind: str) -> Path:
    """The folder ``recipes``, ``conf`` or ``data`` that ships with cookbook.

    Inside an installed wheel it is ``cookbook/_<kind>``; in a checkout it stands beside the package.
    """
    inside = PACKAGE / f"_{kind}"
    return inside if inside.is_dir() else PACKAGE.parent / kind


def user(kind: str) -> Path:
    """The user's folder of that kind, in the current directory. It may not exist."""
    return Path.cwd() / kind


def overlays(kind: str) -> list[Path]:
    """The folders of that kind, the one that wins first. In a checkout of cookbook itself the two are one."""
    folders = [user(kind), packaged(kind)]
    return folders[1:] if folders[0].resolve() == folders[1].resolve() else folders


def find(kind: str, name: str) -> Path | None:
    """The first ``<folder>/<name>`` that is a file, the user's before the packaged one."""
    return next((path for folder in overlays(kind) if (path := folder / name).is_file()), None)


def shown(path: Path) -> str:
    """The path as a message names it: from the current directory when it lies inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
