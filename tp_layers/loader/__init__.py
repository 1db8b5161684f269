"""Checkpoints: read by every rank for its own shards, written back whole."""
