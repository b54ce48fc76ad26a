"""The scheduler side: which prompts lie in another engine, and which of ours others
may still read.

Knows requests and block ids by group. Knows nothing of bytes.
"""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import zmq

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import TransferStats
from vllm.distributed.kv_transfer.kv_connector.v1.model_identity import model_identity
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.keeper import Hold, Keeper
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.leases import Leases
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NO_BLOCK,
    PARAMETER,
    LoadOrder,
    NixlAgentMetadata,
    NixlConnectorMetadata,
    RemotePrefill,
    check_wishes,
    prompt_digest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.settings import NixlSettings
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    PROTOCOL,
    Answer,
    Held,
    Meet,
    Met,
    Question,
    Refused,
    Release,
    Released,
    Renew,
    SideChannelServer,
)
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

_DEFAULT_PORT = 5600
# How a request ends whose prompt is computed.
_COMPUTED = (FinishReason.LENGTH, FinishReason.STOP)


@dataclass
class _Source:
    """Pages of one prompt in another engine, and our requests that want them. They are
    read once: `is_spent` says that nothing more is to be had."""

    remote: RemotePrefill
    users: set[str] = field(default_factory=set)
    loader: str | None = None
    is_spent: bool = False


@dataclass
class _User:
    """One request of ours. `end`: how many of its tokens the pages hold, once asked."""

    source: _Source
    num_local: int = 0
    end: int | None = None


