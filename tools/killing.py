"""The unmodified client trains on a server that is killed (SIGKILL) at random moments, and notices nothing.

All answers to the client and all files at the end are equal, bit by bit, to those of an undisturbed server and the same
program. ``python tools/killing.py --kills 24 --steps 400`` runs it for longer.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import numpy as np
import servertools
import tinker
import tiny
from safetensors.torch import load_file

STEP = tinker.AdamParams(learning_rate=1e-2)
PROMPT = tinker.ModelInput.from_ints([5, 6, 7])
RANKS = (4, 0)  # of the clients that train side by side: LoRA, and all parameters
TURN_S = 600  # a client that waits longer for its turn fails, since another client has failed
AT_ONCE = 0.25  # share of kills of a server that has just been restarted


class Progress:
    """The steps that all clients have done. Kills go by it, not by the clock: a fast machine sees as many as a slow one."""

    def __init__(self) -> None:
        self.steps = 0
        self.pace_s = 0.0  # what the last step took
        self._changed = threading.Condition()

    def step(self, took_s: float) -> None:
        with self._changed:
            self.steps += 1
            self.pace_s = took_s
            self._changed.notify_all()

    def reach(self, steps: int, running: list[Any]) -> None:
        """Waits for it, or for all clients to end. A client that fails ends before its steps are done."""
        with self._changed:
            while self.steps < steps and not all(one.done() for one in running):
                self._changed.wait(0.1)


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


class Turns:
    """The order in which the clients of one session create their runs.

    A client numbers the runs of a session, and the seeds of requests without a seed follow from the numbers.
    """

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._turn = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def turn(self, client: int) -> Iterator[None]:
        """Wait until the other clients have had their turns."""
        with self._changed:
            while (self._turn - client) % self._clients:
                if not self._changed.wait(TURN_S):
                    raise TimeoutError(f"the client before client {client} has not created its run in {TURN_S} s")
            yield
            self._turn += 1
            self._changed.notify_all()


def asked(sampler, step):
    """Futures of samples, with and without a seed, which are computed beside the next training steps."""
    return [
        sampler.sample(PROMPT, 2, tinker.SamplingParams(max_tokens=length, seed=seed))
        for seed in (None, step, None)
        for length in (6, 40)
    ]


def trained(service, client, rank, steps, progress, turns):
    """All results of a run at a client: losses, logprobs, gradient norms, sampled tokens, and the path of the last state."""
    seen, waiting = [], []
    with turns.turn(client):
        training = service.create_lora_training_client("tiny", rank=rank, seed=client).result()

    def receive():
        seen.extend([one.tokens for one in future.result().sequences] for future in waiting)
        waiting.clear()

    for step in range(steps):
        began = time.monotonic()
        data = batch(100 * client + step)
        passed = (
            training.forward_backward_custom(data, squares)
            if step % 3 == 2
            else training.forward_backward(data, "cross_entropy")
        )
        stepped = training.optim_step(STEP)
        output = passed.result()
        logprobs = [row["logprobs"].to_numpy().tobytes() for row in output.loss_fn_outputs]
        seen.append((output.metrics["loss:sum"], logprobs, stepped.result().metrics))
        if step % 5 == 4:
            receive()
            sampler = training.save_weights_and_get_sampling_client().result()
            waiting += asked(sampler, step)
        if step % 7 == 6:
            training.save_state(f"after-{step}").result()
        progress.step(time.monotonic() - began)
    receive()
    return seen, training.save_state("end").result().path


def tensors(folder, path):
    """The weights and the optimizer of a saved state, digested name by name."""
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    place = folder / run_id.replace(":", ".") / f"{kind}.{name}"
    return {
        (str(file.relative_to(place)), key): hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for file in place.rglob("*.safetensors")
        for key, tensor in load_file(file).items()
    }


def played(server, model: Path, folder: Path, ranks, *, steps, kills, one_session=False):
    """Run the whole program of several clients together, on a server that is killed ``kills`` times.

    The clients share a session with ``one_session``, and have one each without.
    """
    server.start(model, folder, checkpoint_s=0.5)
    progress, turns = Progress(), Turns(len(ranks))

    def connect():
        return tinker.ServiceClient(base_url=server.url, api_key=servertools.KEY)

    def train(service, client, rank):
        order = turns if one_session else Turns(1)
        seen, path = trained(service, client, rank, steps, progress, order)
        return seen, tensors(folder, path)

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(ranks)) as pool:
        services = [stack.enter_context(connect()) for _ in (ranks[:1] if one_session else ranks)]
        clients = [pool.submit(train, services[one % len(services)], one, rank) for one, rank in enumerate(ranks)]
        kill(server, kills, steps * len(ranks), progress, clients)
        found = {client: one.result() for client, one in enumerate(clients)}
    assert not list((folder / "sessions").glob("*")), "what was kept goes with the session"
    return found


def kill(server, times: int, steps: int, progress: Progress, clients) -> None:
    """At random moments of random steps, over the whole play."""
    draw = random.Random(0)
    for step in sorted(draw.sample(range(1, steps), times)):
        if draw.random() >= AT_ONCE:
            progress.reach(step, clients)
        time.sleep(draw.random() * progress.pace_s)
        server.again()


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
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    server, found = servertools.Mortal(), []
    with tempfile.TemporaryDirectory() as place:
        model = tiny.save(Path(place) / "tiny")
        for name, one_session in (("two sessions", False), ("one session", True)):
            began = time.monotonic()
            calm, killed = (
                played(
                    server,
                    model,
                    Path(place) / f"{name}, {kills} kills",
                    RANKS,
                    steps=arguments.steps,
                    kills=kills,
                    one_session=one_session,
                )
                for kills in (0, arguments.kills)
            )
            differing = differences(calm, killed)
            answers, states = (sum(len(one[part]) for one in calm.values()) for part in (0, 1))
            print(f"two clients in {name}, {arguments.kills} kills, {time.monotonic() - began:.0f} s: ", end="")
            print(f"{answers} answers and {states} tensors compared, {len(differing)} differ", flush=True)
            found += differing
    server.close()
    raise SystemExit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
