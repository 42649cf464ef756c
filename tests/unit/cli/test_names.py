"""Names that users type: those of other libraries lead to cookbook's key, slips to the closest one, never to a class."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from marks import rest_slow
from runtools import here  # noqa: F401 - a fixture

from cookbook.cli.app import run
from cookbook.cli.hydra import conf_files, errors
from cookbook.cli.hydra.bridge import ComposeRequest, show
from cookbook.cli.hydra.composer import opened
from cookbook.config.nodes import build
from cookbook.utils.suggest import did_you_mean_key

pytestmark = pytest.mark.usefixtures("here")
RECIPES = ("sft", "dpo", "orpo", "grpo", "distill")
OWN = "your own needs _target_: write {}='{{_target_: package.module.Class}}' with its settings"
SAMPLE = "7"  # a value where the table converts any


def keys_of(*overrides):
    with opened(ComposeRequest(overrides)) as composer:
        return set(composer.known_keys())


@pytest.fixture(scope="module")
def compositions():
    """The keys of each recipe's configuration, and of one with a loss that bounds the ratio itself and an environment."""
    return {recipe: keys_of(f"recipe={recipe}") for recipe in RECIPES} | {
        "grpo loss=ppo": keys_of("loss=ppo", "env=arithmetic")
    }


def converted(entry, *others):
    """The overrides for every value that the table converts, and for other ones."""
    typed = [value for value in entry.values or {} if value != errors.ALL_OTHERS]
    return [word for value in [*typed, *others] for word in entry.overrides(value)]


ENTRIES = [(name, entry) for name, entries in errors.table().items() for entry in entries]


def test_the_table_has_the_names_that_users_try():
    tried = """learning_rate per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps num_generations
        max_completion_length beta epsilon loss_type bf16 gradient_checkpointing use_liger_kernel packing completion_only_loss
        assistant_only_loss resume_from_checkpoint output_dir report_to lora_r max_seq_length num_gpus"""
    assert set(tried.split()) <= set(errors.table())
    # Spelling alone led these to a key of another meaning, such as r to optim.lr and clip_eps to recipe.steps.
    led_astray = """r lora use_lora optim_args tokenizer file load_from project tp test_size clip_eps clip_ratio early_stop
        block_size train_data dataset_path model_path eval_freq eos_token pad_token epoch mini_batch_size lr_scheduler_kwargs"""
    assert set(led_astray.split()) <= set(errors.table())
    assert len([entry for _, entry in ENTRIES if entry.to is not None]) >= 60


@pytest.mark.slow
def test_every_target_is_a_key_of_a_configuration_that_it_is_offered_for(compositions):
    needed: dict[str, set[str]] = {}  # override that an entry adds: the keys it must bring
    for name, entry in ENTRIES:
        if entry.to is None:
            assert entry.note, f"{name}: without a key it needs a note"
            continue
        offered = [keys for keys in compositions.values() if entry.fits(keys)]
        assert offered, f"{name}: no recipe has {entry.needs or entry.to}"
        words = converted(entry, SAMPLE)
        if entry.to == "recipe":  # its words make a configuration of their own
            assert all(show(ComposeRequest(entry.overrides(value)), "job") for value in entry.values)
            words = []
        targets = {entry.to, *(word.partition("=")[0] for word in words)}
        assert not any(target.endswith("_target_") for target in targets)
        if entry.adds is not None:
            needed.setdefault(entry.adds, set()).update(targets)
        else:
            assert all(targets <= keys for keys in offered), f"{name}: {targets - set.intersection(*offered)} are not keys"
    for override, targets in needed.items():
        assert targets <= keys_of(override), override


@pytest.mark.slow
def test_every_converted_value_is_one_that_the_key_takes(compositions):
    """Options of groups exist; values of keys are accepted by the class of their group."""
    configurations = {
        recipe: yaml.safe_load(show(ComposeRequest([f"recipe={recipe}"]), "job", resolve=True)) for recipe in RECIPES
    }
    checked = 0
    for name, entry in ENTRIES:
        recipe = next((recipe for recipe, keys in compositions.items() if entry.fits(keys)), "grpo")
        for key, _, value in (word.partition("=") for word in converted(entry)):
            group, _, leaf = key.partition(".")
            value = yaml.safe_load(value)
            if not leaf and group not in ("resume", "out", "seed"):
                options = {found.name for found in conf_files.options(group)}
                assert set(value if isinstance(value, list) else [value]) <= options, f"{name}: {key}={value}"
            elif leaf:
                node = configurations["dpo" if key == "loss.variant" else recipe][group]
                if "_target_" in node:
                    build({**node, leaf: value}, group)
            checked += 1
    assert checked > 80


