class LoRARequest:
    is_3d_lora_weight: bool
    load_inplace: bool
    lora_int_id: int
    lora_name: str
    lora_path: str
    tensorizer_config_dict: dict[str, object] | None
