"""KV for another TP size, put together in staging memory before it leaves. Its door is ``resharder.py``."""
