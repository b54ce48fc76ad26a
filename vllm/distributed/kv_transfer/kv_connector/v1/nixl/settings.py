"""How a NixlConnector is set up: addresses, times, roles."""

from dataclasses import dataclass

from vllm import envs
from vllm.config import KVTransferConfig, VllmConfig


@dataclass(frozen=True, kw_only=True)
class NixlSettings:
    """Times are in seconds.

    `lease_s`: how long pages outlive the last word of an engine that reads them.
    `unclaimed_s`: how long they wait for its first. `read_timeout_s`: how long a read
    may take. `answer_timeout_s`: how long an engine may take to answer a question. A
    `port` of None is 5600 where that is free, else any.
    """

    serves: bool
    reads: bool
    host: str
    port: int | None
    lease_s: float
    unclaimed_s: float
    read_timeout_s: float
    answer_timeout_s: float

    @classmethod
    def from_config(cls, vllm_config: VllmConfig) -> "NixlSettings":
        """The values have been checked: see `check_settings`."""
        transfer = vllm_config.kv_transfer_config
        if transfer is None:
            raise ValueError("NixlConnector needs kv_transfer_config")
        is_set = envs.is_set("VLLM_NIXL_SIDE_CHANNEL_PORT")
        return cls(
            serves=transfer.is_kv_producer,
            reads=transfer.is_kv_consumer,
            host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
            port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT if is_set else None,
            lease_s=_seconds(transfer, "lease_s", 20),
            unclaimed_s=_seconds(
                transfer, "unclaimed_s", envs.VLLM_NIXL_ABORT_REQUEST_TIMEOUT
            ),
            read_timeout_s=_seconds(transfer, "read_timeout_s", 60),
            answer_timeout_s=_seconds(transfer, "answer_timeout_s", 5),
        )


def _seconds(transfer: KVTransferConfig, name: str, default: float) -> float:
    value = transfer.get_from_extra_config(name, None)
    return float(default if value is None else value)
