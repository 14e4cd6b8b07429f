"""One request between its engines: its life, how engines are spoken to, and what proves a push."""
