"""The router: one OpenAI endpoint in front of prefill and decode engines. ``core`` decides, the other folders act."""
