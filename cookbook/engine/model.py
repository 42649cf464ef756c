"""Loading a causal language model and its tokenizer, from the Hugging Face hub or a local folder."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from cookbook import hub, paths, terminal
from cookbook.engine.planning import Layouts
from cookbook.engine.shared import SharedBase
from cookbook.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from cookbook.engine.decoded_rows import Way

log = logging.getLogger("cookbook")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
AUTO = "auto"  # dtype: as the model's files have it
LORA_FILE = "adapter_config.json"


def _is_needed(record: logging.LogRecord) -> bool:
    """Whether a message of bitsandbytes concerns more than its 4-bit product on CPUs, which cookbook never calls."""
    return not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")


# peft imports bitsandbytes, which prints this warning on every use of LoRA.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_needed)


@dataclass
class ModelConfig:
    """Which model, and which of its parameters are trained. ``conf/model/*.yaml`` says what each field means."""

    name: str
    random: bool = False
    revision: str | None = None
    dtype: str = "float32"
    lora_rank: int = 0
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: Any = "all-linear"
    chat_template: str | None = None
    attn_implementation: str = "auto"
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (AUTO, *DTYPES):
            raise ConfigError(f"model.dtype: expected one of {', '.join((AUTO, *DTYPES))}, got {self.dtype!r}")
        if self.lora_rank < 0:
            raise ConfigError(f"model.lora_rank must be >= 0, got {self.lora_rank}; 0 trains every parameter")
        if self.router_aux_loss_coef is not None and not 0 <= self.router_aux_loss_coef < float("inf"):
            raise ConfigError(f"model.router_aux_loss_coef must be >= 0, got {self.router_aux_loss_coef}; 0 leaves it out")
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError(f"model.lora_dropout must be at least 0 and below 1, got {self.lora_dropout}")


@dataclass
class LanguageModel:
    """A model with its tokenizer. ``network`` is the Hugging Face module, PEFT-wrapped when ``lora_rank`` > 0."""

    network: Any
    tokenizer: Any
    config: ModelConfig
    device: torch.device
    told: set[str] = field(default_factory=set)  # choices that the log has explained
    ways: dict[bool, Way] = field(default_factory=dict)  # to decode, with and without shared prompts, as far as tried

    @property
    def max_length(self) -> int:
        """The longest sequence the positions allow, tokens."""
        return context_length(self.network.config, self.tokenizer) or 1 << 30

    @functools.cached_property
    def layouts(self) -> Layouts:
        """What a row may hold. Asking gives the model cookbook's attention, where that is exact."""
        from cookbook.engine import probe  # it imports this module

        return probe.layouts(self)

    def way_to_decode(self, longest: int) -> Way:
        """The fastest way to decode rows of up to ``longest`` tokens that gives a plain forward pass's logprobs."""
        from cookbook.engine import probe

        return probe.way_to_decode(self, longest)

    @property
    def class_name(self) -> str:
        """Of the model under any adapter."""
        network = self.network.get_base_model() if self.is_lora else self.network
        return type(network).__name__

    def tell(self, subject: str, line: str) -> None:
        """Log ``line`` once for each ``subject`` and model, its copies included."""
        if subject not in self.told:
            self.told.add(subject)
            log.info(line)

    @property
    def is_lora(self) -> bool:
        return hasattr(self.network, "peft_config")

    @property
    def adapter_is_idle(self) -> bool:
        """Whether there is a LoRA adapter that changes nothing yet: of its two factors one is all zeros, as it began."""
        factors = [p for name, p in self.trainable() if "lora_B" in name or "lora_embedding_A" in name]
        return bool(factors) and not any(factor.any() for factor in factors)

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that get a gradient, in a fixed order; tied weights once."""
        return [(name, p) for name, p in self.network.named_parameters() if p.requires_grad]

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.network.parameters())


def load(config: ModelConfig, device: torch.device, seed: int, shared: SharedBase | None = None) -> LanguageModel:
    """Loads (or, with ``random``, initializes from ``seed``) a model and wraps it for LoRA when asked.

    A folder that holds a PEFT adapter is loaded on top of the base model it names, and trained further. Where that base is
    ``shared``, its weights are not read again, and stay one copy in memory under an adapter.

    Raises:
        BackendError: nothing to load there, or not a causal language model, in one line.
        ConfigError: a ``lora_rank`` that is not the adapter's.
    """
    adapter = _adapter_config(config.name)
    # An adapter remembers the path of its base, and may be loaded from another working directory.
    base = resolved(adapter["base_model_name_or_path"] if adapter else config.name)
    with terminal.doing(f"loading the model {paths.shown(Path(base))}", detail=functools.partial(_size, base)):
        return _load(config, device, seed, shared, adapter, base)


def _load(
    config: ModelConfig, device: torch.device, seed: int, shared: SharedBase | None, adapter: dict[str, Any] | None, base: str
) -> LanguageModel:
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # the run has a display of its own
    transformers_logging.set_verbosity_error()  # what its report of a load says, _network checks
    tokenizer = load_tokenizer(config)
    config = with_dtype(config)
    if shared is None or shared.name != base:
        network = _network(config, base, seed).to(device)
    else:
        network = shared.under_adapter() if adapter or config.lora_rank else shared.copied()
    if adapter:
        network = _load_adapter(network, config.name)
        config = _as_adapter(config, adapter)
    elif config.lora_rank:
        network = _add_lora(network, config, seed)
    network.eval()
    return LanguageModel(network, tokenizer, config, device)


def fresh_network(config: ModelConfig) -> Any:
    """The network that ``config`` describes, adapter included, with random weights: nothing but its shapes is read.

    Raises:
        BackendError: no such model.
        ConfigError: an adapter that the model cannot have.
    """
    adapter = _adapter_config(config.name)
    base = adapter["base_model_name_or_path"] if adapter else config.name
    with terminal.doing(f"reading the architecture of {base}"):
        network = _network(replace(with_dtype(config), random=True), base, seed=0)
    if adapter:
        config = _as_adapter(config, adapter)
    return _add_lora(network, config, seed=0) if config.lora_rank else network


def with_dtype(config: ModelConfig) -> ModelConfig:
    """``config`` with the type that ``dtype: auto`` stands for: bfloat16 if the model's files have 16 bits, else float32.

    Raises:
        BackendError: no such model.
    """
    if config.dtype != AUTO:
        return config
    from transformers import AutoConfig

    _must_exist(config.name)
    adapter = _adapter_config(config.name)
    base = adapter["base_model_name_or_path"] if adapter else config.name
    try:
        architecture = AutoConfig.from_pretrained(
            resolved(base), revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise BackendError(_cannot_load("configuration", base, error)) from None
    stored = architecture.dtype or architecture.get_text_config().dtype
    return replace(config, dtype="bfloat16" if stored in (torch.bfloat16, torch.float16) else "float32")


def context_length(architecture: Any, tokenizer: Any) -> int | None:
    """The longest sequence, tokens, that the positions and the tokenizer allow; None when neither knows a limit.

    ``architecture`` is a Hugging Face config, or None.
    """
    limits = [getattr(tokenizer, "model_max_length", None)]
    if architecture is not None:
        limits.append(getattr(architecture.get_text_config(), "max_position_embeddings", None))
    return min((int(limit) for limit in limits if limit and limit < 1 << 30), default=None)


@contextlib.contextmanager
def deprecations_hidden() -> Iterator[None]:
    """Hides what transformers tells PEFT, or us, about names that older versions need: no user can act on it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        yield


def recompute_activations(network: Any, on: bool) -> None:
    """Has the backward pass compute again what the layers found, or keep it, whatever the network did before.

    Raises:
        ConfigError: it cannot.
    """
    if on and not network.supports_gradient_checkpointing:
        name = type(network).__name__
        raise ConfigError(f"backend.activation_checkpointing: {name} cannot recompute activations, got true; set it to auto")
    with deprecations_hidden():
        if on:
            network.gradient_checkpointing_enable({"use_reentrant": False})
        elif network.supports_gradient_checkpointing:
            network.gradient_checkpointing_disable()


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of ``config.name``, with ``config.chat_template`` in place of its own when given."""
    from transformers import AutoTokenizer

    _must_exist(config.name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.name, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError, json.JSONDecodeError, ImportError) as error:
        raise BackendError(_cannot_load("tokenizer", config.name, error)) from None
    if config.chat_template:
        try:
            tokenizer.chat_template = Path(config.chat_template).read_text()
        except OSError as error:
            raise ConfigError(f"model.chat_template: cannot read {config.chat_template!r}: {error.strerror}") from None
    return tokenizer


def resolved(name: str) -> str:
    """A folder's whole path; a hub id as it is."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _network(config: ModelConfig, base: str, seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    attention = None if config.attn_implementation == "auto" else config.attn_implementation  # None: sdpa where it is exact
    common = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        if config.random:
            architecture = AutoConfig.from_pretrained(base, **common)
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                return AutoModelForCausalLM.from_config(architecture, dtype=DTYPES[config.dtype], attn_implementation=attention)
        network, found = AutoModelForCausalLM.from_pretrained(
            base,
            dtype=DTYPES[config.dtype],
            attn_implementation=attention,
            output_loading_info=True,
            **common,
        )
    except (OSError, ValueError, KeyError, json.JSONDecodeError, RuntimeError, ImportError, SafetensorError) as error:
        if attention and (isinstance(error, ImportError) or "attention" in str(error) or "attn_" in str(error)):
            raise ConfigError(
                f"model.attn_implementation: {_first_line(error).rstrip(' .')}, got {attention}; set it to auto, or install "
                "what it needs"
            ) from None
        raise BackendError(_cannot_load("weights", base, error)) from None
    if missing := sorted(found["missing_keys"]):  # they would be made up, and the run would train on noise
        raise BackendError(
            f"model.name: {base!r} lacks {len(missing)} of the model's weights, {missing[0]} the first; use a whole one"
        )
    return network


def _size(base: str) -> str:
    """Return the size of a folder's weights, or of what has been downloaded of a model of the hub, for the status line."""
    from huggingface_hub import constants

    blobs = Path(constants.HF_HUB_CACHE, f"models--{base.replace('/', '--')}", "blobs")
    is_local = Path(base).is_dir()
    files = Path(base).glob("*.safetensors") if is_local else blobs.glob("*")
    try:
        size = sum(file.stat().st_size for file in files)
    except OSError:  # a file is being renamed
        return ""
    return (f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB") + ("" if is_local else " so far")


def _add_lora(network: Any, config: ModelConfig, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    modules = config.lora_target_modules
    width = network.config.get_text_config().hidden_size
    if config.lora_rank > width:
        raise ConfigError(
            f"model.lora_rank: {config.lora_rank} is more than the model's hidden size of {width}, so an adapter would be "
            "larger than what it adapts; lower it, or set it to 0 to train every parameter"
        )
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type="CAUSAL_LM",
    )
    if modules == "all-linear" and (unfit := _not_adaptable(network, lora)):
        lora.exclude_modules = unfit
        name, kind = type(network).__name__, network.config.model_type
        log.info(f"LoRA: {name} ({kind}) gets no adapter on {', '.join(unfit)}, which it does not use as plain linear layers")
    with torch.random.fork_rng(), deprecations_hidden():
        torch.manual_seed(seed)
        try:
            return get_peft_model(network, lora)
        except ValueError as error:
            raise ConfigError(f"model.lora_target_modules: {_first_line(error)}") from None


def _not_adaptable(network: Any, lora: Any) -> list[str]:
    """Names of linear layers that cannot have an adapter.

    Some return more than a product, such as routers that return a tuple. Of others the model reads the weight past the layer,
    and PEFT refuses them.
    """
    try:
        from peft.tuners.tuners_utils import _check_lora_target_modules_mamba as check
    except ImportError:  # PEFT's own, of no promised name
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
    except Exception:  # noqa: BLE001 - the layer is of any architecture and takes something else
        return False
    return isinstance(out, torch.Tensor)


def _load_adapter(network: Any, folder: str) -> Any:
    from peft import PeftModel

    try:
        with deprecations_hidden():
            return PeftModel.from_pretrained(network, folder, is_trainable=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise BackendError(_cannot_load("adapter", folder, error)) from None


def _as_adapter(config: ModelConfig, adapter: dict[str, Any]) -> ModelConfig:
    """``config`` with the facts of the adapter that was loaded."""
    if config.lora_rank not in (0, adapter["r"]):
        raise ConfigError(
            f"model.lora_rank: {config.name} holds an adapter of rank {adapter['r']}, got {config.lora_rank}; set it to 0"
        )
    found = {name: adapter[name] for name in ("lora_alpha", "lora_dropout")}
    return replace(config, lora_rank=adapter["r"], **found)


def _adapter_config(name: str) -> dict[str, Any] | None:
    path = Path(name) / LORA_FILE
    return json.loads(path.read_text()) if path.is_file() else None


def refuse_missing_folder(name: str) -> None:
    """Raises BackendError: there is no such folder. A name that is spelled like a path is never looked up on the hub."""
    spelled_as_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if spelled_as_path and not Path(name).is_dir():
        raise BackendError(f"model.name: no such folder {name!r}; pass a local folder or a Hugging Face hub id")


def _must_exist(name: str) -> None:
    refuse_missing_folder(name)
    if not Path(name).is_dir() and not hub.answers():
        raise BackendError(
            f"model.name: there is no folder {name!r} here, and the Hugging Face hub cannot be reached for it; pass a folder, "
            "or set HF_HUB_OFFLINE=1 if it was downloaded before"
        )


def _cannot_load(what: str, name: str, error: BaseException) -> str:
    if Path(name).is_dir():
        described = any((Path(name) / file).is_file() for file in ("config.json", LORA_FILE))
        problem = _first_line(error).rstrip(" .:") if described else "no config.json"
        whole = "a model folder has config, tokenizer and *.safetensors"
        return f"model.name: cannot load the {what} in {name!r}: {problem}; {whole}"
    return (
        f"model.name: cannot load {name!r}: there is no such local folder, and the Hugging Face hub did not provide it "
        f"({_first_line(error)}); check the name, your network, or pass a local folder"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
