"""Model card of a checkpoint: ``README.md`` with metadata that the Hugging Face hub reads, from the facts of the manifest."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import jinja2

from cookbook.checkpoints import manifest
from cookbook.engine.model import LORA_FILE
from cookbook.types import JsonObject

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Prefixes of metrics that depend on the machine; equal runs have equal cards.
HIDDEN_METRICS = ("time/", "data/", "step", "eval/crc32")
# Keys of the data that decide what the model learns; the paths of files are private.
DATA = ("subset", "split", "format", "system", "limit", "max_length", "on_long", "train_on")
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM's --max-lora-rank takes

_TEMPLATE: jinja2.Template = jinja2.Template(
    Path(__file__).with_name("card.jinja").read_text(encoding="utf-8"),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def write(folder: Path, facts: JsonObject) -> None:
    """Write the card of the weights in ``folder``. ``facts`` are those of the manifest, with ``run`` if a run saves.

    The card holds metadata, the origin, the configuration, the metrics at that step, and how to load the weights.
    """
    recipe, fresh = _group(facts, "recipe").get("name"), bool(_group(facts, "model").get("random"))
    base, rank = _base(facts), _adapter(folder).get("r", 0)
    text = _TEMPLATE.render(
        facts,
        metadata=_metadata(facts, recipe, fresh),
        base=base,
        recipe=recipe,
        fresh=fresh,
        settings=_settings(folder, facts),
        metrics=list(_metrics((facts.get("run") or {}).get("metrics") or {})),
        served=base if is_hub_id(str(facts["base_model"])) else f"path/to/{base}",
        rank=next((vllm_rank for vllm_rank in VLLM_RANKS if vllm_rank >= rank), rank),
    )
    (folder / manifest.CARD).write_text(text, encoding="utf-8")


def _metadata(facts: JsonObject, recipe: str | None, fresh: bool) -> str:
    from huggingface_hub import ModelCardData

    base, data = str(facts["base_model"]), _group(facts, "data")
    derived = is_hub_id(base) and not fresh
    dataset = None if data.get("path") else data.get("name")
    metadata: str = ModelCardData(
        base_model=base if derived else None,
        base_model_relation=("adapter" if facts["lora"] else "finetune") if derived else None,
        library_name="peft" if facts["lora"] else "transformers",
        pipeline_tag="text-generation",
        tags=["cookbook", *([recipe] if recipe else []), *(["lora"] if facts["lora"] else [])],
        datasets=[dataset] if dataset and is_hub_id(dataset) else None,
        license=None if fresh else _license(base),
    ).to_yaml()
    return metadata


def _group(facts: JsonObject, name: str) -> JsonObject:
    """Group of the run's configuration; empty without a run."""
    group: JsonObject = (facts.get("run") or {}).get("identity", {}).get(name) or {}
    return group


def _base(facts: JsonObject) -> str:
    """Hub id of the base model, or the name of its folder. The checkpoint of a run also gets the run's name."""
    name = str(facts["base_model"])
    path = Path(name)
    if is_hub_id(name):
        return name
    return "/".join(path.parts[-3::2]) if path.parent.name == "checkpoints" else path.name


def _settings(folder: Path, facts: JsonObject) -> Iterator[tuple[str, object]]:
    run = facts.get("run") or {}
    yield "base model", _base(facts)
    yield "element type", facts["dtype"]
    if "quantize" in facts:
        yield "base weights quantized to", facts["quantize"]
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
    if adapter := _adapter(folder):
        yield from ((f"lora.{name}", adapter[name]) for name in ("r", "lora_alpha", "lora_dropout"))
        targets = adapter["target_modules"]
        yield "lora.target_modules", targets if isinstance(targets, str) else ", ".join(sorted(targets))


def _flat(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield dotted keys with their values; a class is represented by its name."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            if name == "_target_":
                yield key, str(part).rpartition(".")[2].rpartition(":")[2]
            else:
                yield from _flat(f"{key}.{name}", part)
    elif value is not None:
        yield key, value


def _adapter(folder: Path) -> JsonObject:
    """PEFT's settings of the adapter in ``folder``; empty without an adapter."""
    file = folder / LORA_FILE
    settings: JsonObject = json.loads(file.read_text()) if file.is_file() else {}
    return settings


def _metrics(row: JsonObject) -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        if isinstance(value, int | float) and not name.startswith(HIDDEN_METRICS):
            yield name, f"{value:.6g}"


def is_hub_id(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def _license(base: str) -> str | None:
    """License in the base model's own card, if that card is on this machine."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    own = Path(base) / manifest.CARD
    cached = try_to_load_from_cache(base, manifest.CARD) if not own.is_file() and is_hub_id(base) else None
    card = str(own) if own.is_file() else cached
    # The hub's cache answers with an object if it knows that the file does not exist.
    if isinstance(card, str):
        # A card of another author may hold anything; without a license the line is omitted.
        with contextlib.suppress(Exception):
            stated = ModelCard.load(card).data.license
            return stated if isinstance(stated, str) else None
    return None