class NixlConnectorScheduler:
    """Requests with `do_remote_prefill` are loaded, those with `do_remote_decode` are
    held until they were read. One with `do_remote_release` says that nobody will."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        self.engine_id = engine_id
        self.settings = settings = NixlSettings.from_config(vllm_config)
        self.tp_size = vllm_config.parallel_config.tensor_parallel_size
        self.model = model_identity(vllm_config)
        self.stats = TransferStats()
        self.leases = Leases(unclaimed_s=settings.unclaimed_s, lease_s=settings.lease_s)
        self.keeper = Keeper(settings.answer_timeout_s)
        self._sizes = [
            g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups
        ]
        self._managers: list[Any] = []
        self._can_step_back = True
        self._workers: dict[int, NixlAgentMetadata] = {}
        self._server: SideChannelServer | None = None
        self._sources: dict[tuple[str, ...], _Source] = {}
        self._users: dict[str, _User] = {}
        self._held: dict[str, str] = {}  # request ids by lease
        self._loads: list[LoadOrder] = []

    def bind(self, kv_cache_manager: Any) -> None:
        """Takes the engine's KV cache manager. ValueError for groups whose blocks do
        not follow the tokens of a prompt."""
        coordinator = kv_cache_manager.coordinator
        self._managers = list(coordinator.single_type_managers)
        self._can_step_back = coordinator.can_step_back
        if any(manager.counts_encoder_tokens for manager in self._managers):
            raise ValueError(
                "NixlConnector does not serve models with an encoder: serve this one "
                "without --kv-transfer-config"
            )

    # --- the side channel -------------------------------------------------------------

    def open(self, workers: dict[int, NixlAgentMetadata]) -> None:
        """Starts to answer other engines; `workers` are ours by rank. ValueError when
        the port is in use."""
        self._workers = workers
        port = self.settings.port
        host = self.settings.host
        try:
            self._server = SideChannelServer(
                host, _DEFAULT_PORT if port is None else port, self.answer
            )
        except zmq.ZMQError as error:
            if port is not None:
                raise ValueError(
                    f"cannot answer other engines on {host}:{port} ({error}): set "
                    "VLLM_NIXL_SIDE_CHANNEL_HOST and VLLM_NIXL_SIDE_CHANNEL_PORT to "
                    "what is free (port 0: any)"
                ) from error
            self._server = SideChannelServer(host, 0, self.answer)
        logger.info("Other engines reach this one on %s:%d", host, self._server.port)

    def answer(self, question: Question) -> Answer:
        """Called by the side channel's thread."""
        if isinstance(question, Renew):
            return Held(self.leases.renew(question.claims), self.leases.lease_s)
        if isinstance(question, Release):
            return Released(self.leases.release(question.claim, question.rank))
        return self._introduce(question)

    def _introduce(self, question: Meet) -> Met | Refused:
        if question.protocol != PROTOCOL:
            return Refused(
                f"it speaks version {PROTOCOL} of the side channel, not "
                f"{question.protocol}"
            )
        if question.engine_id != self.engine_id:
            return Refused(f"it is engine {self.engine_id}, not {question.engine_id}")
        worker = self._workers.get(question.rank)
        if worker is None:
            return Refused(f"it has no rank {question.rank}")
        return Met(
            engine_id=self.engine_id,
            model=self.model,
            fingerprint=worker.fingerprint,
            tp_size=self.tp_size,
            agent=worker.agent,
            memory=worker.rows.memory,
            device=worker.rows.device,
            num_blocks=worker.rows.num_blocks,
            runs=worker.rows.runs,
        )

    # --- requests come ----------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """ValueError for `kv_transfer_params` that no prefill engine has made."""
        params = request.kv_transfer_params or {}
        check_wishes(params)
        self._warn_of_role(params)
        if params.get("do_remote_release") and self.settings.reads:
            self.keeper.release(RemotePrefill.from_params(params))
        elif params.get("do_remote_prefill") and self.settings.reads:
            remote = RemotePrefill.from_params(params)
            if len(remote.block_ids) != len(self._sizes):
                raise VLLMValidationError(
                    f"kv_transfer_params name blocks of {len(remote.block_ids)} KV "
                    f"cache groups, this engine has {len(self._sizes)}: expected the "
                    "same model, served in the same way",
                    parameter=PARAMETER,
                )
            source = self._sources.setdefault(remote.key, _Source(remote))
            source.users.add(request.request_id)
            self._users[request.request_id] = _User(source)
            if not source.is_spent:
                self.keeper.keep(remote)
        elif (
            params.get("do_remote_decode")
            and self.settings.serves
            and not self._can_step_back
            and request.num_prompt_tokens > 1
        ):
            # The reader computes the last token itself, for its logits: from the
            # states before it, which are gone once it is computed.
            request.drop_last_prompt_token()

    def _warn_of_role(self, params: dict[str, Any]) -> None:
        """A request that is sent to the wrong engine is computed all the same."""
        for wish, can, role in (
            ("do_remote_prefill", self.settings.reads, "kv_consumer"),
            ("do_remote_decode", self.settings.serves, "kv_producer"),
        ):
            if params.get(wish) and not can:
                logger.warning_once(
                    "a request asks for %s, which takes kv_role %s or kv_both: it is "
                    "computed here, and its KV pages stay here",
                    wish,
                    role,
                )

    # --- requests are admitted --------------------------------------------------------

    def find(self, request: Any, num_local: int) -> tuple[int | None, bool]:
        """Tokens that can be read after the first `num_local`; None while that is not
        known."""
        user = self._users.get(request.request_id)
        if user is None or user.source.is_spent:
            return 0, False
        source = user.source
        if source.loader is not None:
            # Another one of ours reads them, and may leave them in the prefix cache.
            return (0, False) if source.loader == request.request_id else (None, False)
        hold = self.keeper.state(source.remote.key)
        if hold is Hold.ASKED:
            return None, False
        if user.end is None:
            user.end = self._end_of(request, source.remote)
        if user.end <= num_local:
            return 0, False
        if hold is Hold.GONE:
            logger.warning(
                "KV pages of request %s are gone: its prompt is computed here",
                source.remote.name,
            )
            source.is_spent = True
            return 0, False
        user.num_local = num_local
        return user.end - num_local, True

    def _end_of(self, request: Any, remote: RemotePrefill) -> int:
        """How many tokens of a request the pages hold; 0 when they are of no use. Its
        last token is computed here."""
        end = min(remote.num_tokens, request.num_tokens - 1)
        digest = prompt_digest(request, remote.num_tokens)
        why = ""
        if remote.num_tokens > request.num_tokens or digest != remote.prompt_hash:
            why = "their prompt is another one"
        elif end != remote.num_tokens and not self._can_step_back:
            why = f"they are states after {remote.num_tokens} tokens, not {end}"
        elif any(
            not 0 <= index < len(ids) or ids[index] == NO_BLOCK
            for group_id, ids in enumerate(remote.block_ids)
            for index in self._positions(group_id, 0, end)
        ):
            why = "some are missing"
        if why:
            logger.warning("KV pages of request %s are not used: %s", remote.name, why)
            return 0
        return end

    def _positions(self, group_id: int, num_local: int, end: int) -> range:
        """Blocks of a group that it takes to go on after `end` tokens."""
        manager, size = self._managers[group_id], self._sizes[group_id]
        first = max(manager.get_num_skipped_tokens(end), num_local) // size
        return range(first, min(cdiv(end, size), manager.num_required_blocks(end)))

    def admitted(self, request: Any, blocks: Any, num_external: int) -> None:
        """Orders a read into the blocks of a request; 0 tokens: it needs none."""
        user = self._users.get(request.request_id)
        if user is None or user.source.loader == request.request_id:
            return
        source, num_local = user.source, user.num_local
        if not num_external or source.is_spent:
            self._leave(request.request_id)
            return
        ours, theirs = [], []
        for group_id, group in enumerate(blocks.blocks):
            places = self._positions(group_id, num_local, num_local + num_external)
            used = [index for index in places if not group[index].is_null]
            ours.append(tuple(group[index].block_id for index in used))
            ids = source.remote.block_ids[group_id]
            theirs.append(tuple(ids[index] for index in used))
        source.loader = request.request_id
        is_refused = self.keeper.state(source.remote.key) is Hold.REFUSED
        self._loads.append(
            LoadOrder(
                request_id=request.request_id,
                remote=source.remote,
                local_block_ids=tuple(ours),
                remote_block_ids=tuple(theirs),
                refusal=source.remote.refusal if is_refused else None,
            )
        )

    # --- requests go ------------------------------------------------------------------

    def loads_are_over(self, request_ids: Iterable[str], failed: bool) -> None:
        for request_id in request_ids:
            user = self._users.get(request_id)
            if user is None or user.source.loader != request_id:
                continue  # another connector's
            source = user.source
            source.loader, source.is_spent = None, True
            # Who has read them has released them.
            self.keeper.drop(source.remote.key, release=failed)
            self._leave(request_id)

    def _leave(self, request_id: str) -> None:
        """A request wants no pages any more. The last one lets them go."""
        user = self._users.pop(request_id, None)
        if user is None:
            return
        source = user.source
        source.users.discard(request_id)
        if not source.users:
            del self._sources[source.remote.key]
            self.keeper.drop(source.remote.key, release=not source.is_spent)

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether a request's blocks are held for a reader, and what to tell it."""
        user = self._users.get(request.request_id)
        if user is not None and user.source.loader != request.request_id:
            self._leave(request.request_id)
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or self._server is None:
            return False, None
        num_tokens = request.num_prompt_tokens
        if (
            request.get_finished_reason()
            not in (FinishReason.LENGTH, FinishReason.STOP)
            or request.num_output_tokens != 1
            or request.num_computed_tokens != num_tokens
        ):
            logger.warning_once(
                "a request with do_remote_decode did not end after its first token: "
                "set max_tokens to 1. Its KV pages are not kept"
            )
            return False, None
        # Ids of requests come again; a late reader must not take one for another.
        lease_id = f"{request.request_id}-{uuid.uuid4().hex}"
        self._held[lease_id] = request.request_id
        remote = RemotePrefill(
            engine_id=self.engine_id,
            request_id=lease_id,
            host=self.settings.host,
            port=self._server.port,
            tp_size=self.tp_size,
            num_tokens=num_tokens,
            block_ids=tuple(
                self._kept(group_id, ids, num_tokens)
                for group_id, ids in enumerate(block_ids)
            ),
            prompt_hash=prompt_digest(request, num_tokens),
        )
        self.leases.hold(*remote.claim, num_readers=self.tp_size)
        return True, remote.to_params()

    def _kept(self, group_id: int, ids: list[int], num_tokens: int) -> tuple[int, ...]:
        null = self._managers[group_id].block_pool.null_block.block_id
        end = min(len(ids), cdiv(num_tokens, self._sizes[group_id]))
        return tuple(NO_BLOCK if i == null else i for i in ids[:end])

    # --- a step -----------------------------------------------------------------------

    def take_orders(self) -> NixlConnectorMetadata:
        read, expired = self.leases.take_over()
        if expired:
            logger.warning(
                "KV pages of %d requests are freed, since nobody has asked for them in "
                "time: %s",
                len(expired),
                ", ".join(sorted(expired)),
            )
            self.stats.count(expired_requests=len(expired))
        loads, self._loads = self._loads, []
        sent = {self._held.pop(lease_id) for lease_id in read | expired}
        return NixlConnectorMetadata(loads=loads, sent=sent)

    @property
    def has_work(self) -> bool:
        """Says whether steps are needed though no request is left."""
        return len(self.leases) > 0 or any(
            source.loader is not None for source in self._sources.values()
        )

    def shutdown(self) -> None:
        self.keeper.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()


NixlPullConnectorScheduler = NixlConnectorScheduler
