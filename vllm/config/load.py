"""Where weights come from and how they are read."""

from typing import Any, Literal

from pydantic import Field

from vllm.config.utils import config

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]


@config
class LoadConfig:
    """`load_format` auto reads what the model's source is: safetensors or GGUF."""

    load_format: LoadFormat = "auto"
    download_dir: str | None = None
    model_loader_extra_config: dict[str, Any] = Field(default_factory=dict)
    ignore_patterns: list[str] | str | None = None
    use_tqdm_on_load: bool = True
