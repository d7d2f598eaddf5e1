"""Is it an environment? What `toolwise check env` tries on one."""
