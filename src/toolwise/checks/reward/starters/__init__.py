"""Reward templates, one per mode, copied by `toolwise init reward`."""
