"""The sharded layers: a kernel, then a collective."""
