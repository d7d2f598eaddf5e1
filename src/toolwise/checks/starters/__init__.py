"""Templates of a tool, an environment and a configuration, copied by `toolwise init`."""
