"""``cookbook weights``: list, verify, reconstruct, export, push, upload and prune checkpoints."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx

from cookbook import terminal
from cookbook.backends.remote import pointers
from cookbook.checkpoints import card, inventory, manifest, sampler_checkpoints, store
from cookbook.checkpoints.inventory import CheckpointEntry
from cookbook.errors import CheckpointError, ConfigError
from cookbook.run import folder as run_folder
from cookbook.run.folder import sampling_target
from cookbook.types import Checkpoint
from cookbook.utils import files, hub, packages, paths, tables
from cookbook.utils.words import counted

ADAPTER_FILE = "adapter_model.safetensors"
UPLOAD_TIMEOUT_S = 600.0
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def print_list(folder: Path, *, table: bool) -> None:
    """Print one line per checkpoint, the oldest first, without reading weights.

    Raises:
        CheckpointError: the folder has no checkpoint.
    """
    head = ("checkpoint", "kind", "step", "type", "MB", "weights", "differs from")
    tables.show("checkpoints", head, [_row(entry) for entry in inventory.entries(_named(folder))], table=table)


def _row(entry: CheckpointEntry) -> tuple[str, ...]:
    facts = entry.facts or {}
    own = (str(facts.get("step", "?")), str(facts.get("dtype", "?")), f"{entry.num_bytes / 1e6:.1f}")
    return (entry.folder.name, entry.kind, *own, str(facts.get("weights", ""))[:12], str(facts.get("predecessor", "")))


def verify(folder: Path) -> None:
    """Read every file and reconstruct every delta. Print one line per checkpoint.

    Raises:
        CheckpointError: the folder has no checkpoint, or at least one is damaged; the error counts them.
    """
    entries, damaged = inventory.entries(_named(folder)), 0
    for entry, problem in inventory.verify(entries):
        print(f"damaged  {problem}" if problem else f"whole    {entry.folder}")
        damaged += bool(problem)
    described = 0
    for file, problem in _server_files(_named(folder)):
        print(f"damaged  {problem}" if problem else f"whole    {file}")
        described += bool(problem)
    if damaged:
        raise CheckpointError(f"{folder}: {damaged} of {len(entries)} checkpoints cannot be used; see above")
    if described:
        raise CheckpointError(f"{folder}: {described} files that describe the run on its server are damaged; see above")


def _server_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files by which a server knows a run of its folder, each with its damage, "" if it is whole."""
    if (folder / "facts").is_dir():
        from cookbook.server.state.catalog import damage_of

        yield from damage_of(folder)


def reconstruct(checkpoint: Path, out: Path) -> None:
    """Rebuild the full weights of a delta, as the Hugging Face folder ``out``.

    Raises:
        CheckpointError: the checkpoint is not a delta, a file is missing or damaged, or ``out`` exists.
    """
    checkpoint = Path(sampling_target(str(checkpoint)))
    if (kind := manifest.read(checkpoint)["kind"]) != "delta":
        raise CheckpointError(f"{checkpoint}: expected a delta, got a checkpoint of kind {kind}; use cookbook weights export")
    export(checkpoint, out, merged=False)


def export(checkpoint: Path, out: Path, *, merged: bool) -> None:
    """Write a folder for transformers, PEFT or vLLM. ``merged`` merges an adapter into its model.

    Raises:
        CheckpointError: as :func:`cookbook.checkpoints.sampler_checkpoints.export`; the checkpoint is not an adapter; or its
            weights are on a server.
    """
    made = _exported(Path(sampling_target(str(checkpoint))), out, merged=merged)
    digest = manifest.read(out).get("weights", "")
    print(f"{made.path}  step {made.step}{f', weights {digest[:12]}' if digest else ''}")


def export_gguf(checkpoint: Path, out: Path, *, merged: bool, precision: str | None) -> None:
    """Write a folder with ``model.gguf`` and ``Modelfile``.

    Raises:
        ConfigError: an unknown precision, or the package gguf is not installed.
        CheckpointError: as :func:`export`; an adapter without ``merged``; or a model that the export does not cover.
    """
    packages.need("weights export: --gguf", "gguf", "gguf")
    from cookbook.checkpoints import gguf_file

    if precision is not None and precision not in gguf_file.TYPES:
        raise ConfigError(f"weights export: --precision must be one of {', '.join(gguf_file.TYPES)}, got {precision!r}")
    checkpoint = Path(sampling_target(str(checkpoint)))
    facts = manifest.read(checkpoint)
    if facts.get("lora") and not merged:
        raise CheckpointError(f"{checkpoint}: --gguf needs full weights, and this is an adapter; add --merged")
    with tempfile.TemporaryDirectory() as parent, store.appearing(out) as folder:
        made = _exported(checkpoint, Path(parent) / "weights", merged=merged)
        gguf_file.write(Path(made.path), folder, precision)
    size = (out / "model.gguf").stat().st_size / 1e6
    print(f"{out}  step {made.step}, model.gguf {size:.1f} MB, Modelfile")


def _exported(checkpoint: Path, out: Path, *, merged: bool) -> Checkpoint:
    facts = manifest.read(checkpoint)
    if (elsewhere := facts.get(pointers.SERVER)) is not None:
        if (local := pointers.on_disk(elsewhere)) is not None:
            return _exported(local, out, merged=merged)
        raise CheckpointError(
            f"{checkpoint}: its weights are on the server at {elsewhere['url']}; fetch them with "
            f"`tinker checkpoint download {elsewhere['path']}`"
        )
    if merged and not facts["lora"]:
        raise CheckpointError(f"{checkpoint}: holds full weights and no adapter that could be merged; leave out --merged")
    return sampler_checkpoints.export(_named(checkpoint), out, merged=merged)


