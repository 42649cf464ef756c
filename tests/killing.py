"""The unmodified client trains on a server that is killed (SIGKILL) at random moments, and notices nothing.

Everything it was told, and everything that is on the disk at the end, is bit by bit what an undisturbed server makes of the
same program. ``python tests/killing.py --kills 24 --steps 400`` plays it at length.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import servertools
import tinker
import tiny
from safetensors.torch import load_file

STEP = tinker.AdamParams(learning_rate=1e-2)
PROMPT = tinker.ModelInput.from_ints([5, 6, 7])


def batch(seed):
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, tiny.VOCABULARY, int(rng.integers(5, 20))).tolist() for _ in range(3)]
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]


def squares(data, logprobs):
    """A loss that the server does not know, and whose slopes differ from token to token."""
    loss = sum((one * one).sum() for one in logprobs)
    return loss, {"squares": float(loss.detach())}


def trained(url, rank, steps, seed):
    """What a client sees of a run: losses, logprobs, gradient norms, samples; and where its last state is saved."""
    seen = []
    with tinker.ServiceClient(base_url=url, api_key=servertools.KEY) as service:
        client = service.create_lora_training_client("tiny", rank=rank, seed=seed).result()
        for step in range(steps):
            data = batch(100 * seed + step)
            passed = (
                client.forward_backward_custom(data, squares)
                if step % 3 == 2
                else client.forward_backward(data, "cross_entropy")
            )
            stepped = client.optim_step(STEP)
            output = passed.result()
            logprobs = [row["logprobs"].to_numpy().tobytes() for row in output.loss_fn_outputs]
            seen.append((output.metrics["loss:sum"], logprobs, stepped.result().metrics))
            if step % 5 == 4:
                sampler = client.save_weights_and_get_sampling_client().result()
                answer = sampler.sample(PROMPT, 2, tinker.SamplingParams(max_tokens=6)).result()
                seen.append([(one.tokens, list(one.logprobs)) for one in answer.sequences])
            if step % 7 == 6:
                client.save_state(f"after-{step}").result()
        path = client.save_state("end").result().path
    return seen, path


def tensors(folder, path):
    """The weights and the optimizer of a saved state, digested name by name."""
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    place = folder / run_id.replace(":", ".") / f"{kind}.{name}"
    return {
        (str(file.relative_to(place)), key): hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for file in place.rglob("*.safetensors")
        for key, tensor in load_file(file).items()
    }


def played(server, model: Path, folder: Path, ranks, *, steps, kills, apart_s):
    """The whole program of several clients at once, on a server that is killed ``kills`` times."""
    server.start(model, folder, checkpoint_s=0.5)
    found: dict[int, object] = {}
    done = 0

    def train(seed, rank):
        seen, path = trained(server.url, rank, steps, seed)
        found[seed] = (seen, tensors(folder, path))

    clients = [threading.Thread(target=train, args=one) for one in enumerate(ranks)]
    draw = random.Random(0)
    for one in clients:
        one.start()
    while done < kills and any(one.is_alive() for one in clients):
        time.sleep(draw.uniform(0, 2 * apart_s))
        server.again()
        done += 1
    for one in clients:
        one.join()
    assert not list((folder / "sessions").glob("*")), "what was kept goes with the session"
    return found, done


def differences(one: Any, other: Any) -> list[str]:
    """Where two plays of the same program are not the same, seen by the client or on the disk."""
    found = []
    for client in sorted(one.keys() | other.keys()):
        (seen, saved), (seen_too, saved_too) = one[client], other[client]
        pairs = zip(seen, seen_too, strict=True)
        found += [f"client {client}, answer {place}" for place, (this, that) in enumerate(pairs) if this != that]
        found += [
            f"client {client}, {name}" for name in saved.keys() | saved_too.keys() if saved.get(name) != saved_too.get(name)
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--apart", type=float, default=4.0, help="seconds between two kills, on average")
    arguments = parser.parse_args()
    server = servertools.Mortal()
    with tempfile.TemporaryDirectory() as place:
        model = tiny.save(Path(place) / "tiny")
        calm, _ = played(server, model, Path(place) / "calm", [4, 0], steps=arguments.steps, kills=0, apart_s=0)
        began = time.monotonic()
        killed, kills = played(
            server, model, Path(place) / "killed", [4, 0], steps=arguments.steps, kills=arguments.kills, apart_s=arguments.apart
        )
        took = time.monotonic() - began
    server.close()
    found = differences(calm, killed)
    answers, tensors_ = (sum(len(one[part]) for one in calm.values()) for part in (0, 1))
    print(f"{kills} kills in {took:.0f} s; {answers} answers and {tensors_} tensors compared, {len(found)} differ")
    raise SystemExit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
