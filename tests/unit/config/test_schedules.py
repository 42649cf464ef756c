"""Learning rate schedules. Golden numbers in full precision are in test_losses_golden.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from places import ROOT

from cookbook.config.optim import WSD, Constant, Cosine, Linear, Schedule
from cookbook.config.typed import construct_target
from cookbook.errors import ConfigError

CONF = ROOT / "conf" / "schedule"
EVERY = [Constant, Linear, Cosine, WSD]


def factors(schedule: Schedule, total: int = 10) -> list[float]:
    return [schedule.factor(step, total) for step in range(1, total + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Constant(warmup_steps=2), [0.5] + [1.0] * 9),
        (Linear(warmup_steps=2), [0.5, 1, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125, 0.1]),
        (
            Cosine(warmup_steps=2),
            [0.5, 1, 0.9657457896, 0.8681980515, 0.7222075446, 0.55, 0.3777924554, 0.2318019485, 0.1342542104, 0.1],
        ),
        (WSD(warmup_steps=2, decay_ratio=0.4), [0.5, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1]),
        (
            WSD(warmup_ratio=0.2, decay_ratio=0.4, decay_type="sqrt"),
            [0.5, 1, 1, 1, 1, 1, 0.55, 0.3636038969, 0.2205771366, 0.1],
        ),
    ],
)
def test_golden(schedule: Schedule, expected: list[float]) -> None:
    assert factors(schedule) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("cls", EVERY)
@pytest.mark.parametrize("total", [1, 2, 3, 50])
@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_every_step_is_paid_for(cls: type[Schedule], total: int, warmup: int) -> None:
    """By default no step has rate 0, none exceeds the base rate, and only the warm-up rises."""
    found = factors(cls(warmup_steps=warmup), total)
    assert all(0 < factor <= 1 for factor in found)
    after = found[max(warmup - 1, 0) :]
    assert after == sorted(after, reverse=True)
    if total > warmup:
        assert after[0] == 1.0
    if total > max(warmup, 1) and cls is not Constant:
        assert found[-1] == pytest.approx(0.1, rel=1e-12)


def test_zero_at_the_end_is_a_choice() -> None:
    assert factors(Linear(min_lr_ratio=0.0))[-1] == pytest.approx(0.0, abs=1e-12)


def test_warmup_as_a_share() -> None:
    assert factors(Cosine(warmup_ratio=0.3)) == factors(Cosine(warmup_steps=3))
    assert factors(Constant(warmup_ratio=1.0))[-1] == 1.0
    assert factors(Cosine(warmup_ratio=None)) == factors(Cosine(warmup_ratio=0.0)) == factors(Cosine())


def test_steps_of_warmup_win_over_a_share() -> None:
    """A recipe's own share must not refuse ``schedule.warmup_steps=2``."""
    assert factors(Cosine(warmup_steps=2, warmup_ratio=0.5)) == factors(Cosine(warmup_steps=2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup_steps": -1}, "warmup_steps must be >= 0"),
        ({"warmup_ratio": 1.5}, "warmup_ratio must be between 0 and 1, got 1.5"),
        ({"min_lr_ratio": -0.1}, "min_lr_ratio"),
        ({"decay_ratio": 2.0}, "decay_ratio"),
        ({"decay_type": "steep"}, "linear, cosine, sqrt, got 'steep'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WSD(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [0, 11])
def test_steps_outside_the_run_are_refused(step: int) -> None:
    with pytest.raises(ConfigError, match=rf"between 1 and 10, got {step}"):
        Linear().factor(step, 10)


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_restate_the_defaults(path: Path) -> None:
    written = yaml.safe_load(path.read_text())
    schedule = construct_target(written, "schedule")
    written.pop("_target_")
    assert vars(type(schedule)()) == written == vars(schedule)
    assert type(schedule).__name__.lower() == path.stem
