"""How each prompt begins: which messages, which tools."""
