"""Rows in the formats people have, and tokens with weights out of them."""

from cookbook.data.config import Columns, DataConfig
from cookbook.data.datums import RenderedPrompt, RowDatum, conversation_datums, preference_datums, prompts
from cookbook.data.refusals import Refusal, Refusals
from cookbook.data.render import Rendered, Renderer
from cookbook.data.rows import Row
from cookbook.data.source import load_rows

__all__ = [
    "Columns",
    "DataConfig",
    "Refusal",
    "Refusals",
    "Rendered",
    "RenderedPrompt",
    "Renderer",
    "Row",
    "RowDatum",
    "conversation_datums",
    "load_rows",
    "preference_datums",
    "prompts",
]
