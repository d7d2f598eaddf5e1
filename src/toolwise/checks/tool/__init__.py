"""Is it a tool? What `toolwise check tool` tries on one."""
