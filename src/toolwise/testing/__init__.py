"""Utilities for testing asynchronous code: an event loop with virtual time."""
