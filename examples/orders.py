"""Conversations that show a model a shop's form of an order, as JSON, for ``experiment=sft_orders``.

``python examples/orders.py`` writes ``orders.jsonl`` to train on, and ``orders_held_out.jsonl``. A customer orders in a
sentence, and the assistant answers with the order as JSON. In half of the conversations the customer then changes the number.
Held-out conversations have other customers, and a third of them a wording that no training row has.
"""

import argparse
import json
import random
from pathlib import Path

TRAINING, HELD_OUT = 160, 60

ARTICLES = ["mug", "lamp", "chair", "blanket", "notebook", "backpack", "umbrella", "teapot", "bottle", "clock"]
COLORS = ["red", "blue", "green", "black", "white", "yellow"]
CITIES = ["Oslo", "Lisbon", "Vienna", "Dublin", "Prague", "Turin", "Ghent", "Porto", "Basel", "Lyon"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]
CUSTOMERS = ["Maria Lopez", "Jonas Weber", "Aisha Khan", "Peter Novak", "Chloe Martin", "Tom Becker", "Lin Chen", "Sara Rossi"]
OTHER_CUSTOMERS = ["Nora Lind", "David Cohen", "Emma Silva", "Ivan Petrov"]
WORDINGS = [
    "Hi, this is {customer}. Please send {count} {color} {article}s to {city} by {day}.",
    "I need {count} {color} {article}s in {city} on {day}. My name is {customer}.",
    "{customer} here. Could you ship {count} {color} {article}s to {city}? {day} is fine.",
    "Order for {customer}: {color} {article}s, {count} pieces, delivery to {city}, {day}.",
]
OTHER_WORDINGS = [
    "Good morning! By {day} we would like to have {count} {article}s in {color}. Deliver them to {customer} in {city}.",
]
CHANGES = ["Make it {count} instead.", "Sorry, I meant {count}.", "Please change the number to {count}."]


def conversation(generator: random.Random, customers: list[str], wordings: list[str]) -> list[dict[str, str]]:
    """Return the order of a customer and its JSON, and in half of the cases a change and the JSON after it."""
    order = {
        "customer": generator.choice(customers),
        "article": generator.choice(ARTICLES),
        "color": generator.choice(COLORS),
        "count": generator.randint(2, 40),
        "city": generator.choice(CITIES),
        "day": generator.choice(DAYS),
    }
    messages = turn(generator.choice(wordings), order)
    if generator.random() < 0.5:
        changed = order | {"count": generator.randint(2, 40)}
        messages += turn(generator.choice(CHANGES), changed)
    return messages


def turn(wording: str, order: dict[str, object]) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": wording.format(**order)},
        {"role": "assistant", "content": json.dumps(order)},
    ]


def main(folder: Path = Path(), training: int = TRAINING, held_out: int = HELD_OUT) -> None:
    generator = random.Random("orders")
    rows = [conversation(generator, CUSTOMERS, WORDINGS) for _ in range(training)]
    write(folder / "orders.jsonl", rows)
    other = [OTHER_WORDINGS if index % 3 == 0 else WORDINGS for index in range(held_out)]
    write(folder / "orders_held_out.jsonl", [conversation(generator, OTHER_CUSTOMERS, wordings) for wordings in other])


def write(path: Path, conversations: list[list[dict[str, str]]]) -> None:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations), encoding="utf-8")
    print(f"{path}: {len(conversations)} conversations")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path())
    try:
        main(**vars(parser.parse_args()))
    except OSError as error:
        raise SystemExit(f"error: {error}") from None
