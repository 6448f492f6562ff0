"""Text and tokens: sources, splits, packing into rows of exactly T tokens, batches that can be resumed anywhere.

Importing this package pulls in neither torch nor transformers; batches live in `hybridize.data.batching`.
"""

from hybridize.data.documents import Document, Split
from hybridize.data.encoding import check_tokenizer
from hybridize.data.packing import PackedRows, Row, build_rows, plain_texts
from hybridize.data.spec import DataSpec

__all__ = [
    "DataSpec",
    "Document",
    "PackedRows",
    "Row",
    "Split",
    "build_rows",
    "check_tokenizer",
    "plain_texts",
]
