"""Options of a chat template, such as ``enable_thinking``: their names in configuration, rows and requests, and their check."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Name of the key of the model, of the column of a row, of the field of a request, and of the entry in tokenizer_config.json.
TEMPLATE_OPTIONS = "chat_template_kwargs"
# Arguments of the function that renders a template, which cookbook sets itself.
RESERVED = (
    "messages",
    "tools",
    "documents",
    "conversations",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
)


def checked_options(options: object) -> dict[str, Any]:
    """Return the options that are set, from an object or its JSON text; empty if no option is set.

    Raises:
        ValueError: the value is not an object, or has a name that is not an option; the message begins with the fault.
    """
    if isinstance(options, str) and options.strip():
        try:
            options = json.loads(options)
        except json.JSONDecodeError as error:
            raise ValueError(f"expected an object, got broken JSON: {error}") from None
    if not options:
        return {}
    if not isinstance(options, Mapping):
        raise ValueError(f"expected an object such as {{enable_thinking: false}}, got {type(options).__name__}")
    if reserved := [name for name in RESERVED if name in options]:
        raise ValueError(f'"{reserved[0]}" is not an option of the template, cookbook sets it; remove it')
    # Arrow fills absent keys with None.
    return {str(name): value for name, value in options.items() if value is not None}
