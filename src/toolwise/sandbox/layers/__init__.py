"""What a worker puts on itself, layer by layer, and the probes that try to get through."""
