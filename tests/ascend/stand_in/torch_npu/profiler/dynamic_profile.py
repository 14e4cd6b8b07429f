"""Of the stand-in for torch_npu."""
