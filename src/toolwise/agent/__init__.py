"""A trained router at work: route, conditioned prompt, one rollout with real tools; nothing learns here."""
