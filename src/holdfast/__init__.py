"""Holdfast keeps messages from getting lost: durable queues, retries, dead letters and their recovery."""

__version__ = "0.1.0"
