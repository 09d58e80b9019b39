"""Streaming: shards, the device slots that hold them, and the copies between slots and storage."""
