"""Memory that another process may read, through nixl.

The one module that calls the package. Knows addresses and lengths.
"""

import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.page_table import Cache, PageRow
from vllm.utils.import_utils import has_module, resolve

# The meta package, then what it stands for: each has the same modules.
_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12", "nixl_rocm")
_BACKEND = "UCX"


class TransferFailed(Exception):
    """The other side is gone, or bytes did not come."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Where an engine's pages lie, as its peers need it: each row is (address, bytes of
    a run, bytes between two blocks), in the order of its page table."""

    memory: str  # DRAM or VRAM
    device: int
    num_blocks: int
    runs: list[tuple[int, int, int]]

    def table(self) -> np.ndarray:
        """[rows, 5] uint64: address, bytes, device, stride, blocks."""
        return np.array(
            [
                (address, num_bytes, self.device, stride, self.num_blocks)
                for address, num_bytes, stride in self.runs
            ],
            dtype=np.uint64,
        )

    def indices(self, row_ids: np.ndarray, block_ids: list[int]) -> np.ndarray:
        """Positions in the list that `table` stands for: int32, row by row."""
        grid = row_ids[:, None] * self.num_blocks + np.array(block_ids)[None, :]
        return grid.ravel().astype(np.int32)


def rows_of(
    page_rows: list[PageRow], kv_caches: dict[str, Cache], num_blocks: int
) -> Rows:
    """The rows of a page table. ValueError when caches lie on several devices."""
    devices = {tensor.device for tensor in _tensors(kv_caches)}
    if len(devices) != 1:
        raise ValueError(
            f"KV caches lie on {sorted(map(str, devices))}: expected one device"
        )
    device = devices.pop()
    return Rows(
        memory="DRAM" if device.type == "cpu" else "VRAM",
        device=device.index or 0,
        num_blocks=num_blocks,
        runs=[(row.address, row.num_bytes, row.block_stride) for row in page_rows],
    )


def regions_of(kv_caches: dict[str, Cache], device: int) -> list[tuple[Any, ...]]:
    """The memory under the caches, once each: (address, bytes, device, "")."""
    storages = {}
    for tensor in _tensors(kv_caches):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return [(address, size, device, "") for address, size in storages.items()]


def _tensors(kv_caches: dict[str, Cache]) -> list[Any]:
    found: list[Any] = []
    for cache in kv_caches.values():
        found.extend(cache if isinstance(cache, list) else [cache])
    return found


def nixl_module() -> str:
    """The name of the installed package. ValueError when there is none."""
    for name in _PACKAGES:
        if has_module(name):
            return name
    raise ValueError(
        "NixlConnector needs the package nixl: pip install nixl-cu12 (or nixl-cu13)"
    )


class NixlAgent:
    """One endpoint of transfers over registered memory. Not thread-safe.

    Closing it is the only certain end of a read whose other side is silent: neither
    releasing a transfer nor forgetting the peer keeps late bytes from being written.
    """

    def __init__(self, name: str, rows: Rows, regions: list[Any], serves: bool) -> None:
        """`serves`: others read from here, so a thread of nixl's own moves things on.

        ValueError without nixl, or when memory cannot be registered.
        """
        module = nixl_module()
        make_config = resolve(f"{module}._api:nixl_agent_config")
        config = make_config(enable_prog_thread=serves, backends=[_BACKEND])
        self.rows = rows
        self.name = f"{name}-{uuid.uuid4().hex[:8]}"
        self._api: Any = resolve(f"{module}._api:nixl_agent")(self.name, config)
        if _BACKEND not in self._api.backends:
            raise ValueError(
                f"nixl has no {_BACKEND} backend (it found {self._api.plugin_list}): "
                "install nixl-cu12 or nixl-cu13 whole"
            )
        try:
            self._registered = self._api.register_memory(regions, rows.memory)
        except Exception as error:
            raise ValueError(
                f"nixl cannot register the KV cache ({rows.memory}, {regions}): {error}"
            ) from error
        self._peer_name: Any = None
        self._sides: list[Any] = []
        self._reads: set[Any] = set()

    def metadata(self) -> bytes:
        """What a peer needs to connect."""
        return bytes(self._api.get_agent_metadata())

    def connect(self, metadata: bytes, rows: Rows) -> None:
        """Makes ready to read a peer's pages into ours, row by row."""
        try:
            self._peer_name = self._api.add_remote_agent(metadata)
            self._sides = [
                self._api.prep_xfer_dlist(
                    "NIXL_INIT_AGENT", self.rows.table(), self.rows.memory
                ),
                self._api.prep_xfer_dlist(self._peer_name, rows.table(), rows.memory),
            ]
        except Exception as error:
            raise TransferFailed(f"cannot connect: {_text(error)}") from error

    def read(self, mine: np.ndarray, theirs: np.ndarray) -> Any:
        """Starts to read runs of the peer into ours; may return when all is done.

        TransferFailed when the peer is gone.
        """
        local, remote = self._sides
        try:
            handle = self._api.make_prepped_xfer("READ", local, mine, remote, theirs)
        except Exception as error:
            raise TransferFailed(_text(error)) from error
        self._reads.add(handle)
        try:
            state = self._api.transfer(handle)
        except Exception as error:
            self._forget(handle)
            raise TransferFailed(_text(error)) from error
        self._check(handle, state)
        return handle

    def is_done(self, handle: Any) -> bool:
        """Says whether a read has ended well. TransferFailed when it has failed."""
        if handle not in self._reads:
            return True
        try:
            state = self._api.check_xfer_state(handle)
        except Exception as error:
            self._forget(handle)
            raise TransferFailed(_text(error)) from error
        return self._check(handle, state)

    def _check(self, handle: Any, state: str) -> bool:
        if state == "PROC":
            return False
        self._forget(handle)
        if state != "DONE":
            raise TransferFailed(f"a read ended with {state}")
        return True

    def _forget(self, handle: Any) -> None:
        self._reads.discard(handle)
        handle.release()

    def close(self) -> None:
        """Ends everything; afterwards nothing is written to our memory any more."""
        api, self._api = self._api, None
        if api is None:
            return
        for handle in [*self._reads, *self._sides]:
            _quietly(handle.release)
        self._reads.clear()
        self._sides = []
        _quietly(lambda: api.deregister_memory(self._registered))
        # The wrapper is dropped with its last reference; what counts is the agent.
        api.agent = None


def _quietly(act: Any) -> None:
    try:
        act()
    except Exception:
        return  # of a peer that is gone; the agent ends anyway


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
