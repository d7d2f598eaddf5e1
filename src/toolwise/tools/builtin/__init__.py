"""Tools that ship with Toolwise."""
