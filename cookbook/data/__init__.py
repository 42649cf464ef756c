"""Rows of datasets in common formats, rendered to tokens with training weights."""

from cookbook.data.datums import RenderedPrompt, RowDatum, conversation_datums, label_datums, preference_datums, prompts
from cookbook.data.render import Renderer
from cookbook.data.rows import Columns, Curriculum, DataConfig, RejectedRow, RejectedRows, Row
from cookbook.data.source import load_rows

__all__ = [
    "Columns",
    "Curriculum",
    "DataConfig",
    "RejectedRow",
    "RejectedRows",
    "RenderedPrompt",
    "Renderer",
    "Row",
    "RowDatum",
    "conversation_datums",
    "label_datums",
    "load_rows",
    "preference_datums",
    "prompts",
]
