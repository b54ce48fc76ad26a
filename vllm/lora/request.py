"""Names a LoRA adapter for a request. The engine hashes it; it applies none."""

import msgspec


class LoRARequest(msgspec.Struct, omit_defaults=True, array_like=True, frozen=True):
    """An adapter by name, number (at least 1) and path."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(
                f"lora_int_id {self.lora_int_id}: expected a number of at least 1"
            )

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name
