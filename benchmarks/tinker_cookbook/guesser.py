"""A model that speaks the format of ``guess_number`` in every second game: the tiny one, fine-tuned on games made up here.

The recipe starts from no checkpoint, and a model that never says ``Guess: 512`` gets the same penalty for all it says: there is
nothing to learn from. This one begins a game either way and stays with it, so that what a game earned says which was right. It
always names the same number: numbers drawn at random would be most of what a gradient of some dozen games is about.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.engine.model import ModelConfig
from cookbook.types import AdamParams, Datum, datum_from_tokens_weights

STEPS, ROWS = 200, 6
UPPER = 1024
RULES = (
    f"System: Your job is to guess a integer between 0 and {UPPER}. You can output your guess with the format Guess: <guess> "
    "(without the angle brackets), and say nothing else. Then we will tell you whether you guess is too high, too low, or "
    "correct.\n\n"
)
WRONG = (
    "User: Failed to parse. Please output in the format Guess: <guess> (without the angle brackets), and say nothing else.\n\n"
)
SAID = ("Guess: 512", "I say 512")  # the format, and what is not


def prepare(folder: Path, model: Path) -> Path:
    """Write the tuned ``model`` as a folder of transformers, and return the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    draw = random.Random(0)
    trainer = LocalTrainer(ModelConfig(str(model)), LocalConfig(), seed=0, folder=folder)
    for step in range(STEPS):
        rows = [_row(trainer, _game(draw)) for _ in range(ROWS)]
        trainer.forward_backward(rows, "cross_entropy")
        trainer.optim_step(AdamParams(learning_rate=3e-3 * (1 - step / STEPS), grad_clip_norm=1.0), "num_loss_tokens").result()
    path = Path(trainer.save_weights_for_sampler_ext("guesser").result().path)
    trainer.close()
    return path


def _game(draw: random.Random) -> list[tuple[str, bool]]:
    """Some turns of a game, as the renderer ``role_colon`` writes them: texts, and whether the model is to say them."""
    said, turns = draw.choice(SAID), [(RULES, False)]
    told = f"User: Too {draw.choice(('low', 'high'))}\n\n" if said == SAID[0] else WRONG
    for _ in range(draw.randint(0, 9)):
        turns += [("Player:", False), (f" {said}\n\n", True), (told, False)]
    return [*turns, ("Assistant:", False), (f" {said}\n\nUser:", True)]


def _row(trainer: LocalTrainer, turns: list[tuple[str, bool]]) -> Datum:
    parts = [(trainer.tokenizer.encode(text, add_special_tokens=False), float(is_own)) for text, is_own in turns]
    weights = [weight for part, weight in parts for _ in part]
    return datum_from_tokens_weights([token for part, _ in parts for token in part], weights)
