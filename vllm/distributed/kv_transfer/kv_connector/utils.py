"""What connectors build on, under one name."""

from vllm.distributed.kv_transfer.kv_connector.aggregator import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.fingerprint import (
    FingerprintMismatch,
    LayerFingerprint,
    LayoutFingerprint,
    layout_fingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.page_table import (
    BlockMover,
    PageRow,
    page_table,
)

__all__ = [
    "BlockMover",
    "FingerprintMismatch",
    "KVOutputAggregator",
    "LayerFingerprint",
    "LayoutFingerprint",
    "PageRow",
    "layout_fingerprint",
    "page_table",
]
