"""The attacks of ``tools/attack_server.py``, without its clocks: what an attacker is answered, and what others still get."""

from __future__ import annotations

import attacks
import pytest
import servertools

# Attacks on what keys share, and on what belongs to another key. The others are nightly.
CI = ("gaps", "foreign", "names", "pages", "results", "sparse", "order", "packed")
LIMITS = {"max_sessions": 32, "max_runs": 16, "max_results_mb": 16, "max_pending_mb": 64, "max_request_mb": 16}


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacked")
    (folder / "keys").write_text(attacks.attacker_lines())
    options = {"keys_file": str(folder / "keys"), "names": ["tiny"], "gap_timeout_s": 5.0, "upload_timeout_s": 5.0, **LIMITS}
    with servertools.running(tiny_folder, folder / "out", **options) as running:
        yield running


def held(server, attack):
    attacker = attacks.Attacker(server.url)
    try:
        attack(attacker)
    finally:
        attacker.clean_up()
    assert not attacker.faults


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, attack in attacks.ATTACKS.items() if attack.__name__ in CI])
def test_an_attack_on_shared_limits_and_foreign_objects_fails(server, name):
    held(server, attacks.ATTACKS[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, attack in attacks.ATTACKS.items() if attack.__name__ not in CI])
def test_an_attack_fails(server, name):
    held(server, attacks.ATTACKS[name])
