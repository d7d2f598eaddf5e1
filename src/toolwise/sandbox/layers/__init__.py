"""The hardening layers of a worker, and the probes that try to break through them."""
