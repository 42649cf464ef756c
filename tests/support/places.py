"""Folders of the checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Data beside the checkout: tests that read it skip without it.
SHARED = ROOT.parent / "shared"
GSM8K = SHARED / "data" / "gsm8k"
