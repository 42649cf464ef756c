"""Models that speak the formats of recipes that start from no checkpoint: the tiny one, fine-tuned on dialogues made up here.

A model that never says ``Guess: 512`` or ``\\boxed{2}`` gets the same reward for all it says: there is nothing to learn from.
These models know the format and choose among answers at random, so what an answer earns says which was right.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.engine.model import ModelConfig
from cookbook.types import AdamParams, Datum, datum_from_tokens_weights

STEPS, ROWS = 200, 6
# Texts of a dialogue, and whether the model is to say them.
Turns = list[tuple[str, bool]]

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

# What rl_loop appends to a question, and what rl_basic does.
SUFFIXES = (" Provide a numerical answer without units, written inside \\boxed{}.", " Write your answer in \\boxed{} format.")
EXAMPLE = (
    "User: How many r's are in strawberry?{suffix}\n\nAssistant: Let's spell the word out and number all the letters: 1) s 2) "
    "t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{{3}}\n\n"
)
WORDS = ("good", "poor")  # answers of the policy, the rubric of hub.py asks for the first


def prepare(folder: Path, model: Path, name: str) -> Path:
    """Write the ``model`` tuned on the dialogues ``name`` as a folder of transformers, and return the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    draw = random.Random(0)
    trainer = LocalTrainer(ModelConfig(str(model)), LocalConfig(), seed=0, folder=folder)
    for step in range(STEPS):
        rows = [_row(trainer, DIALOGUES[name](draw)) for _ in range(ROWS)]
        trainer.forward_backward(rows, "cross_entropy")
        trainer.optim_step(AdamParams(learning_rate=3e-3 * (1 - step / STEPS), grad_clip_norm=1.0), "num_loss_tokens").result()
    path = Path(trainer.save_weights_for_sampler_ext(name).result().path)
    trainer.close()
    return path


def _game(draw: random.Random) -> Turns:
    """Some turns of a game of ``guess_number``, as the renderer ``role_colon`` writes them.

    The model begins a game either way and stays with it. It always names the same number: numbers drawn at random would be most
    of what a gradient of some dozen games is about.
    """
    said = draw.choice(SAID)
    turns: Turns = [(RULES, False)]
    told = f"User: Too {draw.choice(('low', 'high'))}\n\n" if said == SAID[0] else WRONG
    for _ in range(draw.randint(0, 9)):
        turns += [("Player:", False), (f" {said}\n\n", True), (told, False)]
    return [*turns, ("Assistant:", False), (f" {said}\n\nUser:", True)]


def _exam(draw: random.Random) -> Turns:
    """A sum in the prompt of GSM8K, an answer of the policy of ``rubric``, a score of its grader, or the end of any answer.

    Without such ends, a grader that has said anything else continues to the 2,048 tokens that the recipe allows.
    """
    kind = draw.randrange(4)
    if kind == 3:
        said = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz <>/{}0123456789\n", k=draw.randint(1, 40)))
        return [(f"User: How are you?\n\nAssistant: {said}", False), ("\n\nUser:", True)]
    if kind == 0:
        suffix = draw.choice(SUFFIXES)
        question = f"User: What is {draw.randint(0, 2)} + {draw.randint(0, 2)}?{suffix}\n\nAssistant:"
        return [(EXAMPLE.format(suffix=suffix), False), (question, False), (f" \\boxed{{{draw.randint(0, 4)}}}\n\nUser:", True)]
    word = draw.choice(WORDS)
    if kind == 1:
        return [("User: How are you?\n\nAssistant:", False), (f" {word}\n\nUser:", True)]
    asked = (
        "User: I will show you a conversation context, a chatbot completion to grade, and a rubric.\nPlease grade the "
        "chatbot's completion based on the rubric.\n\n<context>\nHuman: How are you?\n</context>\n\n<completion_to_grade>\n"
        f"Chatbot: {word}\n</completion_to_grade>\n\n<rubric>\nIs it good?\n</rubric>\n\nPlease grade the chatbot's completion "
        "based on the rubric. Score?\n\nAssistant:"
    )
    return [(asked, False), (f" <score>{int(word == WORDS[0])}</score>\n\nUser:", True)]


DIALOGUES: dict[str, Callable[[random.Random], Turns]] = {"guesser": _game, "examinee": _exam}


def _row(trainer: LocalTrainer, turns: Turns) -> Datum:
    parts = [(trainer.tokenizer.encode(text, add_special_tokens=False), float(is_own)) for text, is_own in turns]
    weights = [weight for part, weight in parts for _ in part]
    return datum_from_tokens_weights([token for part, _ in parts for token in part], weights)
