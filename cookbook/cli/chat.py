"""``cookbook chat``: a conversation with a run or a model in a terminal; without a terminal, one answer per line of input."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cookbook import terminal
from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.checkpoints import manifest, store
from cookbook.data import Renderer
from cookbook.data.render import TextStream
from cookbook.engine.model import ModelConfig
from cookbook.errors import CheckpointError, ConfigError, CookbookError, DataError
from cookbook.run import folder as run_folder
from cookbook.run.builder import collect_garbage_from_here
from cookbook.run.folder import sampling_target
from cookbook.types import JsonObject, SamplingParams

COMMANDS = {
    "/checkpoint": "list the checkpoints of the run; /checkpoint N: continue with the one of step N",
    "/base": "also ask the base model, or stop asking it",
    "/system": "start a new conversation; /system TEXT: with this system prompt",
    "/quit": "end; also /exit, or Ctrl-D",
    "/help": "show these commands",
}
KEYS = "Ctrl-C: stop the answer; /quit: end"
END = ("/quit", "/exit")


@dataclass(frozen=True)
class ChatOptions:
    """Options of the command: ``system`` None: no system prompt; ``temperature`` 0: always the most likely token."""

    system: str | None = None
    base: bool = False
    max_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0
    chat_template_kwargs: JsonObject | None = None


class ChatModel:
    """A loaded model, and its own side of the conversation.

    Raises:
        CookbookError: the model cannot be loaded, or has no chat template.
    """

    def __init__(self, label: str, name: str, options: ChatOptions) -> None:
        self.label = label
        self.name = name
        self._options = options
        with terminal.doing(f"loading {name}", plain_after_s=terminal.NEVER_S):
            self._trainer = LocalTrainer(ModelConfig(name, chat_template_kwargs=options.chat_template_kwargs), LocalConfig())
            self._sampler = self._trainer.live_sampler(0).result()
            self._renderer = Renderer(self._trainer.tokenizer, self._trainer.max_length)
        if not getattr(self._trainer.tokenizer, "chat_template", None):
            self.close()
            raise ConfigError(f"chat: {name} has no chat template; complete plain text with: cookbook sample {name} PROMPT")
        if manifest.is_of_text(Path(name)):
            self.close()
            raise ConfigError(
                f"chat: {name} was trained on texts without a chat template; complete plain text with: "
                f"cookbook sample {name} PROMPT"
            )
        self.messages: list[dict[str, str]] = []
        self.restart(options.system)

    def restart(self, system: str | None) -> None:
        """Forget the conversation."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def answer(self, text: str) -> Generator[str, None, None]:
        """Yield the answer to the user's message in parts. Both are part of the conversation, also if the caller stops early.

        Raises:
            DataError: the conversation does not fit the model's context; the message is dropped.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._renderer.prompt_tokens(messages)
        free = self._trainer.max_length - len(prompt)
        if free < 1:
            raise DataError(
                f"chat: the conversation has {len(prompt):,} tokens and the context of {self.label} "
                f"{self._trainer.max_length:,}; start a new conversation with /system"
            )
        options = self._options
        # Each turn draws with its own seed.
        seed = options.seed + len(messages)
        params = SamplingParams(min(options.max_tokens, free), temperature=options.temperature, seed=seed)
        # A prompt that opens the reasoning has printed the start of the answer.
        stream, parts = TextStream(self._renderer, ()), [self._renderer.opened_reasoning(prompt)]
        chunks = self._sampler.stream(prompt, 1, params)
        try:
            if parts[0]:
                yield parts[0]
            with contextlib.closing(chunks):  # type: ignore[type-var]
                for chunk in chunks:
                    parts.append(stream.add(chunk.tokens, is_last=chunk.stop_reason is not None))
                    yield parts[-1]
        finally:
            self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]

    def close(self) -> None:
        self._trainer.close()


@dataclass
class ChatSession:
    """The models that answer, and the commands that change them."""

    target: str
    options: ChatOptions
    models: list[ChatModel] = field(default_factory=list)

    def __post_init__(self) -> None:
        name = sampling_target(self.target)
        self.models = [ChatModel(self._label(name), name, self.options)]
        if self.options.base:
            self.toggle_base()
        self.system = self.options.system

    def toggle_base(self) -> None:
        """Load the base model of the first model, or close it."""
        if len(self.models) > 1:
            self.models.pop().close()
            return
        base = _base_of(self.models[0].name)
        self.models.append(ChatModel("base", base, self.options))

    def switch(self, step: str) -> None:
        """Continue the conversation with another checkpoint of the run."""
        saved = {int(path.name.removeprefix("step-")): path for path in self.checkpoints()}
        if not step.isdecimal() or int(step) not in saved:
            raise ConfigError(f"chat: no checkpoint of step {step!r}; choose one of {', '.join(map(str, saved))}")
        # A checkpoint whose weights are on a server has the same error as the newest one.
        name = str(saved[int(step)])
        manifest.verify(Path(name))
        old = self.models[0]
        self.models[0] = ChatModel(self._label(name), name, self.options)
        self.models[0].messages = old.messages
        old.close()

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints of the run, oldest first. Raises ConfigError: the conversation is not with a run."""
        if not (Path(self.target) / run_folder.CONFIG).is_file():
            raise ConfigError(f"chat: {self.target} is not a run, so there is no other checkpoint; start cookbook chat RUN")
        return store.all_steps(Path(self.target) / "checkpoints")

    def command(self, line: str) -> Iterator[str]:
        """Obey a line that begins with ``/``, and yield lines to print."""
        word, _, argument = line.partition(" ")
        argument = argument.strip()
        if word == "/checkpoint" and argument:
            self.switch(argument)
            yield f"now {self.models[0].label}"
        elif word == "/checkpoint":
            yield ", ".join(path.name for path in self.checkpoints())
        elif word == "/base":
            self.toggle_base()
            yield f"now {' and '.join(model.label for model in self.models)}"
        elif word == "/system":
            for model in self.models:
                model.restart(argument or None)
            yield "new conversation"
        elif word == "/help":
            yield from (f"{name:12} {text}" for name, text in COMMANDS.items())
        else:
            raise ConfigError(f"chat: unknown command {word!r}; expected one of {', '.join(COMMANDS)}")

    def close(self) -> None:
        for model in self.models:
            model.close()

    def _label(self, name: str) -> str:
        folder = Path(name)
        return folder.name if folder.parent.name == "checkpoints" else self.target


