"""Files to begin with, one for each mode of a reward: `toolwise init reward` copies them as they are."""