def test_a_note_names_keys_and_options_that_exist(compositions):
    known = set.union(*compositions.values()) | keys_of("schedule=cosine")
    for name, entry in ENTRIES:
        mentioned = re.findall(
            r"\b(?:recipe|model|data|backend|loss|optim|rollout|eval|checkpoint|reward)\.[a-z_0-9]+", entry.note
        )
        assert set(mentioned) <= known | {"reward.target", "reward.weights"}, f"{name}: {entry.note}"


MEMORY = "backend.micro_batch_tokens limits memory"
ROWS = f"this counts all rows of an optimizer step, so multiply by gradient_accumulation_steps; {MEMORY}"
ADAPTER = "quantized weights are trained only under a LoRA adapter: set model.lora_rank above 0 too, such as 16"
ANSWERS = [
    ("sft", "learning_rate=1e-4", "optim.lr=1e-4"),
    ("dpo", "label_smoothing=0.1", "loss.label_smoothing=0.1"),
    ("grpo loss=ppo", "gamma=0.9", "env.gamma=0.9"),
    ("sft", "load_in_4bit=true", f"model.quantize=nf4 ({ADAPTER})"),
    ("sft", "optim.learning_rate=1e-4", "optim.lr=1e-4"),
    ("sft", "recipe.num_train_epochs=3", "recipe.epochs=3"),
    ("sft", "r=8", "model.lora_rank=8"),
    ("sft", "backend.rank=2", "backend.ranks=2"),
    ("sft", "num_nodes=2", "job=slurm job.nodes=2"),
    ("sft", "mixed_precision=bf16", "backend.autocast=bfloat16"),
    ("sft", "bf16=True", "model.dtype=bfloat16"),
    ("sft", "gradient_checkpointing=true", "backend.activation_checkpointing=true"),
    ("sft", "per_device_train_batch_size=8", f"recipe.batch_size=8 ({ROWS})"),
    ("sft", "report_to=wandb", "tracker=wandb"),
    ("sft", "report_to=trackio", "tracker=trackio"),
    ("sft", "wandb_project=mine", "tracker=wandb tracker.wandb.project=mine"),
    ("sft", "run_name=mine", "out=runs/mine (a run is named after its folder)"),
    ("sft", "max_steps=-1", "recipe.steps=null"),
    ("sft", "loss_type=dft", "loss=dft"),
    ("sft", "lora_target_modules=[q_proj,v_proj]", "'model.lora_target_modules=[q_proj,v_proj]'"),
    ("dpo", "beta=0.2", "loss.beta=0.2"),
    ("dpo", "loss_type=ipo", "loss.variant=ipo"),
    ("sft", "early_stopping_patience=3", "checkpoint.best=eval/loss eval.patience=3"),
    ("sft", "dataset=rows.jsonl", "data=rows.jsonl"),
    ("orpo", "beta=0.2", "loss.odds_weight=0.2"),
    ("grpo", "beta=0.2", "loss.kl_beta=0.2"),
    ("grpo", "epsilon=0.3", "loss.clip_low=0.3 loss.clip_high=0.3"),
    ("grpo", "loss_type=dr_grpo", "loss=dr_grpo"),
    ("grpo", "max_new_tokens=9", "rollout.max_tokens=9"),
    ("grpo", "eval.max_new_tokens=9", "eval.max_tokens=9"),
    ("grpo", "min_lr_ratio=0.2", "schedule=cosine schedule.min_lr_ratio=0.2"),
    ("grpo", "lr=1", "optim.lr=1"),
    ("grpo", "+learning_rate=1", "optim.lr=1"),
]


@pytest.mark.parametrize(("recipe", "word", "answer"), ANSWERS, ids=[" ".join(case[:2]) for case in ANSWERS])
def test_a_name_of_another_library_is_answered_with_ours(compositions, recipe, word, answer):
    key = word.lstrip("+").partition("=")[0]
    keys = errors.Keys(lambda: sorted(compositions[recipe]), typed=[word])
    assert errors.unknown_key(key, keys) == f"unknown key {key!r}; write {answer}"


