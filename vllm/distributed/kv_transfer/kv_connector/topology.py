"""Which rank of another engine holds what a rank of this one needs.

Knows ranks, block sizes and counts of head slots. Refuses to know what a block means:
whether bytes may be exchanged at all is the layout fingerprint's matter.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.config import VllmConfig

EngineId = str


@dataclass(frozen=True)
class EngineTransferInfo:
    """What is known of another engine once it has answered a handshake.

    `remote_block_len` is bytes of a block, `remote_block_size` tokens of a block.
    """

    remote_tp_size: int
    remote_block_len: int
    remote_block_size: int
    remote_physical_blocks_per_logical: int
    remote_pp_rank: int = 0
    start_layer: int = 0
    end_layer: int = 0


@dataclass
class TransferTopology:
    """This rank among its own, and the engines it exchanges blocks with."""

    tp_rank: int
    tp_size: int
    block_size: int
    engine_id: EngineId
    total_num_kv_heads: int
    attn_backends: list[Any] = field(default_factory=list)
    tensor_shape: torch.Size | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(
                f"rank {self.tp_rank} is none of {self.tp_size} tensor-parallel ranks"
            )
        self._engines: dict[tuple[EngineId, int], EngineTransferInfo] = {}

    # --- engines ----------------------------------------------------------------------

    def register_remote_engine(
        self, remote_engine_id: EngineId, info: EngineTransferInfo
    ) -> EngineTransferInfo:
        """Notes an engine; the first facts about one of its pipeline ranks stay.

        ValueError for sizes that do not divide.
        """
        self.tp_ratio(info.remote_tp_size)
        self.block_size_ratio(info.remote_block_size)
        key = (remote_engine_id, info.remote_pp_rank)
        return self._engines.setdefault(key, info)

    def get_engine_info(
        self, remote_engine_id: EngineId, remote_pp_rank: int = 0
    ) -> EngineTransferInfo:
        """KeyError for an engine that was not registered."""
        return self._engines[remote_engine_id, remote_pp_rank]

    def unregister_remote_engine(self, remote_engine_id: EngineId) -> None:
        """Forgets every pipeline rank of an engine."""
        for key in [key for key in self._engines if key[0] == remote_engine_id]:
            del self._engines[key]

    # --- ratios -----------------------------------------------------------------------

    def tp_ratio(self, remote_tp_size: int) -> int:
        """How many ranks here share one there; negative: how many there share one
        here. ValueError when neither divides the other."""
        mine = self.tp_size
        if remote_tp_size > 0 and mine % remote_tp_size == 0:
            return mine // remote_tp_size
        if remote_tp_size > 0 and remote_tp_size % mine == 0:
            return -(remote_tp_size // mine)
        raise ValueError(
            f"tensor-parallel sizes {mine} here and {remote_tp_size} there: expected "
            "one to be a multiple of the other"
        )

    def block_size_ratio(self, remote_block_size: int) -> int:
        """How many blocks there make one here. ValueError when it is no whole
        number."""
        if remote_block_size <= 0 or self.block_size % remote_block_size:
            raise ValueError(
                f"blocks of {self.block_size} tokens here and {remote_block_size} "
                "there: expected a multiple"
            )
        return self.block_size // remote_block_size

    def is_kv_replicated(
        self, remote_engine_id: EngineId, remote_pp_rank: int = 0
    ) -> bool:
        """Says whether several ranks there hold the same head slot."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return info.remote_tp_size > self.total_num_kv_heads

    def replicates_kv_cache(
        self, remote_engine_id: EngineId, remote_pp_rank: int = 0
    ) -> bool:
        """Says whether one rank there is as good as another: there is one head slot,
        or each is held several times."""
        return self.total_num_kv_heads == 1 or self.is_kv_replicated(
            remote_engine_id, remote_pp_rank
        )

    # --- ranks ------------------------------------------------------------------------

    def handshake_target_ranks(self, remote_tp_size: int) -> list[int]:
        """The ranks there that this one has to know."""
        ratio = self.tp_ratio(remote_tp_size)
        if ratio > 0:
            return [self.tp_rank // ratio]
        return [self.tp_rank * -ratio + index for index in range(-ratio)]

    def target_remote_ranks(
        self, remote_engine_id: EngineId, remote_pp_rank: int = 0
    ) -> list[int]:
        """The ranks there from which this one reads: one is enough where all hold the
        same."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        ranks = self.handshake_target_ranks(info.remote_tp_size)
        if self.replicates_kv_cache(remote_engine_id, remote_pp_rank):
            return ranks[:1]
        return ranks

    def describe(self, remote_engine_id: EngineId, remote_pp_rank: int = 0) -> str:
        """One line for a log."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return (
            f"engine {remote_engine_id}: {info.remote_tp_size} ranks (here "
            f"{self.tp_size}), blocks of {info.remote_block_size} tokens and "
            f"{info.remote_block_len} bytes, read from ranks "
            f"{self.target_remote_ranks(remote_engine_id, remote_pp_rank)}"
        )


def get_current_attn_backend(
    vllm_config: VllmConfig, layer_names: list[str] | None = None
) -> Any:
    """The attention backend class of the first of these layers that has one; of any
    layer without names. ValueError when none has."""
    layers = vllm_config.compilation_config.static_forward_context
    for name in layers if layer_names is None else layer_names:
        backend = getattr(layers.get(name), "attn_backend", None)
        if backend is not None:
            return backend
    raise ValueError(
        f"no layer of {layer_names or 'the model'} has an attention backend: expected "
        "the names of attention layers, once the model is built"
    )
