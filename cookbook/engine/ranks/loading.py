"""Loading a model onto ranks without a rank that ever holds the whole model.

A meta network has modules and shapes, and no weights. The engine tries its fast paths on a small reference network of the same
architecture with few layers and random weights, and then shards the meta network. At the end every rank reads its part of
each tensor from the files. If transformers renames or joins the tensors of an architecture while it loads them, as it joins the
experts of a mixture, a rank loads one layer at a time, and keeps its part.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cookbook import terminal
from cookbook.engine import quantized
from cookbook.engine.dropout import set_dropout
from cookbook.engine.model import (
    DTYPES,
    LORA_FILE,
    LanguageModel,
    Lineage,
    ModelConfig,
    add_lora,
    load,
    load_tokenizer,
    resolved,
    set_end_tokens,
    with_dtype,
)
from cookbook.engine.parallel import Ranks
from cookbook.errors import BackendError, ConfigError
from cookbook.utils import paths

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Tokens of the reference model's vocabulary.
TWIN_VOCABULARY = 1024


def load_on(ranks: Ranks, config: ModelConfig, device: torch.device, seed: int) -> LanguageModel:
    """Load a model onto ranks. The weights of sharded ranks are read once the engine has sharded the network.

    Raises:
        BackendError: the model cannot be loaded.
    """
    # Sharded ranks hold the root of one network. A process may have several: of runs, and of references.
    ranks = copy.copy(ranks)
    folder = _folder(ranks, config)
    if folder is None:
        return replace(load(config, device, seed), ranks=ranks)
    if config.quantize not in (None, quantized.NONE):
        raise ConfigError(
            f"model.quantize: quantized weights cannot be sharded over ranks, got {config.quantize}; set backend.shard=none, "
            "which gives every rank a whole copy"
        )
    from transformers.utils import logging as transformers_logging

    # The run has a display of its own.
    transformers_logging.disable_progress_bar()
    base = str(folder)
    tokenizer, config = load_tokenizer(config), with_dtype(config)
    network = _meta_network(config, _architecture(config, base), seed)
    sources, values = _sources(Path(base)), _values(network)
    names = _names_in_files(network)
    if names.values() - sources.keys():
        # A network without an adapter has the names that transformers knows.
        plain = _meta_network(replace(config, lora_rank=0), _architecture(config, base), seed)
        parts = _converted(ranks, plain, sources)
        if missing := sorted(names.values() - parts.keys()):
            raise BackendError(f"model.name: {base!r} lacks {len(missing)} of the model's weights, {missing[0]} the first")
        values |= {name: parts[stored_name] for name, stored_name in names.items()}
    network.eval()
    set_end_tokens(network, tokenizer)
    return MetaModel(network, tokenizer, config, device, Lineage(), ranks, base, seed, sources, values)


@dataclass
class MetaModel(LanguageModel):
    """A model whose network has no weights until :meth:`read`.

    ``sources``: the file of each tensor; ``values``: tensors that are in no file, such as a fresh adapter, and this rank's
    parts of tensors that were converted.
    """

    base: str = ""
    seed: int = 0
    sources: Mapping[str, Path] = field(default_factory=dict)
    values: Mapping[str, Tensor] = field(default_factory=dict)

    def small_reference(self) -> LanguageModel:
        """Return a small model of the same architecture, for trials."""
        network = _from_config(self.config, _shrunk(_architecture(self.config, self.base)), self.seed)
        if self.config.lora_rank:
            network = add_lora(network, self.config, self.seed)
        network.to(self.device).eval()
        return LanguageModel(network, self.tokenizer, self.config, self.device, self.lineage)

    def read(self) -> None:
        """Fill the parameters and buffers of the network, which has been sharded.

        Raises:
            BackendError: a file cannot be read.
        """
        names = _names_in_files(self.network)
        with terminal.doing(f"loading the model {paths.shown(Path(self.base))}"), torch.no_grad():
            for name, parameter in self.network.named_parameters():
                if name in self.values:
                    value = self.values[name]
                    is_part = value.shape != parameter.shape
                    (self.ranks.local(parameter).copy_(value) if is_part else self.ranks.fill(parameter, value))
                else:
                    self._read_tensor(parameter, names[name])
            for name, buffer in self.network.named_buffers():
                buffer.copy_(self.values[name])
        self.sources, self.values = {}, {}

    def _read_tensor(self, parameter: Tensor, name: str) -> None:
        try:
            # Opened for each tensor: as long as a file is open, the parts of it that were read stay in memory.
            with safe_open(self.sources[name], framework="pt") as file:
                self.ranks.fill(parameter, file.get_slice(name))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise BackendError(f"model.name: cannot read {name} in {self.base!r}: {error}") from None


def _architecture(config: ModelConfig, base: str) -> PretrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(base, revision=config.revision, trust_remote_code=config.trust_remote_code)


def _folder(ranks: Ranks, config: ModelConfig) -> Path | None:
    """The folder of full weights to read in parts; None for weights that every rank needs whole, and for an adapter."""
    # Added tokens need the whole embedding.
    if not ranks.shards or config.random or config.add_tokens:
        return None
    folder = Path(resolved(config.name))
    # The ranks of another node may have another disk. All of them download, or none.
    if not all(ranks.gathered(folder.is_dir())):
        download = functools.partial(
            snapshot_download, config.name, revision=config.revision, allow_patterns=["*.json", "*.safetensors"]
        )
        try:
            # By one process first; then by one of each node that does not share its disk.
            ranks.on_first(download)
            folder = Path(download())
        except (OSError, ValueError, HfHubHTTPError):
            # The usual way of loading explains what is wrong.
            return None
    holds_weights = any(folder.glob("model*.safetensors")) and not (folder / LORA_FILE).exists()
    return folder if holds_weights else None


def _from_config(config: ModelConfig, architecture: PretrainedConfig, seed: int) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    attention = None if config.attn_implementation == "auto" else config.attn_implementation
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = AutoModelForCausalLM.from_config(architecture, dtype=DTYPES[config.dtype], attn_implementation=attention)
    set_dropout(network, config.dropout)
    return network


def _meta_network(config: ModelConfig, architecture: PretrainedConfig, seed: int) -> PreTrainedModel:
    """Return a network whose parameters have no memory, but for those of an adapter. Buffers have their values."""
    with _without_memory():
        network = _from_config(config, architecture, seed)
    if not config.lora_rank:
        return network
    # PEFT moves an adapter to the device of its layer, so the layers pretend to be on the CPU.
    _replace_parameters(network, lambda parameter: torch.empty(1, dtype=parameter.dtype).expand(parameter.shape))
    base = {id(parameter) for parameter in network.parameters()}
    adapted = add_lora(network, config, seed)
    _replace_parameters(
        adapted, lambda parameter: torch.empty_like(parameter, device="meta") if id(parameter) in base else parameter
    )
    return adapted


@contextlib.contextmanager
def _without_memory() -> Iterator[None]:
    """Context in which a new parameter has a shape and no memory. Buffers are made as usual."""
    own = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        own(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = own  # type: ignore[method-assign]


def _replace_parameters(network: nn.Module, replacement: Callable[[nn.Parameter], Tensor]) -> None:
    """Replace every parameter; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                tensor = replacement(parameter)
                made[id(parameter)] = parameter if tensor is parameter else nn.Parameter(tensor, parameter.requires_grad)
            setattr(module, name, made[id(parameter)])


