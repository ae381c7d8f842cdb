"""Stubs generated from proto/runtime/rpc/v1/runtime.proto; `make stubs` writes them again, a test compares."""
