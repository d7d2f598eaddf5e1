"""Rewards that ship with Toolwise."""