def _base_of(name: str) -> str:
    """Return the model that a checkpoint was trained from. Raises CheckpointError: the model is not a checkpoint."""
    if not (Path(name) / manifest.NAME).is_file():
        raise CheckpointError(f"chat: {name} is not a checkpoint of a run, so it has no base model; leave out --base")
    facts = manifest.read(Path(name))
    if facts.get("run", {}).get("identity", {}).get("model", {}).get("random"):
        raise CheckpointError(f"chat: {name} was trained from random weights, so it has no base model; leave out --base")
    return str(facts["base_model"])


def run(target: str, options: ChatOptions) -> None:
    """Talk until the input ends.

    Raises:
        CookbookError: the model cannot be loaded; without a terminal also: a line is invalid.
    """
    is_terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
    with contextlib.closing(ChatSession(target, options)) as conversation:
        collect_garbage_from_here()
        if is_terminal:
            print(f"{' and '.join(model.label for model in conversation.models)}. /help: commands; {KEYS}")
        for line in _lines(is_terminal):
            if line in END:
                return
            try:
                _reply(conversation, line)
            except CookbookError as error:
                if not is_terminal:
                    raise
                print(f"error: {error}", file=sys.stderr)
            except KeyboardInterrupt:
                if not is_terminal:
                    raise
                print(" (stopped)")


def _lines(is_terminal: bool) -> Iterator[str]:
    """Yield the lines of the user that are not empty."""
    if not is_terminal:
        yield from (text for line in sys.stdin if (text := line.strip()))
        return
    # The module gives `input` its history and its keys for editing. Some builds of Python lack it.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            # The line is dropped, as in a shell.
            print()
            continue
        if line:
            yield line


def _reply(conversation: ChatSession, line: str) -> None:
    if line.startswith("/"):
        for text in conversation.command(line):
            print(text, flush=True)
        return
    for model in conversation.models:
        if len(conversation.models) > 1:
            print(f"{model.label}: ", end="")
        with contextlib.closing(model.answer(line)) as parts:
            for part in parts:
                print(part, end="", flush=True)
        print(flush=True)
