"""Loading of causal language models, tokenizers and LoRA adapters, from the Hugging Face hub or a local folder."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cookbook import terminal
from cookbook.data import stop_tokens
from cookbook.engine import lora_targets, quantized, vocabulary
from cookbook.engine.dropout import set_dropout
from cookbook.engine.parallel import Ranks
from cookbook.errors import BackendError, ConfigError, first_line
from cookbook.utils import hub, paths
from cookbook.utils.signals import is_interrupt
from cookbook.utils.template_options import TEMPLATE_OPTIONS, checked_options

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger("cookbook")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# Value of ``dtype``: the dtype of the stored weights.
AUTO = "auto"
LORA_FILE = paths.LORA_FILE
REMOTE_CODE = "model.trust_remote_code=true"
LFS_POINTER = b"version https://git-lfs"

# PEFT imports bitsandbytes, which warns on every use of LoRA about a missing 4-bit CPU kernel that cookbook does not use.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")
)


@dataclass
class ModelConfig:
    """The model to load, and the parameters to train. The fields are documented in ``conf/model/*.yaml``."""

    name: str
    random: bool = False
    revision: str | None = None
    dtype: str = "float32"
    lora_rank: int = 0
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: Any = "all-linear"
    chat_template: str | None = None
    chat_template_kwargs: Any = None
    attn_implementation: str = "auto"
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None
    dropout: float | None = None
    add_tokens: list[str] = field(default_factory=list)
    quantize: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (AUTO, *DTYPES):
            raise ConfigError(f"model.dtype: expected one of {', '.join((AUTO, *DTYPES))}, got {self.dtype!r}")
        if self.lora_rank < 0:
            raise ConfigError(f"model.lora_rank must be >= 0, got {self.lora_rank}; 0 trains every parameter")
        if self.router_aux_loss_coef is not None and not 0 <= self.router_aux_loss_coef < float("inf"):
            raise ConfigError(f"model.router_aux_loss_coef must be >= 0, got {self.router_aux_loss_coef}; 0 leaves it out")
        try:
            self.chat_template_kwargs = checked_options(self.chat_template_kwargs) or None
        except ValueError as error:
            raise ConfigError(f"model.{TEMPLATE_OPTIONS}: {error}") from None
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError(f"model.lora_dropout must be at least 0 and below 1, got {self.lora_dropout}")
        vocabulary.check_tokens(self.add_tokens)
        quantized.check(self.quantize)
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ConfigError(
                f"model.dropout must be at least 0 and below 1, or null, got {self.dropout}; null is the recipe's default"
            )


class AdapterConfig(TypedDict):
    """The keys of PEFT's ``adapter_config.json`` that cookbook reads."""

    base_model_name_or_path: str
    r: int
    lora_alpha: int
    lora_dropout: float


@dataclass(eq=False)
class Lineage:
    """Identity that a model shares with its copies: the cache key of the capabilities that were verified for the model.

    ``logged``: subjects of :meth:`LanguageModel.log_once` that have been logged.
    """

    logged: set[str] = field(default_factory=set)


@dataclass
class LanguageModel:
    """A model with its tokenizer. ``network`` is the Hugging Face module, PEFT-wrapped when ``lora_rank`` > 0."""

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: ModelConfig
    device: torch.device
    lineage: Lineage = field(default_factory=Lineage)
    ranks: Ranks = field(default_factory=Ranks)

    @functools.cached_property
    def max_length(self) -> int:
        """Context length, tokens; a large number if no limit is known."""
        return context_length(self.network.config, self.tokenizer) or 1 << 30

    @functools.cached_property
    def vocabulary_size(self) -> int:
        """Number of token ids that the model knows."""
        return int(self.network.config.get_text_config().vocab_size)

    @property
    def class_name(self) -> str:
        """Class name of the base model, without adapters."""
        return type(self.network.get_base_model() if self.is_lora else self.network).__name__

    def log_once(self, subject: str, line: str, level: int = logging.INFO) -> None:
        """Log ``line`` unless ``subject`` has been logged for this model or a copy of it."""
        if subject not in self.lineage.logged:
            self.lineage.logged.add(subject)
            log.log(level, line)

    def log_unused_adapters(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Log the layers whose LoRA adapters get no gradient.

        Some models use the weight of a layer without calling the layer, and so bypass its adapter, such as Mamba with
        ``dt_proj``. ``gradients``: in the order of :meth:`trainable`.
        """
        reached: dict[str, bool] = {}
        for (name, _), gradient in zip(self.trainable(), gradients, strict=True):
            layer, is_adapter, _ = name.partition(".lora_")
            if is_adapter:
                layer = layer.rpartition(".")[2]
                reached[layer] = reached.get(layer, False) or gradient is not None
        if unused := sorted(layer for layer in reached if not reached[layer]):
            chosen = self.config.lora_target_modules != "all-linear"
            self.log_once(
                "adapters",
                f"LoRA: {self.class_name} does not use its adapters on {', '.join(unused)}, so they get no gradient"
                + ("; name other layers in model.lora_target_modules" if chosen else ""),
                logging.WARNING if chosen else logging.INFO,
            )
        self.lineage.logged.add("adapters")

    @property
    def is_lora(self) -> bool:
        return hasattr(self.network, "peft_config")

    @property
    def saves_embeddings(self) -> bool:
        """Whether checkpoints of the adapter hold the whole embeddings, as the adapter that training continues does.

        Other programs write them if the vocabulary was resized, or on request.
        """
        path = Path(self.config.name) / "adapter_model.safetensors"
        if not self.is_lora or not path.is_file():
            return False
        with safe_open(path, framework="pt") as file:
            keys = list(file.keys())
        stored: Any = self.network.peft_config["default"].modules_to_save or ()
        names = {name.rpartition(".")[2] for name in vocabulary.embedding_names(self.network.get_base_model())} - set(stored)
        return any(key.endswith(f".{name}.weight") for name in names for key in keys)

    def adapter_is_idle(self) -> bool:
        """Whether the model has a LoRA adapter whose output is still zero: its B factors have their initial value, zero."""
        factors = [p for name, p in self.trainable() if "lora_B" in name or "lora_embedding_A" in name]
        return bool(factors) and not self.ranks.in_step([any(bool(self.ranks.local(factor).any()) for factor in factors)])[0]

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return names and parameters that require a gradient, in a fixed order; tied weights occur once."""
        return [(name, p) for name, p in self.network.named_parameters() if p.requires_grad]


def load(config: ModelConfig, device: torch.device, seed: int, shared: SharedBase | None = None) -> LanguageModel:
    """Load a model, or with ``config.random`` initialize it from ``seed``; add a LoRA adapter if ``lora_rank`` > 0.

    If the folder holds a PEFT adapter, load its base model and continue to train the adapter. ``shared``: a base model that is
    already in memory; models with adapters use its weights without a copy.

    Raises:
        BackendError: the model is missing, incomplete, or not a causal language model.
        ConfigError: ``lora_rank`` differs from the rank of the adapter in the folder.
    """
    adapter = _adapter_config(config.name)
    # Absolute, because an adapter stores the path of its base, and may be loaded from another working directory.
    base = resolved(adapter["base_model_name_or_path"] if adapter else config.name)
    with terminal.doing(f"loading the model {paths.shown(Path(base))}", detail=functools.partial(_size, base)):
        return _load(config, device, seed, shared, adapter, base)


def _load(
    config: ModelConfig, device: torch.device, seed: int, shared: SharedBase | None, adapter: AdapterConfig | None, base: str
) -> LanguageModel:
    from transformers.utils import logging as transformers_logging

    # The run shows its own progress, and _network checks for missing weights.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    tokenizer, fresh = _tokenizer(config)
    config = with_quantization(with_dtype(config))
    if shared is None or shared.name != base:
        # Quantized in host memory, so that the whole weights are never on the device.
        network = _quantized(_network(config, base, seed), config).to(device)
    else:
        if shared.quantize != config.quantize:
            raise ConfigError(
                f"model.quantize: the adapter in {config.name} was trained on weights quantized as {config.quantize}, and "
                f"those of the server are {shared.quantize or 'whole'}; start the server with model.quantize={config.quantize} "
                f"or {shared.quantize or quantized.NONE} to continue on its weights"
            )
        network = shared.under_adapter() if adapter or config.lora_rank else shared.copied()
    set_dropout(network, config.dropout)
    _resize(network, config, tokenizer, fresh, is_adapter=adapter is not None)
    if adapter:
        config = _as_adapter(config, adapter)
        network = _load_adapter(network, config)
    elif config.lora_rank:
        network = add_lora(network, config, seed, _ids(tokenizer, config))
    network.eval()
    set_end_tokens(network, tokenizer)
    return LanguageModel(network, tokenizer, config, device)


def set_end_tokens(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the network's generation config the stop tokens of the tokenizer and its chat template.

    Sampling stops at them, and checkpoints carry them, so that ``generate`` of transformers stops there too.
    """
    base = network.get_base_model() if hasattr(network, "peft_config") else network
    generation = getattr(base, "generation_config", None)
    if generation is not None:
        stop_tokens.configure(tokenizer, generation.eos_token_id)
        if ordinary := stop_tokens.ordinary_ids(tokenizer):
            names = ", ".join(f"{token} ({tokenizer.decode([token])!r})" for token in ordinary)
            log.warning(
                "generation_config.json: eos_token_id names ordinary tokens of the tokenizer, got %s, which end no "
                "completion; declare them as special tokens of the tokenizer to end completions there",
                names,
            )
        generation.eos_token_id = stop_tokens.for_generation_config(tokenizer, generation.eos_token_id)


def _stored_end_tokens(config: ModelConfig) -> object:
    """Return the end tokens of the generation config in the model's folder, or of that of an adapter's base; None: no file."""
    from transformers import GenerationConfig

    adapter = _adapter_config(config.name)
    for name in (config.name, *([adapter["base_model_name_or_path"]] if adapter else [])):
        with contextlib.suppress(OSError, ValueError):
            return GenerationConfig.from_pretrained(name, revision=config.revision).eos_token_id
    return None


def fresh_network(config: ModelConfig) -> PreTrainedModel:
    """Return the network of ``config``, with its adapter and random weights. Reads the configuration only.

    Raises:
        BackendError: the model's configuration cannot be loaded.
        ConfigError: the model does not support the adapter.
    """
    adapter = _adapter_config(config.name)
    base = adapter["base_model_name_or_path"] if adapter else config.name
    config = with_quantization(config)
    with terminal.doing(f"reading the architecture of {base}"):
        network = _quantized(_network(replace(with_dtype(config), random=True), base, seed=0), config)
        set_dropout(network, config.dropout)
    ids: list[int] = []
    if adapter or config.add_tokens:
        tokenizer, fresh = _tokenizer(config)
        _resize(network, config, tokenizer, fresh, is_adapter=adapter is not None)
        ids = _ids(tokenizer, config)
    if adapter:
        return _stored_adapter(network, _as_adapter(config, adapter))
    return add_lora(network, config, seed=0, token_ids=ids) if config.lora_rank else network


def _ids(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> list[int]:
    """Return the ids of ``model.add_tokens``."""
    return [int(tokenizer.convert_tokens_to_ids(token)) for token in config.add_tokens]


def _resize(
    network: PreTrainedModel, config: ModelConfig, tokenizer: PreTrainedTokenizerBase, fresh: Sequence[int], *, is_adapter: bool
) -> None:
    """Give added tokens rows of the embeddings.

    The tokenizer of an adapter may have more tokens than its base model. Another tokenizer with more tokens than its model is
    left alone: the rows of data that need them are refused.

    Raises:
        ConfigError: an adapter that is trained further would need rows for further tokens.
    """
    if is_adapter and fresh:
        raise ConfigError(
            f"model.add_tokens: {config.name} holds an adapter without {config.add_tokens}; add the tokens when the adapter is "
            "created, or merge the adapter first: cookbook weights export --merged"
        )
    rows = vocabulary.stored_rows(Path(config.name), network) if is_adapter else None
    if rows is not None and rows < int(network.get_input_embeddings().weight.shape[0]):
        network.resize_token_embeddings(rows)
    elif is_adapter or fresh:
        vocabulary.resize(network, rows or len(tokenizer), fresh)


def with_dtype(config: ModelConfig) -> ModelConfig:
    """Resolve ``dtype: auto``: bfloat16 if the weights are stored in 16 bits, else float32.

    Raises BackendError: the model's configuration cannot be loaded.
    """
    if config.dtype != AUTO:
        return config
    _must_exist(config.name)
    adapter = _adapter_config(config.name)
    architecture = _architecture(config, resolved(adapter["base_model_name_or_path"] if adapter else config.name))
    stored = architecture.dtype or architecture.get_text_config().dtype
    return replace(config, dtype="bfloat16" if stored in (torch.bfloat16, torch.float16) else "float32")


def with_quantization(config: ModelConfig) -> ModelConfig:
    """Resolve ``quantize``: an adapter continues on the quantization that it was trained on; None if nothing is quantized."""
    scheme = config.quantize
    if scheme is None and _adapter_config(config.name):
        # An adapter of another program has no manifest.
        path = Path(config.name) / paths.MANIFEST_FILE
        try:
            scheme = json.loads(path.read_text()).get("quantize") if path.is_file() else None
        except (OSError, ValueError) as error:
            raise BackendError(f"model.name: cannot read {path}: {first_line(error)}; use another checkpoint") from None
    return replace(config, quantize=None if scheme == quantized.NONE else scheme)


def check_trainable(config: ModelConfig) -> None:
    """Raise ConfigError if the base model is to be quantized, and there is no adapter to train."""
    scheme = with_quantization(config).quantize
    if scheme and not config.lora_rank and not _adapter_config(config.name):
        raise ConfigError(
            f"model.quantize: quantized weights are not trained, got {scheme} without an adapter; set model.lora_rank, "
            "for example to 16"
        )


def _quantized(network: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    """Quantize the network's linear layers if ``config`` names a scheme. Return the network."""
    if config.quantize:
        quantized.install(network, config.quantize, set(lora_targets.linear_routers(network)))
    return network


# Sizes in a model's configuration that must be above 0. transformers builds a model of a negative size until torch fails.
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def _architecture(config: ModelConfig, base: str) -> PreTrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        architecture = AutoConfig.from_pretrained(base, revision=config.revision, trust_remote_code=config.trust_remote_code)
    except StrictDataclassError as error:
        raise _invalid_configuration(base, error) from None
    except (OSError, ValueError, KeyError, json.JSONDecodeError, ImportError) as error:
        is_adapter = base != resolved(config.name)
        remedy = f"; or write its folder into {config.name}/{LORA_FILE}, as base_model_name_or_path" if is_adapter else ""
        raise BackendError(_cannot_load("configuration", base, error) + remedy) from None
    sizes = vars(architecture.get_text_config())
    if wrong := [name for name in _SIZES if isinstance(sizes.get(name), int | float) and sizes[name] < 1]:
        raise BackendError(
            f"model.name: the configuration of {base!r} is invalid: {wrong[0]} must be above 0, got {sizes[wrong[0]]}; "
            "download the model again"
        )
    if architecture.is_encoder_decoder:
        raise BackendError(
            f"model.name: {base!r} is an encoder-decoder model, got {architecture.model_type}; use a causal language model"
        )
    # transformers loads mxfp4, the format of gpt-oss, as ordinary weights where its kernels are missing.
    if (stored := getattr(architecture, "quantization_config", None)) and stored.get("quant_method") != "mxfp4":
        raise BackendError(f"model.name: quantized weights are not supported, got {base!r}; use the 16-bit model")
    return architecture


def context_length(architecture: PreTrainedConfig | None, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the longest sequence that position embeddings and tokenizer allow, tokens; None if neither has a limit."""
    text = None if architecture is None else architecture.get_text_config()
    limits = [getattr(tokenizer, "model_max_length", None), getattr(text, "max_position_embeddings", None)]
    return min((int(limit) for limit in limits if limit and limit < 1 << 30), default=None)


@contextlib.contextmanager
def deprecations_hidden() -> Iterator[None]:
    """Context that hides deprecation warnings of transformers about calls by PEFT or cookbook, which no user can fix."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        yield


def recompute_activations(network: PreTrainedModel, on: bool) -> bool:
    """Switch activation checkpointing on or off. Return ``on``.

    The last layer keeps its activations in any case: it may skip tokens (``trim_last_layer``), which a recomputation would not
    know of. So a pass has the same bits with and without checkpointing. The backward pass starts with that layer, so this costs
    memory only while the output head is computed.

    Raises:
        ConfigError: the model does not support activation checkpointing.
    """
    if on and not network.supports_gradient_checkpointing:
        name = type(network).__name__
        raise ConfigError(f"backend.activation_checkpointing: {name} cannot recompute activations, got true; set it to auto")
    with deprecations_hidden():
        if on:
            network.gradient_checkpointing_enable({"use_reentrant": False})
            if (stack := layer_stack(network)) is not None and keeps_last_layer(network):
                last: Any = stack[-1]
                last.gradient_checkpointing = False
        elif network.supports_gradient_checkpointing:
            network.gradient_checkpointing_disable()
    return on


def layer_stack(network: PreTrainedModel) -> torch.nn.ModuleList | None:
    """Return the layers of the network; None if no list of modules, or more than one, has their number."""
    count = getattr(network.config.get_text_config(), "num_hidden_layers", 0)
    stacks = [module for module in network.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count]
    return stacks[0] if len(stacks) == 1 and count else None


def keeps_last_layer(network: PreTrainedModel) -> bool:
    """Whether the last layer keeps its activations if the others recompute theirs."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    stack = layer_stack(network)
    return stack is not None and isinstance(stack[-1], GradientCheckpointingLayer)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``config.name``, with ``config.add_tokens``.

    ``config.chat_template``, if set, replaces its chat template. The tokenizer carries ``config.chat_template_kwargs`` and
    saves them in tokenizer_config.json, so a checkpoint is sampled with the options that it was trained with.
    """
    return _tokenizer(config)[0]


def _tokenizer(config: ModelConfig) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """Return the tokenizer, and the ids of the added tokens that it did not have before."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    _must_exist(config.name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.name, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except StrictDataclassError as error:
        # transformers reads config.json to choose the class of the tokenizer.
        raise _invalid_configuration(config.name, error) from None
    except (OSError, ValueError, KeyError, json.JSONDecodeError, ImportError) as error:
        raise BackendError(_cannot_load("tokenizer", config.name, error)) from None
    if config.chat_template:
        try:
            tokenizer.chat_template = Path(config.chat_template).read_text()
        except OSError as error:
            raise ConfigError(f"model.chat_template: cannot read {config.chat_template!r}: {error.strerror}") from None
    if config.chat_template_kwargs:
        tokenizer.init_kwargs[TEMPLATE_OPTIONS] = dict(config.chat_template_kwargs)
    stop_tokens.configure(tokenizer, _stored_end_tokens(config))
    return tokenizer, vocabulary.extend(tokenizer, config.add_tokens) if config.add_tokens else []


def resolved(name: str) -> str:
    """Return the absolute path of a folder; a hub id unchanged."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _network(config: ModelConfig, base: str, seed: int) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    architecture = _architecture(config, base)
    # None: transformers chooses, sdpa if the model supports it.
    attention = None if config.attn_implementation == "auto" else config.attn_implementation
    common = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        if config.random:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                return AutoModelForCausalLM.from_config(architecture, dtype=DTYPES[config.dtype], attn_implementation=attention)
        network, info = AutoModelForCausalLM.from_pretrained(
            base, dtype=DTYPES[config.dtype], attn_implementation=attention, output_loading_info=True, **common
        )
    except UnpicklingError as error:
        # The rest of the message advises to run the code in the file.
        raise BackendError(
            f"model.name: cannot load the weights in {base!r}: {first_line(error).partition('.')[0]}; pass *.safetensors files"
        ) from None
    except (OSError, ValueError, KeyError, json.JSONDecodeError, RuntimeError, ImportError, SafetensorError) as error:
        if attention and (isinstance(error, ImportError) or "attention" in str(error) or "attn_" in str(error)):
            raise ConfigError(
                f"model.attn_implementation: {first_line(error).rstrip(' .')}, got {attention}; set it to auto, or install "
                "the missing package"
            ) from None
        if "Unrecognized configuration class" in str(error):
            names = ", ".join(architecture.architectures or [architecture.model_type])
            raise BackendError(
                f"model.name: {base!r} is not a causal language model of transformers, got {names}; use a text model"
            ) from None
        raise BackendError(_cannot_load("weights", base, error)) from None
    # transformers would initialize missing weights at random.
    if missing := sorted(info["missing_keys"]):
        classes = ", ".join(name for name in architecture.architectures or () if name != type(network).__name__)
        of = f", and its config.json names {classes}" if classes else ""
        raise BackendError(
            f"model.name: {base!r} lacks {len(missing)} of the model's weights, the first is {missing[0]}{of}; "
            "use a complete causal language model"
        )
    return network


def _size(base: str) -> str:
    """Return the size of a folder's weights, or the size downloaded so far from the hub, for the status line."""
    from huggingface_hub import constants

    blobs = Path(constants.HF_HUB_CACHE, f"models--{base.replace('/', '--')}", "blobs")
    is_local = Path(base).is_dir()
    files = Path(base).glob("*.safetensors") if is_local else blobs.glob("*")
    try:
        size = sum(file.stat().st_size for file in files)
    # A file that is being downloaded may be renamed between glob and stat.
    except OSError:
        return ""
    return (f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB") + ("" if is_local else " so far")


def add_lora(network: PreTrainedModel, config: ModelConfig, seed: int, token_ids: Sequence[int] = ()) -> PreTrainedModel:
    """Add a new LoRA adapter to the network, initialized from ``seed``. ``token_ids``: tokens whose embeddings are trained."""
    from peft import LoraConfig, get_peft_model

    modules = config.lora_target_modules
    width = network.config.get_text_config().hidden_size
    if config.lora_rank > width:
        raise ConfigError(
            f"model.lora_rank: must be at most the model's hidden size of {width}, got {config.lora_rank}; lower it, or set 0"
        )
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type="CAUSAL_LM",
    )
    unfit = _not_adaptable(network, lora) if modules == lora_targets.ALL_LINEAR else []
    targets = lora_targets.choose(network, modules, unfit, lora)
    if unfit:
        name, kind = type(network).__name__, network.config.model_type
        log.info(f"LoRA: {name} ({kind}) gets no adapter on {', '.join(unfit)}, which it does not use as plain linear layers")
    if targets.modules == lora_targets.ALL_LINEAR:
        lora.exclude_modules = unfit or None
    lora.target_modules = targets.modules if isinstance(targets.modules, str) else set(targets.modules)
    lora.target_parameters = targets.parameters or None
    lora.trainable_token_indices = vocabulary.trainable_rows(network, token_ids)
    if targets.parameters and config.lora_dropout:
        raise ConfigError(
            f"model.lora_dropout: adapters on {', '.join(targets.parameters)} have no dropout, got {config.lora_dropout}; "
            "set it to 0, or name linear layers in model.lora_target_modules"
        )
    with torch.random.fork_rng(), deprecations_hidden():
        torch.manual_seed(seed)
        try:
            return _multiplying_in_model_dtype(_with_one_product(get_peft_model(network, lora)))
        except ValueError as error:
            raise ConfigError(f"model.lora_target_modules: {first_line(error)}") from None


def _not_adaptable(network: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Return the names of linear layers that cannot have an adapter.

    These are layers that return more than a product, such as routers that return a tuple, and layers whose weight the model
    uses without calling the layer, which PEFT rejects.
    """
    try:  # a private function of PEFT, which may be renamed
        from peft.tuners.tuners_utils import _check_lora_target_modules_mamba as check
    except ImportError:
        check = None
    unfit = set()
    for path, module in network.named_modules():
        name = path.rpartition(".")[2]
        if not isinstance(module, torch.nn.Linear):
            continue
        if type(module).forward is not torch.nn.Linear.forward and not _returns_a_tensor(module):
            unfit.add(name)
        elif check is not None:
            try:
                check(lora, network, name)
            except ValueError:
                unfit.add(name)
    return sorted(unfit)


@torch.no_grad()
def _returns_a_tensor(layer: torch.nn.Linear) -> bool:
    try:
        out = layer(layer.weight.new_zeros(1, 2, layer.in_features))
    except Exception:  # noqa: BLE001 - a layer of an unknown architecture may take other arguments and raise any error
        return False
    return isinstance(out, torch.Tensor)


class OneProductLinear(torch.nn.Linear):
    """Linear layer that multiplies all tokens of its input in one product, even if its weight is frozen.

    If the input is strided, such as the last position of each prompt, and the weight has no gradient, torch multiplies each
    sequence by a view of the weight. At medium precision and in bfloat16, oneDNN copies the weight for each sequence: 113 MB
    per prompt in the output layer of SmolLM2-135M.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input W^T + b``."""
        # torch's own condition for one product, which does not ignore the strides of dimensions of one element.
        if input.ndim == 2 or (input.ndim == 3 and input.stride(0) == input.stride(1) * input.shape[1]):
            return super().forward(input)
        rows = input.reshape(-1, input.shape[-1])
        return super().forward(rows).view(*input.shape[:-1], -1)


class AdapterLinear(torch.nn.Linear):
    """Factor of an adapter with float32 weights that multiplies in the dtype of its input.

    PEFT converts the input to float32 in front of each factor, and autograd keeps the copy: 4 bytes per number of the input of
    each adapted layer. The weights are smaller than the input, so they are converted.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input W^T + b``."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return torch.nn.functional.linear(input, self.weight.to(input.dtype), bias)


def _multiplying_in_model_dtype(network: PreTrainedModel) -> PreTrainedModel:
    """Make the adapters of 16-bit layers multiply in the dtype of the layer, over float32 weights. Return ``network``."""
    from peft.tuners.lora import Linear as AdaptedLinear

    for module in network.modules():
        if isinstance(module, AdaptedLinear) and module.get_base_layer().weight.element_size() < 4:
            factors = [*module.lora_A.values(), *module.lora_B.values()]
            if all(type(factor) is torch.nn.Linear for factor in factors):
                module.cast_input_dtype_enabled = False
                for factor in factors:
                    factor.__class__ = AdapterLinear
    return network


def _with_one_product(network: PreTrainedModel) -> PreTrainedModel:
    """Make every frozen linear layer of ``network`` a :class:`OneProductLinear`, and return ``network``."""
    for module in network.modules():
        # A wrapper may have replaced the forward of the instance.
        if type(module) is torch.nn.Linear and not module.weight.requires_grad and "forward" not in vars(module):
            module.__class__ = OneProductLinear
    return network


def _load_adapter(network: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    from peft import PeftConfig, PeftModel

    try:
        with deprecations_hidden():
            lora: Any = PeftConfig.from_pretrained(config.name)
            lora.lora_dropout = config.lora_dropout
            return _multiplying_in_model_dtype(
                _with_one_product(PeftModel.from_pretrained(network, config.name, is_trainable=True, config=lora))
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise BackendError(_cannot_load("adapter", config.name, error)) from None


def _stored_adapter(network: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    """Add an adapter with the layers of the adapter in the model's folder, and with fresh weights."""
    from peft import PeftConfig, get_peft_model

    try:
        with deprecations_hidden():
            lora: Any = PeftConfig.from_pretrained(config.name)
            lora.inference_mode = False
            return _multiplying_in_model_dtype(_with_one_product(get_peft_model(network, lora)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackendError(_cannot_load("adapter", config.name, error)) from None


def _as_adapter(config: ModelConfig, adapter: AdapterConfig) -> ModelConfig:
    """Return ``config`` with rank, alpha and dropout of the adapter in its folder.

    If ``model.dropout`` is set, the adapter's dropout is ``model.lora_dropout`` in place of its stored one.
    """
    if config.lora_rank not in (0, adapter["r"]):
        raise ConfigError(
            f"model.lora_rank: {config.name} holds an adapter of rank {adapter['r']}, got {config.lora_rank}; set it to 0"
        )
    dropout = adapter["lora_dropout"] if config.dropout is None else config.lora_dropout
    return replace(config, lora_rank=adapter["r"], lora_alpha=adapter["lora_alpha"], lora_dropout=dropout)


def _adapter_config(name: str) -> AdapterConfig | None:
    path = Path(name) / LORA_FILE
    return json.loads(path.read_text()) if path.is_file() else None


def refuse_missing_folder(name: str) -> None:
    """Raise BackendError if ``name`` is written like a path and the folder does not exist. No path is looked up on the hub."""
    if name.endswith(".gguf"):
        raise BackendError(
            f"model.name: a GGUF file is not a model folder, got {name!r}; "
            "convert it with `python scripts/from_gguf.py FILE FOLDER` of cookbook's repository"
        )
    spelled_as_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if spelled_as_path and not Path(name).is_dir():
        raise BackendError(f"model.name: no such folder {name!r}; pass a local folder or a Hugging Face hub id")


def _must_exist(name: str) -> None:
    refuse_missing_folder(name)
    if not Path(name).is_dir() and not hub.answers():
        raise BackendError(
            f"model.name: the folder {name!r} does not exist, and the Hugging Face hub is unreachable; "
            "pass a local folder, or set HF_HUB_OFFLINE=1 if the model was downloaded before"
        )


def _invalid_configuration(name: str, error: Exception) -> BackendError:
    reason = " ".join(str(error).split())
    return BackendError(f"model.name: the configuration of {name!r} is invalid: {reason}; download the model again")


def _cannot_load(what: str, name: str, error: BaseException) -> str:
    # transformers reports an import that Ctrl-C stopped as a missing package.
    if is_interrupt(error):
        raise KeyboardInterrupt from error
    if Path(name).is_dir():
        described = any((Path(name) / file).is_file() for file in ("config.json", LORA_FILE))
        problem = first_line(error).rstrip(" .:") if described else "no config.json"
        remedy = "pass a folder with config.json, tokenizer files and *.safetensors"
        if "trust_remote_code" in str(error):
            problem, remedy = "it needs Python code of the repository", f"read the code, then set {REMOTE_CODE}"
        elif "ignore_mismatched_sizes" in str(error):
            problem = "the weights have other shapes than config.json says"
        elif described and "instantiate the backend tokenizer" in str(error) and not (Path(name) / "tokenizer.json").is_file():
            problem = "no tokenizer.json"
        elif pointer := _pointer(Path(name)):
            problem, remedy = f"{pointer} is a pointer of Git LFS and not the file", "download it with git lfs pull"
        return f"model.name: cannot load the {what} in {name!r}: {problem}; {remedy}"
    if "trust_remote_code" in str(error):
        return f"model.name: {name!r} needs Python code of its repository; read the code, then set {REMOTE_CODE}"
    return (
        f"model.name: cannot load {name!r}: no local folder has this name, and the Hugging Face hub did not provide the model "
        f"({first_line(error)}); check the name and your network, or pass a local folder"
    )


def _pointer(folder: Path) -> str:
    """Return the name of a file in which Git LFS has left a pointer to the weights or to the tokenizer; empty without one."""
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("tokenizer*")]):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                return path.name
    return ""


CACHE_LINE = 64  # bytes


class SharedBase:
    """Frozen base network whose weights several models share. ``name``: the folder or hub id that it was loaded from."""

    def __init__(self, name: str, network: PreTrainedModel) -> None:
        self.name = name
        self._network = network.requires_grad_(False)
        # Scheme of the weights; None: they are not quantized.
        self.quantize = next((layer.scheme for _, layer in quantized.layers(network)), None)

    def under_adapter(self) -> PreTrainedModel:
        """Return a frozen network that shares the weights, for an adapter on top. Copies modules, but no tensors."""
        tensors = itertools.chain(self._network.parameters(), self._network.buffers())
        return copy.deepcopy(self._network, {id(tensor): tensor for tensor in tensors})

    def copied(self) -> PreTrainedModel:
        """Return a network with a copy of the weights, all trainable.

        Raises:
            ConfigError: the weights are quantized.
        """
        if self.quantize:
            raise ConfigError("model.quantize: quantized weights cannot be trained; train a LoRA adapter on them")
        return network_copy(self._network).requires_grad_(True)


def network_copy(network: PreTrainedModel, shared: Mapping[int, Tensor] | None = None) -> PreTrainedModel:
    """Return a copy of ``network`` that computes the same bits; tensors whose ids are keys of ``shared`` are not copied.

    On a CPU, the summation order of a matrix product depends on the alignment of its operands to cache lines. Weights loaded
    from a file begin after its header, while torch aligns new tensors, so gradients of a plain copy differ by rounding.
    """
    duplicate = copy.deepcopy(network, dict(shared or {}))
    for original, copied in zip(network.parameters(), duplicate.parameters(), strict=True):
        if (
            original is not copied
            and original.data_ptr() % CACHE_LINE
            and original.device.type == "cpu"
            and original.is_contiguous()
        ):
            copied.data = _aligned_copy(original.detach())
    return duplicate


def _aligned_copy(tensor: Tensor) -> Tensor:
    """Return a copy that begins at the same offset in a cache line."""
    line = CACHE_LINE // tensor.element_size()
    buffer = torch.empty(tensor.numel() + line, dtype=tensor.dtype)
    start = (tensor.data_ptr() - buffer.data_ptr()) % CACHE_LINE // tensor.element_size()
    return buffer[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
