"""The offline tool: inspect, convert, import, export and verify; no Megatron, no process group."""