@pytest.mark.parametrize("word", ["optim.learning_rate=1", "+learning_rate=1", "learning_rate=1"])
def test_the_command_answers(capsys, word):
    assert run(["train", word]) == 2
    key = word.lstrip("+").partition("=")[0]
    assert capsys.readouterr().err == f"error: unknown key {key!r}; write optim.lr=1\n"


def test_the_answer_composes(capsys):
    assert run(["train", "recipe=dpo", "learning_rate=1", "dpo_beta=0.2", "num_train_epochs=2", "output_dir=here"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: unknown keys 'learning_rate', 'dpo_beta', 'num_train_epochs', 'output_dir'; write ")
    words = shlex.split(line.partition("; write ")[2])
    cfg = yaml.safe_load(show(ComposeRequest(["recipe=dpo", *words]), "job"))
    assert (cfg["optim"]["lr"], cfg["loss"]["beta"], cfg["recipe"]["epochs"], cfg["out"]) == (1, 0.2, 2, "here")


@pytest.mark.parametrize(
    ("words", "message"),
    rest_slow(
        [
            (["--optim.lr", "1e-4"], "unknown option '--optim.lr'; write optim.lr=1e-4"),
            (["--optim.lr=1e-4", "recipe=sft"], "unknown option '--optim.lr'; write optim.lr=1e-4"),
            (["-lr", "1e-4"], "unknown option '-lr'; write optim.lr=1e-4"),
            (["--recipe", "dpo", "--beta", "0.2"], "unknown options '--recipe', '--beta'; write recipe=dpo loss.beta=0.2"),
            (
                ["--bf16", "recipe=sft", "--learning-rate=1"],
                "unknown options '--bf16', '--learning-rate'; write model.dtype=bfloat16 optim.lr=1",
            ),
            (
                ["recipe=sft", "--lora_r", "32", "--use_peft"],
                "unknown options '--lora_r', '--use_peft'; write model.lora_rank=32; --use_peft: cookbook's key is "
                "model.lora_rank: a rank above 0, such as 16, trains a LoRA adapter",
            ),
            (["--cfg", "job", "--max_steps", "-1"], "unknown option '--max_steps'; write recipe.steps=null"),
            (["--optim", "adamw_8bit"], "unknown option '--optim'; write backend.optimizer=adamw8bit"),
            (["--num_gpus", "8"], "unknown option '--num_gpus'; write backend.gpus=8"),
            (
                ["--fsdp", "full_shard"],
                "unknown option '--fsdp'; cookbook's key is backend.shard: all shards weights, gradients and optimizer state "
                "over the processes of backend.gpus",
            ),
            (
                ["--adapter", "qlora"],
                "unknown option '--adapter'; cookbook's key is model.lora_rank: a rank above 0, such as 16, trains a LoRA "
                "adapter; with model.quantize=nf4 it is QLoRA",
            ),
            (["--nonsense_of_mine", "8"], "No such option: --nonsense_of_mine"),
        ],
        fast=4,
    ),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_override_typed_as_an_option(capsys, words, message):
    assert run(["train", *words]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    rest_slow(
        [
            (["num_gpus=8"], "unknown key 'num_gpus'; write backend.gpus=8"),
            (["pad_token=x"], "unknown key 'pad_token'; the tokenizer is always the one of model.name; leave it out"),
            (
                ["recipe=sft", "num_generations=8"],
                "unknown key 'num_generations'; cookbook's key is recipe.group_size, "
                "which the chosen recipe and its parts do not have",
            ),
            (["bf16=maybe"], "unknown key 'bf16'; cookbook's key is model.dtype, which has no value for 'maybe'"),
            (
                ["optim=adamw_torch_fused"],
                "unknown optim 'adamw_torch_fused'; write backend.optimizer=adamw (choices: adafactor, adamw)",
            ),
            (
                ["schedule=constant_with_warmup"],
                "unknown schedule 'constant_with_warmup'; write schedule=constant (choices: constant, cosine, linear, wsd)",
            ),
            (
                ["optim={lrr: 3}"],
                "unknown key 'optim.lrr'. Did you mean 'optim.lr'? (cookbook train --cfg job prints every key)",
            ),
            (["tracker={mine:{project:x}}"], f"unknown key 'tracker.mine'; a tracker of {OWN.format('tracker.mine')}"),
            (["hook.mine.size=3"], f"unknown key 'hook.mine.size'; a hook of {OWN.format('hook.mine')}"),
            (["recipe=sft", "reward={points:1}"], f"unknown key 'reward.points'; a reward of {OWN.format('reward')}"),
            (["tracker={wandb:{project:x}}"], "unknown key 'tracker.wandb'; add tracker=wandb"),
            (
                ["tracker.mine._target_=m.T"],
                "unknown key 'tracker.mine._target_'; to add a component, "
                "write tracker.mine='{_target_: package.module.Class}'",
            ),
        ],
        fast=4,
    ),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_names_without_an_exact_counterpart(capsys, words, message):
    assert run(["train", *words, "--cfg", "job"]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_suggestion_never_names_a_class():
    keys = keys_of()
    assert any(key.endswith("._target_") for key in keys)
    typed = ["_target", "optim.target", "optim._targt_", "loss.target_", "optim.tr", "tracker._target_", "optim.learnin_rate"]
    assert not any("_target_" in did_you_mean_key(name, keys) for name in typed)
    assert did_you_mean_key("optim.beta3", keys) in (" Did you mean 'optim.beta2'?", " Did you mean 'optim.beta1'?")
    assert did_you_mean_key("reward.a", ["reward", "seed"]) == ""  # the key's own group
    assert did_you_mean_key("clip_hihg", keys) == " Did you mean 'loss.clip_high'?"


# Components written out on the command line

MINE = '''
from dataclasses import dataclass, field

from cookbook.run.hooks import Hook


@dataclass
class Tracker:
    file: str
    steps: list = field(default_factory=list)

    def start(self, cfg, out, name, first_step):
        pass

    def log(self, step, row):
        with open(self.file, "a") as file:
            file.write(f"{step} ")

    def end(self, status):
        pass


@dataclass
class Halves(Hook):
    file: str = "hook.txt"

    def on_step(self, run, step, row):
        with open(self.file, "a") as file:
            file.write(f"{step} ")


@dataclass
class Reward:
    """Points for the letters of a completion."""

    points: float = 0.5

    def __call__(self, completion, row):
        return self.points * (sum(map(ord, completion)) % 7)
'''


def composed(capsys, *words):
    assert run(["train", *words, "--cfg", "job"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["tracker={mine: {_target_: m.T, file: a}}"], ["tracker.mine={_target_: m.T, file: a}"]])
def test_a_tracker_is_added_to_those_chosen(capsys, words):
    mine = {"_target_": "m.T", "file": "a"}
    assert composed(capsys, *words)["tracker"] == {"mine": mine}
    assert composed(capsys, "tracker=tensorboard", *words)["tracker"]["mine"] == mine
    assert set(composed(capsys, "tracker=tensorboard", *words)["tracker"]) == {"tensorboard", "mine"}


@pytest.mark.slow
def test_a_component_takes_the_place_of_the_chosen_one(capsys):
    reward = {"_target_": "m.R", "points": 2}
    for words in (["recipe=grpo"], ["recipe=sft"], ["recipe=grpo", "hook={h: {_target_: m.H}}"]):
        assert composed(capsys, *words, "reward={_target_: m.R, points: 2}")["reward"] == reward
    Path("old.yaml").write_text(show(ComposeRequest(["recipe=grpo"]), "job", resolve=True))
    again = composed(capsys, "--config", "old.yaml", "reward={_target_: m.R, points: 2}", "optim={lr: 3}")
    assert again["reward"] == reward and again["optim"]["lr"] == 3 and again["optim"]["beta2"] == 0.95


@pytest.mark.parametrize("sweep", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_components_of_the_command_line_run(sweep):
    Path("mine.py").write_text(MINE)
    words = [
        *["recipe=grpo", "recipe.steps=2", "recipe.prompts_per_step=2", "recipe.group_size=2", "data.limit=4", "eval.limit=2"],
        *["checkpoint.final=false", "checkpoint.every=null"],
        "tracker={mine: {_target_: mine.Tracker, file: tracker.txt}}",
        "hook={halves: {_target_: mine.Halves}}",
        "reward={_target_: mine.Reward, points: 0.25}",
    ]
    assert run(["train", *words, *(["seed=1,2", "-m"] if sweep else ["seed=1"])]) == 0
    times = 2 if sweep else 1
    assert Path("tracker.txt").read_text().split() == ["0", "1", "2"] * times
    assert Path("hook.txt").read_text().split() == ["1", "2"] * times
