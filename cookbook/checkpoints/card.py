"""Model card of a checkpoint: ``README.md`` with metadata that the Hugging Face hub reads, from the facts of the manifest."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cookbook.checkpoints import manifest
from cookbook.engine.model import LORA_FILE

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Metrics of the machine, not of the weights; equal runs have equal cards.
UNSHOWN = ("time/", "data/", "step", "eval/crc32")
# Keys of the data that decide what is learnt; where the files are is private.
DATA = ("subset", "split", "format", "system", "limit", "max_length", "on_long", "train_on")
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM's --max-lora-rank takes

LOAD_FULL = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

With vLLM: `vllm serve path/to/this/folder`"""
LOAD_ADAPTER = """With PEFT, which loads the base model too:

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

With transformers alone: `AutoModelForCausalLM.from_pretrained("path/to/this/folder")`, which needs PEFT installed.

With vLLM: `vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules trained=path/to/this/folder`

Full weights for any other program: `cookbook weights export path/to/this/folder OUT --merged`"""


def write(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the card of the weights in ``folder``. ``facts`` are those of the manifest; ``run`` is there if a run saves."""
    (folder / manifest.CARD).write_text(text(folder, facts), encoding="utf-8")


def text(folder: Path, facts: Mapping[str, Any]) -> str:
    """The card: metadata, origin, configuration, metrics at that step, and how to load the weights."""
    run = facts.get("run") or {}
    recipe = _group(facts, "recipe").get("name")
    base, fresh = _base(facts), bool(_group(facts, "model").get("random"))
    what = "LoRA adapter for" if facts["lora"] else "Full weights of"
    start = f"{base}, trained from fresh weights" if fresh else base
    how = f" with the recipe `{recipe}` of cookbook" if recipe else " with cookbook"
    parts = [
        f"---\n{_metadata(facts, recipe, fresh)}\n---\n\n# {base}, {recipe or 'trained'}, step {facts['step']}",
        f"{what} {start}, after {facts['step']} optimizer steps{how}.",
        "## Training\n\n" + _table(("setting", "value"), _settings(folder, facts)),
    ]
    if metrics := list(_metrics(run.get("metrics") or {})):
        parts.append(f"## Metrics at step {facts['step']}\n\n" + _table(("metric", "value"), metrics))
    parts.append("## How to load\n\n" + (_load_adapter(folder, facts) if facts["lora"] else LOAD_FULL))
    if facts["kind"] == "state":
        parts.append("The folder `trainer` holds the optimizer's state, to resume training; nothing but cookbook needs it.")
    return "\n\n".join(parts) + "\n"


def _metadata(facts: Mapping[str, Any], recipe: str | None, fresh: bool) -> str:
    from huggingface_hub import ModelCardData

    base, data = str(facts["base_model"]), _group(facts, "data")
    derived = _is_hub_id(base) and not fresh
    dataset = None if data.get("path") else data.get("name")
    found: str = ModelCardData(
        base_model=base if derived else None,
        base_model_relation=("adapter" if facts["lora"] else "finetune") if derived else None,
        library_name="peft" if facts["lora"] else "transformers",
        pipeline_tag="text-generation",
        tags=["cookbook", *([recipe] if recipe else []), *(["lora"] if facts["lora"] else [])],
        datasets=[dataset] if dataset and _is_hub_id(dataset) else None,
        license=None if fresh else _license(base),
    ).to_yaml()
    return found


def _load_adapter(folder: Path, facts: Mapping[str, Any]) -> str:
    rank = dict(_adapter(folder)).get("lora.r", 0)
    base = _base(facts) if _is_hub_id(str(facts["base_model"])) else f"path/to/{_base(facts)}"
    return LOAD_ADAPTER.format(base=base, rank=next((one for one in VLLM_RANKS if one >= rank), rank))


def _group(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A group of the run's configuration; empty without a run."""
    found: Mapping[str, Any] = (facts.get("run") or {}).get("identity", {}).get(name) or {}
    return found


def _base(facts: Mapping[str, Any]) -> str:
    """The base model's hub id, or the name of its folder; of a run's checkpoint with the run's name."""
    name = str(facts["base_model"])
    path = Path(name)
    if _is_hub_id(name):
        return name
    return "/".join(path.parts[-3::2]) if path.parent.name == "checkpoints" else path.name


def _settings(folder: Path, facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    run = facts.get("run") or {}
    yield "base model", _base(facts)
    yield "element type", facts["dtype"]
    yield "optimizer steps", f"{facts['step']} of {run['total_steps']}" if "total_steps" in run else facts["step"]
    if tokens := (run.get("progress") or {}).get("tokens"):
        yield "tokens", f"{tokens:,}"
    if "optimizer" in facts:
        yield "optimizer", facts["optimizer"]
    data = _group(facts, "data")
    if origin := Path(data["path"]).name if data.get("path") else data.get("name"):
        yield "data", origin
    yield from ((f"data.{key}", data[key]) for key in DATA if data.get(key) is not None)
    for group in ("recipe", "loss", "reward"):
        yield from _flat(group, _group(facts, group))
    if _group(facts, "reward"):
        yield from _flat("rollout", _group(facts, "rollout"))
    yield from _flat("optim", run.get("optim") or {})
    if (schedule := run.get("schedule")) and " at 0x" not in schedule:
        yield "schedule", schedule
    if (seed := (run.get("identity") or {}).get("seed")) is not None:
        yield "seed", seed
    yield from _adapter(folder)


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; of a class its name."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            if name == "_target_":
                yield key, str(part).rpartition(".")[2].rpartition(":")[2]
            else:
                yield from _flat(f"{key}.{name}", part)
    elif value is not None:
        yield key, value


def _adapter(folder: Path) -> Iterator[tuple[str, Any]]:
    """The adapter's settings, as PEFT has written them."""
    if (file := folder / LORA_FILE).is_file():
        config = json.loads(file.read_text())
        for name in ("r", "lora_alpha", "lora_dropout"):
            yield f"lora.{name}", config[name]
        targets = config["target_modules"]
        yield "lora.target_modules", targets if isinstance(targets, str) else ", ".join(sorted(targets))


def _metrics(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        if isinstance(value, int | float) and not name.startswith(UNSHOWN):
            yield name, f"{value:.6g}"


def _table(head: tuple[str, str], rows: Any) -> str:
    lines = [head, ("---", "---"), *((name, _cell(value)) for name, value in rows)]
    return "\n".join(f"| {name} | {value} |" for name, value in lines)


def _cell(value: Any) -> str:
    """A value on one line, in which a bar does not end the cell."""
    return " ".join(str(value).split()).replace("|", "\\|")


def _is_hub_id(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def _license(base: str) -> str | None:
    """The license that the base model's own card states, if that card is on this machine."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    card: Any = Path(base) / manifest.CARD
    if not card.is_file():
        card = try_to_load_from_cache(base, manifest.CARD) if _is_hub_id(base) else None
    if isinstance(card, str | Path):
        # The card of another author may hold anything: without a license, the line is left out.
        with contextlib.suppress(Exception):
            stated = ModelCard.load(card).data.license
            return stated if isinstance(stated, str) else None
    return None
