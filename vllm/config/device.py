"""Which device the engine runs on."""

from dataclasses import field
from typing import Any, Literal

import torch

from vllm import envs
from vllm.config.utils import config

Device = Literal["auto", "cuda", "cpu"]


@config
class DeviceConfig:
    """`device` as asked for; `device_type` is "cpu" or "cuda" once resolved."""

    device: Any = "auto"
    device_type: str = field(default="", init=False)

    def __post_init__(self) -> None:
        if isinstance(self.device, torch.device):
            self.device_type = self.device.type
        elif self.device == "auto":
            on_gpu = envs.VLLM_TARGET_DEVICE != "cpu" and torch.cuda.is_available()
            self.device_type = "cuda" if on_gpu else "cpu"
        elif self.device in ("cpu", "cuda"):
            self.device_type = self.device
        else:
            raise ValueError(
                f"unknown device {self.device!r}: expected auto, cpu or cuda"
            )
        self.device = torch.device(self.device_type)
