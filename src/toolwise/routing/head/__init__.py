"""The router's head: a small network on top of the actor's model, and its training."""

ROUTER_WEIGHTS_FILE, ROUTER_METADATA_FILE = "router.safetensors", "router.json"
"""The head's weights and its metadata, next to the model's weights."""
