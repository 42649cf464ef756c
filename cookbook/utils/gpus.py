"""Numbers of GPUs, as torch counts them in this process, and the variable that restricts a process to some of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible(numbers: Sequence[int]) -> str:
    """Return CUDA_VISIBLE_DEVICES of a process that is to see only the GPUs ``numbers`` of this process, in this order.

    The variable of this process, if it is set, may name the GPUs in any order, or by UUID.
    """
    names = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    return ",".join(names[number] if names else str(number) for number in numbers)