def push(source: Path, repository: str, *, merged: bool, public: bool, dry_run: bool) -> None:
    """Upload the weights of a run's newest checkpoint, or of a checkpoint, with a model card to the Hugging Face hub.

    Raises:
        CheckpointError: as :func:`export`; or the adapter's base model is a local folder.
        ConfigError: the name of the repository is invalid; the repository exists and is public, and ``public`` is not set; or
            the hub refuses the upload.
    """
    if not REPOSITORY.fullmatch(repository):
        raise ConfigError(f"weights push: expected the name of a repository, user/name, got {repository!r}")
    checkpoint = Path(sampling_target(str(source)))
    facts = manifest.read(checkpoint)
    if facts["lora"] and not merged and not card.is_hub_id(str(facts["base_model"])):
        raise CheckpointError(
            f"{checkpoint}: its adapter belongs to {facts['base_model']}, which is not on the hub, so the adapter would be "
            "useless there; add --merged"
        )
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "weights"
        _exported(checkpoint, folder, merged=merged)
        written = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in written:
            print(f"{path.stat().st_size / 1e6:10.3f} MB  {path.relative_to(folder)}")
        visibility = "public, unless the repository exists and is private" if public else "private"
        if dry_run:
            print(f"dry run: {checkpoint} would be uploaded to {repository} ({visibility})")
            return
        url = _upload(folder, repository, f"Weights after {counted(facts['step'], 'step')}", public)
        print(f"{checkpoint} is at {url}")


def upload(folder: Path, url: str, name: str) -> None:
    """Upload a PEFT adapter to a server, and print the address of its checkpoint.

    Raises:
        CheckpointError: the folder is not an adapter in safetensors, the server is unreachable, or it refuses the adapter.
    """
    parts = []
    for file in (paths.LORA_FILE, ADAPTER_FILE):
        try:
            parts.append((folder / file).read_bytes())
        except OSError as error:
            raise CheckpointError(
                f"{folder / file}: cannot be read ({error.strerror}); pass the folder of a PEFT adapter in safetensors"
            ) from None
    key = os.environ.get("TINKER_API_KEY")
    headers = {"X-Idempotency-Key": secrets.token_hex(16), "Content-Type": "application/octet-stream"}
    try:
        with terminal.doing(f"uploading {folder} to {url}"):
            response = httpx.post(
                f"{url.rstrip('/')}/api/v1/cookbook/upload_adapter",
                params={"name": name},
                content=len(parts[0]).to_bytes(8, "little") + parts[0] + parts[1],
                headers=headers | ({"X-API-Key": key} if key else {}),
                timeout=UPLOAD_TIMEOUT_S,
            )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CheckpointError(f"{url}: the server cannot be reached ({error}); check --url") from None
    try:
        answer = response.json()
    except ValueError:
        answer = {}
    if response.status_code != 200 or "tinker_path" not in answer:
        raise CheckpointError(f"{url}: refused the adapter: {answer.get('detail', f'HTTP status {response.status_code}')}")
    print(answer["tinker_path"])


def _upload(folder: Path, repository: str, message: str, public: bool) -> str:
    """Upload a folder as one commit, and return the address of the repository."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi()
    if not hub.answers():
        raise ConfigError(f"weights push: {api.endpoint} does not answer; check the network, or set HF_ENDPOINT")
    try:
        with terminal.doing(f"uploading to {repository}"):
            url = api.create_repo(repository, private=not public, exist_ok=True)
            # The option has no effect on a repository that exists.
            if not public and not api.repo_info(repository).private:
                raise ConfigError(f"weights push: {repository} exists and is public; add --public, or make it private")
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except OfflineModeIsEnabled:
        raise ConfigError("weights push: HF_HUB_OFFLINE is set; unset it") from None
    except (HfHubHTTPError, LocalTokenNotFoundError, httpx.HTTPError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"weights push: {repository}: {reason}; log in with `hf auth login`, or set HF_TOKEN") from None
    return str(url)


def prune(folder: Path, keep: int) -> None:
    """Delete the sampler checkpoints that the newest ``keep`` do not need. Training checkpoints stay.

    Raises:
        CheckpointError: the folder has no checkpoint.
        ConfigError: the run is in progress.
    """
    entries = inventory.entries(_named(folder))
    size = {entry.folder: entry.num_bytes for entry in entries}
    with _run_locked(folder):
        gone = inventory.prune(entries, keep)
    for path in gone:
        print(f"deleted  {path}")
    print(f"{len(gone)} deleted, {sum(size[path] for path in gone) / 1e6:.1f} MB; {len(entries) - len(gone)} left")


def _named(folder: Path) -> Path:
    """Resolve ``.`` and ``..``: predecessors are in the parent of the folder, and these paths have no parent."""
    return folder.resolve() if folder.name in ("", "..") else folder


@contextlib.contextmanager
def _run_locked(folder: Path) -> Iterator[None]:
    """Hold the run's lock, if there is a run: its next delta needs its predecessor."""
    run = next((candidate for candidate in (folder, folder.parent) if (candidate / run_folder.CONFIG).is_file()), None)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.locked(run) if run is not None else contextlib.nullcontext())
        except OSError as error:
            raise ConfigError(f"weights: cannot write to {run}: {error.strerror}; make the folder writable") from None
        yield
