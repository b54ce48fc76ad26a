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
from vllm.distributed.kv_transfer.kv_connector.topology import (
    EngineId,
    EngineTransferInfo,
    TransferTopology,
    get_current_attn_backend,
)

__all__ = [
    "BlockMover",
    "EngineId",
    "EngineTransferInfo",
    "FingerprintMismatch",
    "KVOutputAggregator",
    "LayerFingerprint",
    "LayoutFingerprint",
    "PageRow",
    "TransferTopology",
    "get_current_attn_backend",
    "layout_fingerprint",
    "page_table",
]
