"""One engine to read from: the handshake, its refusals, the reads.

Knows fingerprints and rows. Which blocks are read is told to it.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from vllm.distributed.kv_transfer.kv_connector.fingerprint import LayoutFingerprint
from vllm.distributed.kv_transfer.kv_connector.topology import (
    EngineTransferInfo,
    TransferTopology,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import (
    NixlAgent,
    Rows,
    TransferFailed,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    LoadOrder,
    RemotePrefill,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    Answer,
    Meet,
    Met,
    Refused,
    Release,
    Released,
    SideChannelLink,
)
from vllm.logger import init_logger

logger = init_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class OwnPages:
    """What this worker is, to its peers. `row_ids` are its rows by group, `regions` the
    memory to register."""

    model: str
    fingerprint: LayoutFingerprint
    topology: TransferTopology
    rows: Rows
    row_ids: tuple[np.ndarray, ...]
    regions: list[Any]
    block_bytes: tuple[int, ...]

    @property
    def tokens_a_block(self) -> int:
        return self.topology.block_size


class LoadRefused(TransferFailed):
    """These pages cannot be read; the connection to the other engine is sound."""


class PagesGone(LoadRefused):
    """The other engine has let the pages go."""


class Peer:
    """A rank of another engine. Every method may raise TransferFailed, after which, but
    for LoadRefused, the peer is to be closed and met anew."""

    def __init__(
        self,
        context: zmq.Context[Any],
        me: OwnPages,
        remote: RemotePrefill,
        answer_timeout_s: float,
    ) -> None:
        self.me = me
        self.engine_id = remote.engine_id
        self.where = f"the engine on {remote.host}:{remote.port}"
        self._timeout_s = answer_timeout_s
        self._agent: NixlAgent | None = None
        self._answers: dict[int, Answer] = {}
        try:
            (self._rank,) = me.topology.handshake_target_ranks(remote.tp_size)
            self._link = SideChannelLink(context, remote.host, remote.port)
        except ValueError as error:
            raise TransferFailed(f"{self.where} cannot be read: {error}") from error
        self._met = self._link.ask(Meet(self.engine_id, self._rank))
        self._deadline = time.monotonic() + answer_timeout_s

    def take_answers(self) -> None:
        self._answers.update(self._link.take_answers())

    # --- the handshake ----------------------------------------------------------------

    def is_ready(self) -> bool:
        """Says whether pages can be read."""
        if self._agent is not None:
            return True
        answer = self._answers.pop(self._met, None)
        if answer is None:
            self.expect_answer(self._deadline)
            return False
        if not isinstance(answer, Met):
            why = answer.reason if isinstance(answer, Refused) else "an odd answer"
            raise TransferFailed(f"{self.where} refuses a handshake: {why}")
        self._check(answer)
        rows = Rows(
            memory=answer.memory,
            device=answer.device,
            num_blocks=answer.num_blocks,
            runs=answer.runs,
        )
        agent = NixlAgent(
            f"{self.me.topology.engine_id}-reads-{self.engine_id}",
            self.me.rows,
            self.me.regions,
            serves=False,
        )
        try:
            agent.connect(answer.agent, rows)
        except TransferFailed:
            agent.close()
            raise
        self._agent, self._rows = agent, rows
        logger.info("KV pages come from %s", self.me.topology.describe(self.engine_id))
        return True

    def _check(self, met: Met) -> None:
        """Refuses, by name, an engine whose pages mean something else."""
        me = self.me
        try:
            if met.model != me.model:
                raise ValueError(
                    f"{self.where} has model {met.model}, this engine {me.model}, by "
                    "config, dtype and weights: their KV pages cannot be exchanged"
                )
            theirs = LayoutFingerprint.from_dict(met.fingerprint)
            me.fingerprint.check_same(theirs, self.where)
            mine = [num_bytes for _, num_bytes, _ in me.rows.runs]
            if mine != [num_bytes for _, num_bytes, _ in met.runs]:
                raise ValueError(
                    f"{self.where} cuts its pages into {len(met.runs)} other runs of "
                    f"bytes than this engine's {len(mine)}"
                )
            me.topology.unregister_remote_engine(met.engine_id)
            me.topology.register_remote_engine(
                met.engine_id,
                EngineTransferInfo(
                    remote_tp_size=met.tp_size,
                    remote_block_len=max(me.block_bytes),
                    remote_block_size=me.tokens_a_block,
                    remote_physical_blocks_per_logical=1,
                ),
            )
        except ValueError as error:
            raise TransferFailed(str(error)) from error

    def expect_answer(self, deadline: float) -> None:
        """TransferFailed when an answer is overdue."""
        if time.monotonic() > deadline:
            raise TransferFailed(
                f"{self.where} has not answered for {self._timeout_s:g} s"
            )

    # --- reads ------------------------------------------------------------------------

    def read(self, order: LoadOrder) -> Any:
        """Starts to read the blocks of an order."""
        mine, theirs = [], []
        me = self.me
        for row_ids, local, remote in zip(
            me.row_ids, order.local_block_ids, order.remote_block_ids, strict=True
        ):
            if max(remote, default=0) >= self._rows.num_blocks:
                raise LoadRefused(
                    f"block {max(remote)} is named, of {self._rows.num_blocks} that "
                    f"{self.where} has"
                )
            mine.append(me.rows.indices(row_ids, list(local)))
            theirs.append(self._rows.indices(row_ids, list(remote)))
        return self._ready_agent.read(np.concatenate(mine), np.concatenate(theirs))

    def is_read(self, handle: Any) -> bool:
        return self._ready_agent.is_done(handle)

    @property
    def _ready_agent(self) -> NixlAgent:
        if self._agent is None:
            raise TransferFailed(f"{self.where} is not connected")
        return self._agent

    def ask_release(self, remote: RemotePrefill) -> int:
        """Says that pages were read, and asks whether they were held until now."""
        return self._link.ask(Release(remote.claim, self.me.topology.tp_rank))

    def is_released(self, number: int, deadline: float) -> bool:
        """Says whether the answer has come. PagesGone when it was no."""
        answer = self._answers.pop(number, None)
        if answer is None:
            self.expect_answer(deadline)
            return False
        if not isinstance(answer, Released) or not answer.was_held:
            raise PagesGone(f"{self.where} let the pages go while they were read")
        return True

    def close(self) -> None:
        """Ends reads for certain: nothing is written to our pages afterwards."""
        self._link.close()
        if self._agent is not None:
            self._agent.close()
