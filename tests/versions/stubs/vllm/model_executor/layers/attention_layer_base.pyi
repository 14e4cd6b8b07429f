from vllm.v1.attention.backend import AttentionBackend

class AttentionLayerBase:
    def get_attn_backend(self) -> type[AttentionBackend]: ...
