"""Build the wheel and the sdist into dist/, and train with each of them in an empty environment.

    python scripts/release.py

``make release`` calls it. Nothing is uploaded and no tag is set: the last lines say what remains to be done.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRY = (
    "cookbook --version",
    "cookbook list",
    "cookbook train recipe=sft debug=fast out=sft",
    "cookbook train recipe=grpo debug=fast out=grpo",
)


def versions(root: Path) -> dict[str, str]:
    """The version that each file names: pyproject.toml, CITATION.cff, the newest section of CHANGELOG.md."""
    return {
        "pyproject.toml": tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"],
        "CITATION.cff": first(r"^version: *\"?([^\"\s]+)", root / "CITATION.cff"),
        "CHANGELOG.md": first(r"^## ([^\s,]+)", root / "CHANGELOG.md"),
    }


def first(pattern: str, path: Path) -> str:
    found = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"error: {path.name} names no version: nothing matches {pattern!r}")
    return found[1]


def build(out: Path) -> list[Path]:
    """Build the sdist, and the wheel from the sdist; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("post_training_cookbook-*"):
        old.unlink()
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: python -m build failed: {done.stderr.strip() or done.stdout.strip()}")
    return sorted(out.glob("post_training_cookbook-*"))


def try_out(built: Path, index: str) -> None:
    """Install a built file, with all that it needs, into an empty environment, and train from an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "environment", "bin", "python")
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([*install, *([f"--extra-index-url={index}"] if index else []), "torch"], check=True)
        subprocess.run([*install, str(built)], check=True)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        for words in TRY:
            command = [str(python.parent / "cookbook"), *shlex.split(words)[1:]]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"error: {built.name}: `{words}` ended with code {done.returncode}: {done.stderr.strip()}")
            print(f"{built.name}: {words}: works", flush=True)


def remaining(version: str) -> list[str]:
    """Return the steps that remain before the upload, and the upload itself."""
    status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
    dated = first(r"^## ([^\n]+)", ROOT / "CHANGELOG.md")
    return [
        *(["commit the changes: dist/ was built from files that git does not hold yet"] if status.strip() else []),
        *([f"CHANGELOG.md: write the date in place of 'not released' in {dated!r}"] if "not released" in dated else []),
        f"git tag v{version} && git push origin v{version}",
        "python -m twine upload dist/post_training_cookbook-*",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", default="", help="an extra index for torch, such as PyTorch's CPU builds")
    options = parser.parse_args()
    found = versions(ROOT)
    if len(set(found.values())) > 1:
        named = ", ".join(f"{file} {version}" for file, version in found.items())
        raise SystemExit(f"error: the versions differ: {named}; write one version in all three")
    for built in build(ROOT / "dist"):
        print(f"built dist/{built.name}, {built.stat().st_size / 1e6:.1f} MB", flush=True)
        try_out(built, options.index)
    print("It remains:")
    for line in remaining(found["pyproject.toml"]):
        print(f"  {line}")


if __name__ == "__main__":
    main()
