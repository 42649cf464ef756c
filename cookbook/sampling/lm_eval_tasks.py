"""Tasks of lm-eval, EleutherAI's evaluation harness: a sampler answers their requests in this process."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from cookbook.data import Renderer
from cookbook.data.template import chat_template_options
from cookbook.errors import ConfigError
from cookbook.protocols import Sampler
from cookbook.types import JsonObject, SamplingParams

# Tokens of an answer if the task sets no limit; lm-eval's own default.
MAX_TOKENS = 256
# Resamplings for the standard errors of metrics without a formula. lm-eval's default of 100,000 takes minutes.
RESAMPLINGS = 1000


@dataclass(frozen=True)
class Tasks:
    """Tasks by name, wildcards included; ``folder`` has further task files. ``chat`` renders prompts as conversations.

    Raises:
        ConfigError: the folder does not exist, or no task has such a name.
    """

    names: tuple[str, ...]
    folder: str | None = None
    num_fewshot: int | None = None
    chat: bool = False

    @cached_property
    def manager(self) -> TaskManager:
        """lm-eval's index of tasks, which has all of these. lm-eval reads 14,000 files to build it: about 8 s of CPU time."""
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ConfigError(f"--task-folder: {self.folder!r} is not a folder")
        manager = TaskManager(include_path=self.folder)
        for name in self.names:
            if not manager.match_tasks([name]):
                raise ConfigError(
                    f"--tasks: lm-eval has no task {name!r}; `lm-eval ls tasks` lists them, --task-folder adds yours"
                )
        return manager


@dataclass(frozen=True)
class TaskResults:
    """Results of tasks: metrics by ``task/metric``, evaluated documents, and the version of each task."""

    metrics: dict[str, float]
    num_documents: int
    versions: JsonObject


def run(tasks: Tasks, sampler: Sampler, renderer: Renderer, limit: int | None, seed: int) -> TaskResults:
    """Evaluate tasks with at most ``limit`` documents each.

    Raises:
        ConfigError: a task cannot be loaded, for example because its dataset cannot be downloaded.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = tasks.manager
    names = manager.match_tasks(list(tasks.names))
    try:
        evaluation = lm_eval.simple_evaluate(
            model=SamplerModel(sampler, renderer, seed),
            tasks=names,
            num_fewshot=tasks.num_fewshot,
            limit=limit,
            bootstrap_iters=RESAMPLINGS,
            task_manager=manager,
            apply_chat_template=tasks.chat,
            log_samples=False,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tasks: lm-eval: {str(error).strip().splitlines()[0]}") from error
    metrics = {}
    for task, values in evaluation["results"].items():
        for key, value in values.items():
            metric, _, how = key.partition(",")
            if isinstance(value, (int, float)) and how:
                metrics[f"{task}/{metric}" if how == "none" else f"{task}/{metric}/{how}"] = float(value)
    counts = [count["effective"] for count in evaluation["n-samples"].values()]
    return TaskResults(metrics, sum(counts), dict(evaluation["versions"]))


class SamplerModel(TemplateLM):  # type: ignore[misc]
    """A sampler as a model of lm-eval. Texts longer than the context lose their first tokens, as with lm-eval's own models."""

    def __init__(self, sampler: Sampler, renderer: Renderer, seed: int) -> None:
        super().__init__()
        self.sampler, self.tokenizer, self.seed = sampler, renderer.tokenizer, seed
        self.max_length = renderer.max_length or 2048

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else int(self.tokenizer.bos_token_id)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **chat_template_options(self.tokenizer),
        )
        return str(text)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the context's length."""
        texts = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            texts.append([make_disjoint_window(window) for window in windows])
        sums = iter(self._sums([window for windows in texts for window in windows]))
        return [sum(total for total, _ in itertools.islice(sums, len(windows))) for windows in texts]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return each answer, up to the first of its stop strings."""
        started = []
        for number, request in enumerate(requests):
            text, options = request.args
            stops = _as_list(options.get("until"))
            max_tokens = min(int(options.get("max_gen_toks", MAX_TOKENS)), self.max_length - 1)
            params = SamplingParams(
                max_tokens=max_tokens,
                stop=stops or None,
                temperature=float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0,
                top_p=float(options.get("top_p", 1.0)),
                top_k=int(options.get("top_k", -1)),
                seed=self.seed + number,
            )
            prompt = self.tok_encode(text)[-(self.max_length - max_tokens) :]
            started.append((stops, self.sampler.sample(prompt, 1, params)))
        answers = []
        for stops, future in started:
            answer = self.tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True)
            for stop in stops:
                answer = answer.partition(stop)[0]
            answers.append(answer)
        return answers

    def _loglikelihood_tokens(
        self, requests: Iterable[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        sums = self._sums(pairs)
        # A token with more than half of the probability is the most likely one. Where one has less, greedy sampling decides.
        futures = {
            number: self.sampler.sample(
                self._context(*pair), 1, SamplingParams(max_tokens=len(pair[1]), temperature=0.0, stop=[])
            )
            for number, (pair, (_, lowest)) in enumerate(zip(pairs, sums, strict=True))
            if lowest <= math.log(0.5)
        }
        greedy = {number: list(future.result().sequences[0].tokens) == pairs[number][1] for number, future in futures.items()}
        return [(total, greedy.get(number, True)) for number, (total, _) in enumerate(sums)]

    def _context(self, context: list[int], continuation: list[int]) -> list[int]:
        """Return the end of ``context`` that fits before ``continuation``."""
        return context[-max(1, self.max_length - len(continuation)) :]

    def _sums(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, float]]:
        """Return, for each continuation after its context, the sum of its tokens' log-probabilities and their minimum."""
        futures = [self.sampler.compute_logprobs([*self._context(*pair), *pair[1]]) for pair in pairs]
        results = []
        for (_, continuation), future in zip(pairs, futures, strict=True):
            values = [value or 0.0 for value in future.result()[-len(continuation) :]] if continuation else []
            results.append((math.fsum(values), min(values, default=0.0)))
        return results


def _as_list(stops: str | Sequence[str] | None) -> list[str]:
    return [stops] if isinstance(stops, str) else [stop for stop in stops or () if stop]