def _values(network: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors that have values already: buffers, and a fresh adapter."""
    adapter = {name: parameter.detach() for name, parameter in network.named_parameters() if not parameter.is_meta}
    return {**adapter, **{name: buffer.clone() for name, buffer in network.named_buffers()}}


def _names_in_files(network: PreTrainedModel) -> dict[str, str]:
    """Names in the files, by names in memory, of the parameters that a file holds. PEFT adds to the names in memory."""
    return {
        name: re.sub(r"(\.base_layer)+\.", ".", name.removeprefix("base_model.model."))
        for name, _ in network.named_parameters()
        if ".lora_" not in name
    }


def _sources(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    files_by_name = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                files_by_name.update(dict.fromkeys(file.keys(), path))
        except (OSError, SafetensorError) as error:
            raise BackendError(f"model.name: cannot read {path}: {error}; use a whole model") from None
    return files_by_name


def _converted(ranks: Ranks, network: PreTrainedModel, sources: Mapping[str, Path]) -> dict[str, Tensor]:
    """This rank's part of every parameter, by name, for an architecture whose names in memory differ from those in the files.

    transformers converts the tensors of one layer after another into ``network``, which has no weights before or after.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    groups: dict[str, list[str]] = {}
    for name in sources:
        layer = re.match(r".*?\.\d+\.", name)
        groups.setdefault(layer[0] if layer else name, []).append(name)
    parts: dict[str, Tensor] = {}
    for members in groups.values():
        with contextlib.ExitStack() as files:
            opened = {
                path: files.enter_context(safe_open(path, framework="pt")) for path in {sources[member] for member in members}
            }
            state = {name: opened[sources[name]].get_slice(name) for name in members}
            mapping = get_model_conversion_mapping(network)
            convert_and_load_state_dict_in_model(
                network, state, LoadStateDictConfig(dtype=network.dtype, weight_mapping=mapping)
            )
            parts |= {
                name: ranks.part(parameter.detach()).clone()
                for name, parameter in network.named_parameters()
                if not parameter.is_meta
            }
        _replace_parameters(
            network, lambda parameter: parameter if parameter.is_meta else torch.empty_like(parameter, device="meta")
        )
    return parts


def _shrunk(architecture: PretrainedConfig) -> PretrainedConfig:
    """The configuration with the first layers only, at least one of each kind, and with few tokens."""
    small = copy.deepcopy(architecture)
    text = small.get_text_config()
    count = int(text.num_hidden_layers)
    kinds = list(getattr(text, "layer_types", None) or [])
    dense_first = int(getattr(text, "first_k_dense_replace", 0) or 0)
    num_layers = min(count, max([2, dense_first + 1, *(kinds.index(kind) + 1 for kind in set(kinds))]))
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:num_layers])
    text.num_hidden_layers = num_layers
    text.vocab_size = min(int(text.vocab_size), TWIN_VOCABULARY)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    return small
